"""Small models as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path

THREE = {"num_hidden_layers": 3}
KINDS = {
    "llama": ("llama", THREE),
    # Dropout as the paper has it: a smoke run has to turn it off to compare anything.
    "bert": ("bert", THREE | {"hidden_dropout_prob": 0.1}),
    "t5": ("t5", {}),
    "moe": ("qwen3-moe", THREE),
    "classifier": ("bert-classifier", THREE),
    "bare": ("llama-bare", THREE),
    "llava": ("llava", {}),
    "vit": ("vit", {"num_labels": 5}),
}


def make(directory, *kinds):
    """Write each kind of model into a directory of its name."""
    import torch
    import toys

    for kind in kinds or KINDS:
        name, settings = KINDS[kind]
        dtype = torch.bfloat16 if kind == "bare" else torch.float32
        toys.save(name, f"{directory}/{kind}", dtype=dtype, **settings)


def load_by_dcp(model, checkpoint, works):
    """Load a checkpoint into a live transformers model as a trainer would: `works` says whether that must succeed."""
    import pytest
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.checkpoint.api import CheckpointException

    names = json.loads((Path(model) / "config.json").read_text())["architectures"]
    live = getattr(transformers, names[0]).from_pretrained(model)
    state = live.state_dict()
    if works:
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        return
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)


def configs(directory, *names):
    """Write a small config of every class of transformers, with the dropout that it has."""
    from names.zoo import small_config

    for name in names:
        path = Path(directory) / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(small_config(name)))
