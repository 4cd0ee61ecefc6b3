"""QLoRA: 4-bit base weights through bitsandbytes (extra `qlora`), sharded, and adapters on top.

The order that works: build (on meta, or real on rank 0), `quantise_linears`, `add_lora`, `shard_model`,
`load_quantised`, then the optimizer. A floating-point storage must be FSDP's `param_dtype`; uint8 goes with any.

Source: bitsandbytes 0.50; its guide to FSDP-QLoRA for `quant_storage`.
Shape legend: a layer has (out, in) weights, packed they are (n, 1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.globs import find_named
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.fsdp2.collective import from_rank0, share, this_rank, together
from ckpt_tools.fsdp2.load import LoadReport, device_of, load_checkpoint
from ckpt_tools.fsdp2.local import torch_dtype
from ckpt_tools.fsdp2.lora import base_name, base_of, finish_adapters
from ckpt_tools.fsdp2.names import describe_misfit, match_names, shapes_of
from ckpt_tools.fsdp2.quant_state import MAX_TEXT_BYTES, QuantisedLayer, attach, parse_text, quantised_of
from ckpt_tools.fsdp2.read import BoxReader, Whole
from ckpt_tools.fsdp2.scatter import rank0_load
from ckpt_tools.fsdp2.ties import output_layer, tied_modules
from ckpt_tools.fsdp2.wrap import refuse_sharded

_STORAGES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How linear layers are quantised.

    Raises:
        UsageError: A quant type or storage that bitsandbytes does not have.
    """

    quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 16 values that 4 bits stand for."""
    storage: torch.dtype = torch.uint8
    """Dtype of the packed tensor (`bnb_4bit_quant_storage`): uint8, or FSDP's `param_dtype`."""
    double_quant: bool = True
    """Quantise the scales too: 0.4 bits less per weight."""
    compute_dtype: torch.dtype | None = None
    """In which products are computed; None takes the input's."""

    def __post_init__(self) -> None:
        if self.quant_type not in ("nf4", "fp4"):
            raise UsageError(f"unknown 4-bit type {self.quant_type!r}", hint="use nf4 or fp4")
        if self.storage not in _STORAGES:
            raise UsageError(
                f"{self.storage} cannot hold packed weights", hint=f"use one of {', '.join(map(str, _STORAGES))}"
            )


def quantise_linears(
    model: nn.Module, config: Quantisation | None = None, *, skip: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Replace the linear layers of `model` by 4-bit ones, in place; real weights are quantised now.

    Before `add_lora` and `shard_model`. Weights become frozen; biases are kept as they are. Memory: one layer in
    full precision beside the model. What is on meta stays there, packed, until `load_quantised`.

    Args:
        model: Not sharded.
        config: nf4 with double quantisation, in uint8, by default.
        skip: Globs on FQNs of layers to leave alone; by default the output layer (`get_output_embeddings`,
            `lm_head`). Layers whose weight is shared with another module are always left alone.

    Returns:
        FQNs of the layers that were replaced.

    Raises:
        UsageError: bitsandbytes is missing, the model is sharded or has adapters, nothing is left to quantise, or a
            layer whose packed bytes do not fill the storage's elements.
    """
    _bitsandbytes()
    config = config or Quantisation()
    refuse_sharded(model, hint="call quantise_linears before shard_model")
    if getattr(model, "peft_config", None):
        raise UsageError("the model already has adapters", hint="call quantise_linears before add_lora")
    found = _find(model, skip)
    for fqn in found:
        parent, _, name = fqn.rpartition(".")
        linear = model.get_submodule(fqn)
        setattr(model.get_submodule(parent), name, _quantised(fqn, linear, config))
    # peft chooses its layer by this mark of transformers.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return found


def _bitsandbytes() -> Any:  # noqa: ANN401 - a module
    try:
        import bitsandbytes
    except ImportError as error:
        raise UsageError(
            "4-bit weights need bitsandbytes, which is not installed", hint="pip install 'ckpt-tools[qlora]'"
        ) from error
    return bitsandbytes


def _find(model: nn.Module, skip: Sequence[str] | None) -> tuple[str, ...]:
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    left_out = tied_modules(model)
    if skip is None:
        output = output_layer(model)
        left_out |= {name for name, m in linears.items() if m is output or name.rpartition(".")[2] == "lm_head"}
    for pattern in skip or ():
        left_out |= find_named(repr(pattern), pattern, {n: (n,) for n in linears}, "skip", kind="linear layer")
    found = tuple(name for name in linears if name and name not in left_out)
    if not found:
        raise UsageError("the model has no linear layer to quantise", where=type(model).__name__)
    return found


def _quantised(fqn: str, linear: nn.Module, config: Quantisation) -> nn.Module:
    bnb = _bitsandbytes()
    weight = linear.weight
    if not isinstance(weight, torch.Tensor):
        raise UsageError("the layer has no weight", where=fqn)
    out, into = weight.shape
    shape, kind, storage = (out, into), config.quant_type, config.storage
    facts = QuantisedLayer(fqn=fqn, shape=shape, quant_type=kind, storage=storage, double_quant=config.double_quant)
    if facts.num_packed * config.storage.itemsize * 2 != out * into + (out * into) % 2:
        raise UsageError(
            f"{out} × {into} weights of 4 bits cannot be packed into {config.storage}",
            where=fqn,
            hint="use storage=torch.uint8, or skip the layer",
        )
    options = _options_of(facts)
    layer = bnb.nn.Linear4bit(into, out, bias=False, compute_dtype=config.compute_dtype, device="meta", **options)
    packed: dict[str, Any] = {**options, "module": layer, "requires_grad": False}
    if weight.is_meta:
        data = torch.empty((facts.num_packed, 1), dtype=config.storage, device="meta")
        layer.weight = bnb.nn.Params4bit(data, bnb_quantized=True, **packed)
    else:
        layer.weight = bnb.nn.Params4bit(weight.detach().contiguous(), **packed).to(weight.device)
    layer.bias = linear.bias
    # In eval mode on some CPUs bitsandbytes repacks weights in place, which sharded ones cannot survive.
    layer.support_avx512bf16_for_cpu = False
    layer.train(linear.training)
    attach(layer, facts)
    result: nn.Module = layer
    return result


def _options_of(facts: QuantisedLayer) -> dict[str, Any]:
    """Return a layer's form as bitsandbytes takes it."""
    return {"compress_statistics": facts.double_quant, "quant_type": facts.quant_type, "quant_storage": facts.storage}


def load_quantised(
    model: nn.Module, source: Mapping[str, torch.Tensor] | str | os.PathLike[str] | None, *, prefix: str = "auto"
) -> LoadReport:
    """Load base weights into a model with 4-bit layers (and adapters, which are finished).

    Collective. Three kinds of source:

    - a checkpoint that holds packed weights and their quant state (bitsandbytes' own file, or what `save_checkpoint`
      wrote): every rank reads its own boxes, byte for byte;
    - a checkpoint in full precision: rank 0 reads and quantises one layer at a time and sends every rank its part;
    - a state dict in bitsandbytes' form, on rank 0 (None on the others): rank 0 had the real model, the others meta.

    Args:
        model: What `quantise_linears` (and `add_lora`) and `shard_model` left.
        source: See above.
        prefix: As for `load_checkpoint`.

    Raises:
        UnreadableError: Not a complete checkpoint of this model.
        UsageError: No 4-bit layers, shapes that differ, or another way of quantising.
    """
    base = base_of(model) or model
    layers = _layers_of(base, base_name)
    if not layers:
        raise UsageError("the model has no 4-bit layers", where=type(model).__name__, hint="quantise_linears first")
    path = share(os.fspath(source) if isinstance(source, str | os.PathLike) else None)
    state = source if isinstance(source, Mapping) else None
    if path is not None:
        # What was saved with its adapters has the whole model's names, and brings the adapters' values too.
        views: list[tuple[nn.Module, Names]] = [(base, base_name), *([(model, str)] if base is not model else [])]
        root, names, texts = together(lambda: _choose(views, path, prefix))
        if texts:
            _expect(_layers_of(root, names), texts)
            report = load_checkpoint(root, path, prefix=prefix, device=device_of(model), names=names)
            finish_adapters(model)
            return report
        state = together(lambda: _quantise_file(base, layers, path, prefix) if this_rank() == 0 else None)
    report = _scatter(base, layers, state)
    finish_adapters(model)
    return report


Names = Callable[[str], str | None]  # From a name of the model to the one in the checkpoint


Layers = Mapping[str, tuple[nn.Module, QuantisedLayer]]  # Name in the checkpoint → 4-bit layer, and what it is


def _layers_of(root: nn.Module, names: Names) -> Layers:
    found = {}
    for fqn, module in root.named_modules():
        if (facts := quantised_of(module)) is not None:
            found[(names(f"{fqn}.weight") or "").removesuffix(".weight")] = (module, facts)
    return found


def _expect(layers: Layers, texts: Mapping[str, int]) -> None:
    for name, (layer, facts) in layers.items():
        facts.text_nbytes = texts[name]
        layer.quant_state = None  # type: ignore[assignment] # what is there goes, whatever it was


def _match(root: nn.Module, naming: Names, layers: Layers, opened: Opened, prefix: str) -> Mapping[str, Whole]:
    shapes = shapes_of(root.state_dict())
    names = {name: shape for key, shape in shapes.items() if (name := naming(key)) is not None}
    for name, (_, facts) in layers.items():  # whole in one checkpoint, packed in another
        names |= {f"{name}.weight": None, f"{name}.weight.{facts.text_key}": None}
    return match_names(opened.checkpoint, root, names, prefix).found


def _choose(
    views: Sequence[tuple[nn.Module, Names]], path: str, prefix: str
) -> tuple[nn.Module, Names, dict[str, int]]:
    """Return the view in which the checkpoint has each layer's quant state, and text lengths ({} if not quantised)."""
    best: tuple[nn.Module, Names, dict[str, int]] | None = None
    for root, names in views:
        layers = _layers_of(root, names)
        texts = _read_texts(root, names, layers, path, prefix)
        if len(texts) == len(layers):
            return root, names, texts
        if best is None or len(texts) > len(best[2]):
            best = (root, names, texts)
    if best is None or not best[2]:
        return *views[0], {}
    layers = _layers_of(best[0], best[1])
    raise UnreadableError(
        f"{len(best[2])} of {len(layers)} layers are quantised in the checkpoint",
        where=next(name for name in layers if name not in best[2]),
        hint="pass skip to quantise_linears, so that the model matches the checkpoint",
    )


def _read_texts(root: nn.Module, names: Names, layers: Layers, path: str, prefix: str) -> dict[str, int]:
    """Return the length of every layer's text, of those that the checkpoint has."""
    with open_path(path) as opened:
        found = _match(root, names, layers, opened, prefix)
        reader = BoxReader(opened)
        lengths: dict[str, int] = {}
        for name, (_, facts) in layers.items():
            where = f"{name}.weight.{facts.text_key}"
            if (whole := found.get(where)) is None:
                continue
            if len(whole.shape) != 1 or whole.shape[0] > MAX_TEXT_BYTES:
                raise UnreadableError(f"the quant state has shape {list(whole.shape)}", where=where)
            text = reader.read_whole(whole, torch.uint8)
            parse_text(bytes(text.numpy()), facts, where)
            lengths[name] = whole.shape[0]
        return lengths


def _quantise_file(base: nn.Module, layers: Layers, path: str, prefix: str) -> dict[str, torch.Tensor]:
    """Return the whole state dict in bitsandbytes' form, under the base's own names; one layer is whole at a time."""
    from bitsandbytes.functional import quantize_4bit

    state: dict[str, torch.Tensor] = {}
    with open_path(path) as opened:
        found = _match(base, base_name, layers, opened, prefix)
        reader = BoxReader(opened)
        for key, like in base.state_dict().items():
            name = base_name(key)
            whole = None if name is None else found.get(name)
            if name is None or whole is None:
                continue
            owner = layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            if owner is None:
                state[key] = reader.read_whole(whole, like.dtype)
                continue
            facts = owner[1]
            if whole.shape != facts.shape:
                raise UsageError(f"{list(whole.shape)} in the checkpoint, {list(facts.shape)} in the model", where=name)
            full = reader.read_whole(whole, torch_dtype(whole.dtype))
            state[key], quant_state = quantize_4bit(full, **_options_of(facts))
            state |= {f"{key}.{part}": tensor for part, tensor in quant_state.as_dict(packed=True).items()}
    return state


def _scatter(base: nn.Module, layers: Layers, source: Mapping[str, torch.Tensor] | None) -> LoadReport:
    """Send every rank its part of rank 0's state dict, whose names may be the base's plain ones or with adapters."""
    plain: dict[str, torch.Tensor] = {}

    def measure() -> dict[str, int]:
        if source is None:
            raise UsageError("rank 0 has nothing to load", where="load_quantised", hint="pass the state dict")
        plain.update({name: tensor for key, tensor in source.items() if (name := base_name(key)) is not None})
        lengths = {}
        for name, (_, facts) in layers.items():
            text = plain.get(f"{name}.weight.{facts.text_key}")
            if text is None:
                raise UnreadableError(
                    "the state dict has no quant state for a 4-bit layer",
                    where=name,
                    hint="take it from the quantised model before it is sharded",
                )
            lengths[name] = text.numel()
        return lengths

    _expect(layers, from_rank0(measure))
    names = {key: base_name(key) for key in base.state_dict()}
    state = {key: plain[name] for key, name in names.items() if name in plain} if this_rank() == 0 else None
    unused = share(tuple(sorted(set(plain) - set(names.values()))))
    report = rank0_load(base, state, strict=False)
    missing = tuple(key for key in report.missing if names.get(key) is not None)
    if missing or unused:
        raise UnreadableError(
            f"the state dict does not match the model: {describe_misfit(missing, unused)}",
            where="load_quantised",
            hint="build and quantise the model as on rank 0",
        )
    return replace(report, missing=())
