"""Shapes against config.json: what transformers would refuse is named, and no class of transformers raises an alarm."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
import transformers
from names import zoo

from ckpt_tools.checkpoint.names import config_misfits
from ckpt_tools.preflight.shrink_run import cut_depth

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 64,
    "intermediate_size": 96,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (32000, 64),
    "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "lm_head.weight": (32000, 64),
}
RESIZED = {"model.embed_tokens.weight": (32003, 64), "lm_head.weight": (32003, 64)}
NESTED = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": LLAMA,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 48},
}


@pytest.mark.parametrize(
    ("config", "shapes", "found"),
    [
        (LLAMA, {}, []),
        (LLAMA, RESIZED, ["model.embed_tokens.weight has 32003 rows, but config.json has vocab_size 32000"]),
        (LLAMA, {"_orig_mod.model.embed_tokens.weight": (9, 64)}, ["_orig_mod.model.embed_tokens.weight has 9 rows"]),
        (LLAMA, {"model.layers.0.mlp.gate_proj.weight": (100, 64)}, ["model.layers.0.mlp.gate_proj.weight has 100"]),
        (LLAMA, {"model.layers.1.mlp.gate_proj.weight": (192, 64)}, []),  # layers of two widths
        (NESTED, {}, []),
        (NESTED, RESIZED, ["model.embed_tokens.weight has 32003 rows, but config.json has vocab_size 32000"]),
        (NESTED | {"text_config": {"model_type": "llama"}}, RESIZED, []),  # its class's defaults
        ({**LLAMA, "auto_map": {}, "architectures": ["OwnForCausalLM"]}, RESIZED, []),
        ({**LLAMA, "pad_vocab_size_multiple": 8}, RESIZED, []),
        ({"_class_name": "FluxTransformer2DModel", "hidden_size": 3}, RESIZED, []),
        (LLAMA, {"model.embed_tokens.weight": (32000, 8), "model.embed_tokens.scales": (32000, 1)}, []),  # MLX
        (LLAMA, {"lm_head.weight": (1024000, 1), "lm_head.weight.absmax": (32000,)}, []),  # bitsandbytes
    ],
)
def test_a_misfit_is_a_sentence(config, shapes, found) -> None:
    wrong = config_misfits(config, {**SHAPES, **shapes}.items())
    assert len(wrong) == len(found)
    assert all(one.startswith(start) for one, start in zip(wrong, found, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("at", range(8))
def test_no_class_of_transformers_contradicts_its_own_config(at: int, request) -> None:
    """All 1,522 that build, with `--zoo`: by their defaults and small, as written whole and as the difference."""
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    kinds = [one for name in sorted(dir(transformers)) if isinstance(one := getattr(transformers, name, None), type)]
    kinds = [one for one in kinds if issubclass(one, transformers.PreTrainedModel) and one.config_class is not None]
    tried, wrong, unseen = 0, {}, []
    for kind in kinds[at :: 8 if request.config.getoption("--zoo") else 8 * 16]:
        try:
            plain = cut_depth(json.loads(kind.config_class().to_json_string(use_diff=False)))
        except Exception:  # every class checks its config in its own way
            continue
        for values in (plain, zoo._shrunk(plain)):
            try:
                config = kind.config_class.from_dict(copy.deepcopy(values))
                with torch.device("meta"):
                    shapes = {name: tuple(one.shape) for name, one in kind(config).state_dict().items()}
            except Exception:
                continue
            tried += 1
            for is_diff in (False, True):
                written = json.loads(config.to_json_string(use_diff=is_diff)) | {"architectures": [kind.__name__]}
                wrong |= {kind.__name__: found} if (found := config_misfits(written, shapes.items())) else {}
            more = {n: (s[0] + 3, *s[1:]) for n, s in shapes.items() if n.endswith("embed_tokens.weight")}
            if more and not config_misfits(written, {**shapes, **more}.items()):
                unseen.append(kind.__name__)
    assert wrong == {}
    assert tried >= 15
    assert len(unseen) <= tried // 5, unseen
