"""Adapters through peft: added before sharding, initialised alike on every rank, saved and resumed in shards.

The order that works: build on meta, `add_lora`, `shard_model`, `load_base`, then the optimizer. peft comes with the
extra `hf` and is imported in here only.

Source: peft 0.21 (`tuners/*/layer.py`, `utils/save_and_load.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ckpt_tools.checkpoint.names import is_factor
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2.load import LoadReport, device_of, load_checkpoint
from ckpt_tools.fsdp2.ties import output_layer, tied_modules
from ckpt_tools.fsdp2.wrap import refuse_sharded

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


def _reset_lycoris(layer: Any, name: str, config: Any) -> None:  # noqa: ANN401 - peft's
    if config.init_weights == "lycoris":
        layer.reset_adapter_parameters_lycoris_way(name)
    elif config.init_weights:
        layer.reset_adapter_parameters(name)
    else:
        layer.reset_adapter_parameters_random(name)


_RESETS: Mapping[str, Callable[[Any, str, Any], None]] = {
    "LORA": lambda layer, name, config: layer.reset_lora_parameters(name, config.init_lora_weights),
    "LOHA": _reset_lycoris,
    "LOKR": _reset_lycoris,
    "BOFT": lambda layer, name, config: layer.reset_boft_parameters(name, config.init_weights),
    "OFT": lambda layer, name, config: layer.reset_oft_parameters(name, config.init_weights),
}
"""Types whose start values do not depend on the base weights, by the layer's own method."""
_BASE_FREE = (True, False, "gaussian", "lycoris")  # Initialisations that do not look at the base weights
_ADAPTER_PARTS = re.compile(r"^(base_model\.model\.)|(?<=\.)(base_layer|original_module|modules_to_save\.[^.]+)\.")


def add_lora(
    model: nn.Module, config: PeftConfig | Mapping[str, Any], *, adapter_name: str = "default", seed: int = 0
) -> PeftModel:
    """Freeze `model` and put adapters around the modules that `config` targets.

    Before `shard_model`: parameters that appear later are not averaged by FSDP. The adapters get the same values on
    every rank that passes the same `seed`, on the CPU even when the model is on meta; what depends on the base
    weights (DoRA's magnitudes) stays on meta until `finish_adapters`, which `load_base` calls.

    Args:
        model: Not sharded; its modules are replaced in place.
        config: peft's own (LoRA, DoRA, LoHa, LoKr, BOFT, OFT, …), or what an `adapter_config.json` holds.
        adapter_name: peft's name for it; part of the FQNs.
        seed: Of the random start values; the generator is left as it was.

    Returns:
        peft's model around `model`: shard this one.

    Raises:
        UsageError: peft is missing, the model is sharded, `config` targets nothing, or on meta an initialisation
            that needs the base weights.
    """
    peft = _peft()
    why = ": FSDP would not average the adapters' gradients"
    refuse_sharded(model, why=why, hint="call add_lora before shard_model")
    config = _config_of(config)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if is_meta:
        _check_base_free(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            wrapped: PeftModel = peft.get_peft_model(model, config, adapter_name=adapter_name)
        except ValueError as error:
            raise UsageError(
                f"the adapter cannot be added: {error}",
                where="config",
                hint="print(model) shows the names for target_modules",
            ) from error
        if _is_free_of_base(config) and (is_meta or not _norms_follow(config)):
            # Again, and in one order, so that ranks with a real and with a meta model agree too.
            torch.manual_seed(seed)
            from peft.tuners.tuners_utils import BaseTunerLayer

            for layer in wrapped.modules():
                if isinstance(layer, BaseTunerLayer):
                    _start(layer, adapter_name, config)
    return wrapped


def linear_layers(model: nn.Module) -> list[str]:
    """Return the FQNs of the linear layers that get adapters: all but the output layer and those that share weights."""
    output, shared = output_layer(model), tied_modules(model)
    linears = ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)
    found = [name for name, module in linears if module is not output and name not in shared and name]
    if not found:
        raise UsageError("--lora found no linear layer to adapt", where=type(model).__name__)
    return found


def _peft() -> Any:  # noqa: ANN401 - a module
    try:
        import peft
    except ImportError as error:
        raise UsageError("adapters need peft, which is not installed", hint="pip install 'ckpt-tools[hf]'") from error
    return peft


def _config_of(config: PeftConfig | Mapping[str, Any]) -> PeftConfig:
    if not isinstance(config, Mapping):
        return config
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

    kind = str(config.get("peft_type", "")).upper()
    if kind not in PeftType.__members__ or PeftType[kind] not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise UsageError(
            f"peft_type is {config.get('peft_type')!r}, which peft does not support",
            where="config",
            hint=f"one of {', '.join(_RESETS)}; DoRA is LORA with use_dora",
        )
    try:
        return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[kind]](
            **{key: value for key, value in config.items() if key != "peft_type"}
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"peft rejects this configuration: {error}", where="config") from error


def _kind(config: PeftConfig) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _start_of(config: PeftConfig) -> object:
    return getattr(config, "init_lora_weights", getattr(config, "init_weights", True))


def _is_free_of_base(config: PeftConfig) -> bool:
    start = _start_of(config)
    return _kind(config) in _RESETS and any(type(start) is type(known) and start == known for known in _BASE_FREE)


def _norms_follow(config: PeftConfig) -> bool:
    """Do DoRA's magnitudes depend on the adapter's own start values? Not when its product starts at zero."""
    return bool(getattr(config, "use_dora", False)) and not _start_of(config)


def _check_base_free(config: PeftConfig) -> None:
    if _is_free_of_base(config):
        return
    hint = "load the whole model on the CPU of every rank, add_lora there, then shard_model"
    if _kind(config) not in _RESETS:
        raise UsageError(
            f"initial values for {_kind(config)} are not supported on the meta device", where="config", hint=hint
        )
    raise UsageError(
        f"the initialisation {_start_of(config)!r} needs the base weights, but the model is on the meta device",
        where="config",
        hint=f"use True or 'gaussian', or {hint}",
    )


def _start(layer: Any, name: str, config: PeftConfig) -> None:  # noqa: ANN401 - peft's
    """Give one layer's adapter its start values, on the CPU; from there it goes back to where it was, unless meta."""
    moved: list[nn.Module | nn.ParameterDict] = []
    device = torch.device("cpu")
    with torch.no_grad():
        for attribute in layer.adapter_layer_names:
            holder = getattr(layer, attribute)
            if attribute == "lora_magnitude_vector" or name not in holder:
                continue  # norms of the base weights: `finish_adapters`
            part = holder[name]
            tensors = [part] if isinstance(part, nn.Parameter) else [*part.parameters(), *part.buffers()]
            device = next((tensor.device for tensor in tensors if not tensor.is_meta), device)
            moved.append(holder)
            if isinstance(part, nn.Parameter):
                holder[name] = nn.Parameter(torch.empty_like(part, device="cpu"), requires_grad=part.requires_grad)
                continue
            part.to_empty(device="cpu")
            for module in part.modules():
                if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                    module.reset_parameters()
                _fill_indices(module)
        _RESETS[_kind(config)](layer, name, config)
        for holder in moved:
            if isinstance(holder[name], nn.Parameter):  # type: ignore[index]
                holder[name].data = holder[name].data.to(device)  # type: ignore[index]
            else:
                holder[name].to(device)  # type: ignore[index]


def _fill_indices(module: nn.Module) -> None:
    """OFT's rotations keep the indices of a triangle as buffers, and compute them when they are built only."""
    buffers = dict(module.named_buffers(recurse=False))
    if {"rows", "cols"} <= buffers.keys():
        size = int(getattr(module, "block_size"))  # noqa: B009 - not an attribute of nn.Module
        rows, columns = torch.triu_indices(size, size, 1)
        buffers["rows"].copy_(rows)
        buffers["cols"].copy_(columns)


def base_name(fqn: str) -> str | None:
    """Return a parameter's name in the base model (also for `modules_to_save`), or None for the adapters' own."""
    name = _ADAPTER_PARTS.sub("", fqn)
    return None if is_factor(name) else name


def load_base(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    prefix: str = "auto",
    dtype: torch.dtype | None = None,
) -> LoadReport:
    """Load the base model's checkpoint into a sharded model with adapters, and finish these.

    Collective. As `load_checkpoint`; the adapters are not expected in the checkpoint and keep their values.

    Args:
        model: peft's, sharded or not.
        path: The base model, under its own names.
        strict: As for `load_checkpoint`.
        prefix: As for `load_checkpoint`.
        dtype: Of the base model's floating-point parameters.

    Raises:
        UnreadableError: Not a complete checkpoint of the base model.
        UsageError: Shapes or dtypes that do not fit, or a model without adapters.
    """
    base = base_of(model)
    if base is None:
        raise UsageError(f"{type(model).__name__} has no adapters", where="model", hint="pass what add_lora returned")
    report = load_checkpoint(
        base, path, strict=strict, prefix=prefix, dtype=dtype, device=device_of(model), names=base_name
    )
    finish_adapters(model)
    return report


def base_of(model: nn.Module) -> nn.Module | None:
    """Return the model inside of peft's; None where there are no adapters."""
    get_base = getattr(model, "get_base_model", None)
    base: nn.Module | None = get_base() if callable(get_base) else None
    return base


def finish_adapters(model: nn.Module) -> tuple[str, ...]:
    """Compute the start values that depend on the base weights: DoRA's magnitudes that are still on meta.

    Collective: base weights are gathered one layer at a time. Returns the FQNs that were filled.

    Raises:
        UsageError: A base weight is still on meta, or a kind of layer whose norms are not known.
    """
    filled: dict[str, torch.Tensor] = {}
    for fqn, layer in model.named_modules():
        for name, magnitude in getattr(layer, "lora_magnitude_vector", {}).items():
            if magnitude.weight.is_meta:
                norms = _norms(fqn, layer, name, magnitude)
                filled[f"{fqn}.lora_magnitude_vector.{name}.weight"] = _placed(norms, magnitude.weight)
    if filled:
        model.load_state_dict(filled, strict=False, assign=True)
    return tuple(filled)


def _norms(fqn: str, layer: Any, name: str, magnitude: Any) -> torch.Tensor:  # noqa: ANN401 - peft's
    with torch.no_grad():
        weight = whole_weight(layer.get_base_layer())
        if weight.is_meta:
            raise UsageError(
                "DoRA needs the norms of the base weights, which are still on the meta device",
                where=fqn,
                hint="load_base first",
            )
        if name not in layer.lora_A:
            raise UsageError("DoRA on an embedding is not supported for a model on the meta device", where=fqn)
        down, up = (_whole(part[name].weight).float() for part in (layer.lora_A, layer.lora_B))
        rank = down.shape[0]
        delta = (up.reshape(-1, rank) @ down.reshape(rank, -1)).reshape(weight.shape)
        scaling = layer.scaling[name]
        norms: torch.Tensor = magnitude.get_weight_norm(weight.float(), delta, scaling)
        return norms.to(magnitude.weight.dtype)


def whole_weight(layer: nn.Module) -> torch.Tensor:
    """Return a layer's weight, gathered from all ranks (collective) and out of its 4 bits."""
    weight = _whole(layer.weight)  # type: ignore[arg-type]
    state = getattr(layer, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    result: torch.Tensor = dequantize_4bit(weight, state)
    return result


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, which every rank has, placed as `like`; no data is exchanged."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def adapter_state(model: nn.Module, *, adapter_name: str = "default") -> dict[str, torch.Tensor]:
    """Return the whole adapter under peft's names, on the CPU of every rank: what `adapter_model.safetensors` holds.

    Collective: shards are gathered one tensor at a time. Modules that are trained whole are part of it.

    Raises:
        UsageError: No adapter of that name.
    """
    configs: Mapping[str, PeftConfig] = getattr(model, "peft_config", {})
    if adapter_name not in configs:
        raise UsageError(
            f"the model has no adapter {adapter_name!r}",
            where=type(model).__name__,
            hint=f"it has {', '.join(configs)}" if configs else "pass what add_lora returned",
        )
    from peft import get_peft_model_state_dict

    # "auto" would look for the base model's config on the hub; whether embeddings are adapted is known here.
    state = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    return {key: _whole(tensor).cpu().contiguous() for key, tensor in state.items()}


def load_adapters(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    state: Mapping[str, object] | None = None,
    prefix: str = "auto",
) -> LoadReport:
    """Load what is trained (adapters, modules trained whole) from what `save_checkpoint(trainable_only=True)` wrote.

    Collective; call it after `load_base`. An optimizer is given to this function, or made afterwards. The mesh may be
    another one.

    Args:
        model: With its adapters, sharded or not.
        path: A checkpoint with the model's own names (`base_model.model.<module>.lora_A.default.weight`).
        optimizer: As for `load_checkpoint`, and so are the others.
        state: What else the checkpoint holds, by name.
        prefix: What the checkpoint's names have in front of the model's.

    Raises:
        UnreadableError: A trainable parameter is missing, or there is more than this model trains.
    """
    trained = {strip_wrappers(fqn) for fqn, p in model.named_parameters() if p.requires_grad}
    return load_checkpoint(
        model,
        path,
        optimizer=optimizer,
        state=state,
        prefix=prefix,
        device=device_of(model),
        names=lambda name: name if name in trained else None,
    )
