"""CKPT07x: adapters, and base models whose weights are quantised."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.rules.precision import short
from ckpt_tools.preflight.rules.rule import HF, Case, Violation, enabled, error_rule, shown, warning_rule

_LONG = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_STORAGE: Mapping[Framework, str] = {
    "accelerate": "bnb_4bit_quant_storage",
    "trainer": "bnb_4bit_quant_storage",
    "axolotl": "bnb_config_kwargs.bnb_4bit_quant_storage",
}
"""Option that says how 4-bit weights are stored; a script beside accelerate's config says it elsewhere."""


@error_rule(
    "CKPT070: 4-bit weights stored as another dtype than the one that computes",
    why="FSDP2 gathers a block's parameters in one original dtype: packed bytes stored as another float type"
    " cannot join them",
    fix="bnb_4bit_quant_storage equal to the compute dtype",
    frameworks=HF,
)
def storage_dtype(case: Case) -> Iterator[Violation]:
    """Compare bitsandbytes' storage dtype with the dtype of the other weights.

    Source: PyTorch `FSDPParamGroup` ("uniform original parameter dtype"); the bitsandbytes guide on FSDP-QLoRA; axolotl
    `loaders/model.py:_set_quantization_config`.
    """
    found, packed = case.get(_STORAGE[case.framework]), case.get("load_in_4bit")
    if found is not None:
        storage, key = found.text, found.key
    elif packed is not None and packed.is_on and case.framework == "axolotl":
        storage, key = "bfloat16", packed.key  # axolotl's own default
    elif case.facts.quantization is not None and case.facts.quantization.bits == 4:
        storage, key = case.facts.quantization.storage or "", f"{case.facts.where}: quantization_config"
    else:
        return
    compute = case.spec.param_dtype
    if case.is_fsdp and compute in _LONG and short(storage) is not None and short(storage) != compute:
        yield Violation(
            key,
            f"4-bit weights are stored as {short(storage)}, {compute} computes",
            f"bnb_4bit_quant_storage: {_LONG[compute]}",
        )


@warning_rule(
    "CKPT071: 4-bit weights stored as bytes",
    why="accelerate leaves parameters that are not floating out of FSDP2: every rank keeps the whole base model",
    fix="bnb_4bit_quant_storage: bfloat16",
    frameworks=HF,
)
def storage_bytes(case: Case) -> Iterator[Violation]:
    """Source: `accelerate/utils/fsdp_utils.py:fsdp2_prepare_model`; bitsandbytes stores uint8 unless told otherwise."""
    if not case.is_fsdp:
        return
    found = case.get(_STORAGE[case.framework])
    if found is not None or case.framework == "axolotl":
        if found is not None and found.text.endswith("int8"):
            yield Violation(found.key, f"{found}: 4-bit weights stay on every rank", f"{found.key}: bfloat16")
        return
    packed = case.facts.quantization
    if packed is None or (packed.method, packed.bits) != ("bitsandbytes", 4):
        return
    if packed.storage in (None, "uint8"):
        yield Violation(
            f"{case.facts.where}: quantization_config",
            "4-bit weights are stored as uint8, and stay whole on every rank",
            '"bnb_4bit_quant_storage": "bfloat16"',
        )


@error_rule(
    "CKPT073: quantised weights, and no adapter to train",
    why="Integers have no gradient: there is nothing that the optimizer could change",
    fix="add an adapter, or load the weights unquantised",
    frameworks=("trainer", "axolotl", "openrlhf"),
)
def nothing_to_train(case: Case) -> Iterator[Violation]:
    """Source: axolotl `schemas/peft.py`, `transformers/trainer_utils.py:validate_quantization_for_training`."""
    if case.spec.adapter is not None:
        return
    if case.framework == "openrlhf":
        if found := enabled(case.flag("load_in_4bit")):
            yield Violation(found.key, f"{found.key} without LoRA", "--lora_rank 16")
        return
    adapter = "adapter: lora" if case.framework == "axolotl" else "use_peft: true"
    for name in ("load_in_8bit", "load_in_4bit"):
        if found := enabled(case.get(name)):
            yield Violation(name, f"{found}, but no adapter", f"{adapter}, or {name}: false")


@error_rule(
    "CKPT077: an adapter named, but no rank",
    why="A rank below 1 has no weights to train",
    fix="the rank that the adapter should have",
)
def adapter_rank(case: Case) -> Iterator[Violation]:
    """Look at the rank of the adapter."""
    adapter = case.spec.adapter
    if adapter is not None and adapter.rank is not None and adapter.rank < 1:
        key = case.key("adapter")
        yield Violation(key, f"an adapter of rank {adapter.rank}", f"{key}: 16")


@error_rule(
    "CKPT079: an adapter for modules that the model does not have",
    why="PEFT stops when it finds none of the modules that are to be adapted",
    fix="names of the model's own linear modules, or all-linear",
    frameworks=("trainer", "axolotl", "verl", "openrlhf"),
)
def targets_exist(case: Case) -> Iterator[Violation]:
    """Look for the targets among the modules of the built model; patterns are not looked at.

    Source: `peft/tuners/tuners_utils.py:BaseTuner.inject_adapter`, `check_target_module_exists`.
    """
    adapter, facts = case.spec.adapter, case.facts
    if adapter is None or facts.module_classes is None or not adapter.targets:
        return
    if any(target == "all-linear" or not _PLAIN_NAME.fullmatch(target) for target in adapter.targets):
        return
    modules = {module for name in facts.shapes for module in _modules_around(name)}
    if any(module.endswith(f".{target}") for module in modules for target in adapter.targets):
        return
    linear = sorted({module.rpartition(".")[2] for module in modules if module.endswith(("_proj", "_lin", "dense"))})
    found = case.first(*_TARGETS)
    yield Violation(
        case.key("adapter") if found is None else found.key,
        f"{facts.architecture} has no module {' or '.join(map(shown, adapter.targets[:_NAMED]))}",
        f"for example {', '.join(linear[:_NAMED])}" if linear else "names of its linear modules",
    )


_PLAIN_NAME = re.compile(r"[\w.]+")
_NAMED = 4
_TARGETS = (
    "lora_target_modules",
    "actor_rollout_ref.model.target_modules",
    "model.target_modules",
    "ds.lora.target_modules",
    "target_modules",
)


def _modules_around(name: str) -> Iterator[str]:
    """Yield the modules that a parameter is in, each with a dot in front."""
    parts = name.split(".")[:-1]
    return ("." + ".".join(parts[: i + 1]) for i in range(len(parts)))
