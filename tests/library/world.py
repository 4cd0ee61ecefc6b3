"""What the examples of the functions name: models, checkpoints, an adapter, a run, a config, all small."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import save_file
from tending.runs import flip, make_template, save_step

import ckpt_tools
from ckpt_tools.convert import run as convert_run
from ckpt_tools.errors import StorageError

CONFIG = """
[training]
dtype = "float32"
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
seq_len = 64
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
[checkpoint]
enable = true
interval = 500
"""


_RUNS_A_MODEL = re.compile(r"(estimate|smoke)( model .*)?$|preflight .*--no-smoke")


def params(rows: Iterable[tuple[Any, ...]], *more: Any) -> list[Any]:
    """Rows that end in a command line, or in a function's name, as parameters; a model runs in the full tier alone."""
    marks = [pytest.mark.full, *more]
    return [pytest.param(*row, marks=marks if _RUNS_A_MODEL.match(row[-1]) else ()) for row in rows]


def make(root: Path) -> Path:
    """Write everything below `root`."""
    toys.save("llama", root / "model")
    model = toys.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    model.save_pretrained(root / "tuned")
    ckpt_tools.shard(root / "model", root / "model-dp8", mesh=8)
    _save_adapter(root / "adapter")
    _save_parts(root)
    template = make_template(root / "template")
    for step in (1, 2):
        save_step(root / "run", step, template=template)
    ckpt_tools.watch(root / "run", once=True, settle=0)
    names = sorted(model.state_dict())
    (root / "names.txt").write_text("\n".join(["[*]", *(f"{name} = net.{name}" for name in names)]) + "\n")
    (root / "train.toml").write_text(CONFIG)
    _damage(root)
    return root


def _save_adapter(directory: Path, effect: float = 1.0) -> None:
    """Write an adapter as PEFT does."""
    directory.mkdir()
    factors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        factors[f"{name}.lora_A.weight"] = torch.ones(2, 32)
        factors[f"{name}.lora_B.weight"] = torch.full((32, 2), effect)
    save_file(factors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    config |= {"base_model_name_or_path": "org/base"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def _save_parts(root: Path) -> None:
    """Write all parts of a conversion, whose last one dies before it publishes."""

    def die(*_: object, **__: object) -> None:
        raise StorageError("the machine is gone")

    ckpt_tools.shard(root / "model", root / "model-parts", mesh=2, part="0/2")
    with pytest.MonkeyPatch.context() as dying:
        dying.setattr(convert_run, "commit", die)
        with pytest.raises(StorageError, match="the machine is gone"):
            ckpt_tools.shard(root / "model", root / "model-parts", mesh=2, part="1/2")


def _damage(root: Path) -> None:
    """Copy the sharded checkpoint with a changed byte, and with a file less; the run with a damaged step."""
    shutil.copytree(root / "model-dp8", root / "damaged")
    file = root / "damaged" / "__3_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(toys.build("llama").lm_head.weight[24:32].detach().numpy().tobytes())] ^= 255
    file.write_bytes(content)
    shutil.copytree(root / "model-dp8", root / "incomplete")
    (root / "incomplete" / "__5_0.distcp").unlink()
    shutil.copytree(root / "run", root / "bad-run", ignore=shutil.ignore_patterns(".ckpt*"))
    flip(root / "bad-run" / "step-2" / "__0_0.distcp")
    (root / "evil").mkdir()
    (root / "evil" / "model.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    _save_adapter(root / "dead", effect=0.0)
