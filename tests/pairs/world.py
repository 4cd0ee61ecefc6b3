"""What the rows of the gate are about: a toy Llama, stored in every format below every root, and what must come out.

Everything here is plain torch: what a command must write is computed from the model, not by ckpt.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from formats.saved import save_ranks
from oracle.seeds import save_dcp, save_safetensors, save_split
from torch.distributed.tensor import Shard

from ckpt_tools import api

Model = dict[str, torch.Tensor]
_SIZE = 128
"""One block of `--quantize`."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _SIZE,
    "num_hidden_layers": 2,
    "intermediate_size": _SIZE,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "head_dim": _SIZE // 2,
}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_LINEAR = (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SHAPES = {f"{x}.weight": (_SIZE, _SIZE) for x in _LINEAR} | {f"{x}.weight": (_SIZE,) for x in _NORMS}
_TITAN = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.norm.": "norm.",
    "model.layers": "layers",
    "self_attn.o_proj": "attention.wo",
    **{f"self_attn.{x}_proj": f"attention.qkv_linear.w{x}" for x in "qkv"},
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OWN = {**_TITAN, "mlp.down_proj": "ffn.down", "lm_head.": "output."} | {
    f"self_attn.{x}_proj": f"att.{x}" for x in "qkvo"
}
MAP = "\n".join(
    [
        *("[llama]", "model.embed_tokens.weight = tok_embeddings.weight", "model.norm.weight = norm.weight"),
        *("lm_head.weight = output.weight", "model.layers.*.mlp.down_proj.weight = layers.*.ffn.down.weight"),
        *(f"model.layers.*.self_attn.{x}_proj.weight = layers.*.att.{x}.weight" for x in "qkvo"),
        "model.layers.*.input_layernorm.weight = layers.*.attention_norm.weight",
        "model.layers.*.post_attention_layernorm.weight = layers.*.ffn_norm.weight",
        "model.layers.*.mlp.gate_proj.weight, model.layers.*.mlp.up_proj.weight = layers.*.ffn.gu.weight : cat 0",
    ]
)


def hub(times: float = 1.0) -> Model:
    """The model by the hub's names: floats with few digits, so that means of it are exact, norms in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    names = {f"model.layers.{i}.{n}": shape for i in range(2) for n, shape in _SHAPES.items()}
    names |= {"model.embed_tokens.weight": (32, _SIZE), "model.norm.weight": (_SIZE,), "lm_head.weight": (32, _SIZE)}
    found = {}
    for name, shape in names.items():
        digits, dtype = (2**4, torch.bfloat16) if "norm" in name else (2**20, torch.float32)
        whole = torch.randint(1, digits, shape, generator=generator).float() / digits
        found[name] = (whole * times).to(dtype)
    return found


def named(model: Model, names: str) -> Model:
    """The model as torchtitan or the map calls and arranges it."""
    if names == "hub":
        return dict(model)
    found = {}
    for name, tensor in model.items():
        new = name
        for old, own in (_TITAN if names == "torchtitan" else _OWN).items():
            new = new.replace(old, own)
        if names == "torchtitan" and re.search(r"\.w[qk]\.", new):  # halves of a head → pairs
            tensor = tensor.reshape(2, 2, -1, _SIZE).transpose(1, 2).reshape(_SIZE, _SIZE)  # noqa: PLW2901
        found[new] = tensor.contiguous()
    if names == "map":
        for i in range(2):
            parts = [found.pop(f"layers.{i}.feed_forward.{w}.weight") for w in ("w1", "w3")]
            found[f"layers.{i}.ffn.gu.weight"] = torch.cat(parts)
    return found


def quantised(model: Model) -> tuple[Model, Model]:
    """Linear layers in 8-bit floats with one scale for each block, and what they stand for."""
    packed, plain = {}, {}
    for name, tensor in model.items():
        packed[name] = plain[name] = tensor
        if name.endswith("_proj.weight"):
            scale = torch.full((1, 1), 0.25)
            packed[name] = (tensor / scale).to(torch.float8_e4m3fn)
            packed[name + "_scale_inv"] = scale
            plain[name] = packed[name].float() * scale
    return packed, plain


def write(path: Path, model: Model, kind: str, root: str, *, is_quantised: bool, has_state: bool) -> Path:
    """Store a model, by stock libraries; return what a command is given."""
    path.mkdir(parents=True)
    config = CONFIG | (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}} if is_quantised else {}
    )
    (path / "config.json").write_text(json.dumps(config))
    flat = {root + name: tensor for name, tensor in model.items()}
    nested: dict[str, object] = dict(model)
    for key in reversed(root.split(".")[:-1]):
        nested = {key: nested}
    if has_state:
        first = next(iter(model))
        nested |= {"optim": {"state": {first: {"exp_avg": model[first].float() + 1, "step": torch.tensor(3)}}}}
        nested |= {} if kind == "hf-dcp" else {"step": 5}  # which it cannot hold
    if kind == "safetensors":
        save_safetensors(flat, path / "model.safetensors")
    elif kind == "index":
        save_split(save_safetensors, flat, path, "model.safetensors")
    elif kind == "pt":
        torch.save(nested, path / "m.pt")
        return path / "m.pt"
    elif kind == "ranks":
        save_ranks(path, flat, {"fsdp": 2}, lambda _: [Shard(0)])
    else:
        save_dcp(nested, path)
        if kind != "dcp":
            one = path.rename(path.with_name(path.name + "-one"))
            how = {"serialization": "safetensors"} if kind == "hf-dcp" else {}
            api.reshard(one, path, mesh="dp_shard=4", num_workers=1, **how)
            (path / "ckpt_manifest.json").unlink()
    return path


def cast(model: Model, row: Mapping[str, str], *, skip: frozenset[str] = frozenset()) -> Model:
    """What `--dtype` and `--dtype-for` make of the tensors; a glob matches the hub's names that came in, too."""
    dtypes = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    glob, _, own = row.get("dtype-for", "").partition("=")
    found = {}
    for name, tensor in model.items():
        shown = name + ("down" if ".w2." in name and row.get("content") in ("hub", "fp8") else "")
        wanted = own if glob and glob.strip("*") in shown else row.get("dtype", "keep")
        is_cast = name not in skip and tensor.is_floating_point() and tensor.dtype.itemsize > 1 and wanted in dtypes
        found[name] = tensor.to(dtypes[wanted]) if is_cast else tensor
    return found


def covering(dims: Mapping[str, tuple[str, ...]], base: Mapping[str, str], rng: random.Random) -> list[dict[str, str]]:
    """Rows with every pair of values of two dimensions: among any others (greedily), and among those of `base`.

    An option that is refused hides the others of its row; so each pair is also tried where all else is plain.
    """
    pairs = [((a, x), (b, y)) for a, b in itertools.combinations(dims, 2) for x in dims[a] for y in dims[b]]
    left, rows = {frozenset(pair): None for pair in pairs}, []
    while left:
        row = dict(next(iter(left)))
        for dim in rng.sample(sorted(dims), len(dims)):
            if dim not in row:
                gains = {v: sum(frozenset({(dim, v), other}) in left for other in row.items()) for v in dims[dim]}
                row[dim] = max(gains, key=lambda value: (gains[value], rng.random()))
        for pair in itertools.combinations(row.items(), 2):
            left.pop(frozenset(pair), None)
        rows.append(row)
    plain = {dim: base.get(dim, values[0]) for dim, values in dims.items()}
    rows += [plain | dict(pair) for pair in pairs]
    return [*{tuple(sorted(row.items())): row for row in rows}.values()]
