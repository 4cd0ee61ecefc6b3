"""CKPT05x: dtypes that contradict each other, or lose what they should keep."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.preflight.rules.rule import Case, Violation, enabled, error_rule, warning_rule

_SHORT = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "f16": "f16",
    "float32": "f32",
    "fp32": "f32",
    "float": "f32",
    "f32": "f32",
}
_BITS = {"bf16": 16, "f16": 16, "f32": 32}
_MIXES = ("no", "fp16", "bf16", "fp8")
_VERL = "actor_rollout_ref.actor.fsdp_config"


def short(name: str) -> str | None:
    """Return bf16, f16 or f32 for any of their names."""
    return _SHORT.get(name.strip().lower().removeprefix("torch."))


@error_rule(
    "CKPT050: fp16 and bf16 at once",
    why="One dtype computes; the trainer refuses two",
    fix="keep bf16 where the GPUs have it",
    frameworks=("trainer", "axolotl"),
)
def one_half(case: Case) -> Iterator[Violation]:
    """Source: `transformers/training_args.py:_validate_args`; axolotl hands both on to it."""
    half = [case.first("fp16", "float16"), case.first("bf16", "bfloat16")]
    if all(map(enabled, half)):
        yield Violation("fp16", "fp16 and bf16 are both on; only one can be", "fp16: false")


@warning_rule(
    "CKPT051: fp16 without loss scaling",
    why="Small gradients become zero in fp16: FSDP's mixed precision scales nothing, and this trainer has no scaler",
    fix="bf16",
    frameworks=("openrlhf", "ai-toolkit"),
)
def needs_scaler(case: Case) -> Iterator[Violation]:
    """Accelerate and verl bring a GradScaler with fp16, DeepSpeed its own; these two plans for FSDP have none.

    Source: OpenRLHF's FSDP2 notes, ai-toolkit's FSDP plan.
    """
    if case.framework == "openrlhf":
        found = case.flag("param_dtype")
        wants = case.is_fsdp2
    else:
        found, wants = case.ai_option("train.fsdp_mixed_precision"), case.wants_ai_fsdp
    if found is not None and wants and short(found.text) == "f16":
        yield Violation(found.key, f"{found} under FSDP, without loss scaling", f"{found.key} bf16")


@warning_rule(
    "CKPT052: gradients are averaged in a narrower dtype than they were computed in",
    why="The sum over ranks loses what the single rank kept",
    fix="reduce in the compute dtype, or in f32",
)
def reduce_width(case: Case) -> Iterator[Violation]:
    """Compare reduce_dtype with param_dtype."""
    compute, reduce = case.spec.param_dtype, case.spec.reduce_dtype
    if not case.is_fsdp or compute is None or reduce is None:
        return
    if _BITS.get(reduce, 0) < _BITS.get(compute, 0):
        key = case.key("reduce_dtype", case.key("param_dtype"))
        yield Violation(key, f"computed in {compute}, averaged in {reduce}", f"{key}: {compute}")


@warning_rule(
    "CKPT053: no f32 copy of the weights that are trained",
    why="An update smaller than the spacing of 16-bit numbers is rounded away: training stalls at small learning rates",
    fix="f32 weights with bf16 computation",
    frameworks=("torchtitan", "verl"),
)
def master_weights(case: Case) -> Iterator[Violation]:
    """Source: torchtitan `config/configs.py:TrainingConfig.dtype`, verl `FSDPEngineConfig.model_dtype`."""
    if case.spec.master_dtype in ("bf16", "f16") and case.spec.adapter is None:
        key = case.key("master_dtype")
        yield Violation(
            key,
            f"weights and optimizer state are only in {case.spec.master_dtype}",
            f"{key}: {'float32' if case.framework == 'torchtitan' else 'fp32'}",
        )


@warning_rule(
    "CKPT054: two options name different dtypes for the same thing",
    why="One of them wins, and it may not be the intended one",
    fix="the same dtype in both",
    frameworks=("axolotl", "ai-toolkit", "verl", "torchtitan"),
)
def same_dtype(case: Case) -> Iterator[Violation]:
    """Compare pairs of options.

    Source: axolotl `FSDPConfig.mixed_precision_policy`, verl `fsdp_workers.py` (mixed_precision wins over dtype),
    torchtitan `TrainingConfig`, ai-toolkit's FSDP plan.
    """
    if case.framework == "axolotl":
        policy = case.fsdp_option("mixed_precision_policy")
        flags = [one for path in ("bf16", "fp16") if (one := enabled(case.get(path)))]
        if policy is None or len(flags) != 1 or short(policy.text) is None:
            return
        if short(policy.text) != short(flags[0].key):
            yield Violation(policy.key, f"{policy}, but {flags[0]}", f"{policy.key}: {flags[0].key}")
        return
    pairs = {
        "verl": (case.get(f"{_VERL}.mixed_precision.param_dtype"), case.get(f"{_VERL}.dtype")),
        "ai-toolkit": (case.ai_option("train.fsdp_mixed_precision"), case.ai_option("train.dtype")),
    }
    if case.framework in pairs:
        first, second = pairs[case.framework]
        if case.framework == "ai-toolkit" and not case.wants_ai_fsdp:
            return
        if first is None or second is None or None in (short(first.text), short(second.text)):
            return
        if short(first.text) != short(second.text):
            yield Violation(first.key, f"{first}, but {second}", f"{second.key}: {first.text}")
        return
    stored, computed = case.get("training.dtype"), case.get("training.mixed_precision_param")
    if stored is not None and computed is not None and (short(stored.text), short(computed.text)) == ("bf16", "f32"):
        yield Violation(
            computed.key,
            f"{stored}, but {computed}: bf16 weights are widened for each layer, which gains no precision",
            f"{computed.key}: bfloat16",
        )


@error_rule(
    "CKPT055: torchao's fp8 with cpu_ram_efficient_loading",
    why="accelerate refuses it",
    fix="fsdp_cpu_ram_efficient_loading: false",
    frameworks=("accelerate",),
)
def fp8_loading(case: Case) -> Iterator[Violation]:
    """Source: `accelerate/accelerator.py:Accelerator.__init__`."""
    mixed, backend = case.get("mixed_precision"), case.first("fp8_config.backend", "fp8_config.fp8_backend")
    loading = case.fsdp_option("cpu_ram_efficient_loading")
    if mixed is None or mixed.text != "fp8" or backend is None or backend.text.upper() != "AO" or not case.is_fsdp:
        return
    if loading is None or loading.is_on:
        key = loading.key if loading is not None else "fsdp_config.fsdp_cpu_ram_efficient_loading"
        yield Violation(
            key,
            f"{loading or key + ' is missing, which means true'}, with {backend} and mixed_precision: fp8",
            f"{key}: false",
        )


@error_rule(
    "CKPT056: a mixed_precision that does not exist",
    why="The launcher stops",
    fix="no, fp16, bf16 or fp8",
    frameworks=("accelerate",),
)
def known_precision(case: Case) -> Iterator[Violation]:
    """Source: `accelerate/utils/launch.py` (`PrecisionType`), which compares in lower case."""
    mixed = case.get("mixed_precision")
    if mixed is None or mixed.is_off or mixed.text.lower() in _MIXES:  # a bare `no` in YAML is False
        return
    near = {"bf16": "bf16", "f16": "fp16", "f32": "'no'"}.get(short(mixed.text) or "", "bf16")
    yield Violation("mixed_precision", f"{mixed}; it is one of {', '.join(_MIXES)}", f"mixed_precision: {near}")


@error_rule(
    "CKPT057: fp8 all-gather without FSDP2",
    why="axolotl refuses it: FSDP1's flat parameters cannot be gathered in fp8",
    fix="fsdp_version: 2",
    frameworks=("axolotl",),
)
def fp8_gather(case: Case) -> Iterator[Violation]:
    """Source: axolotl `check_fp8_config`, which reads the top-level fsdp_version alone."""
    found, version = enabled(case.get("fp8_enable_fsdp_float8_all_gather")), case.get("fsdp_version")
    if found is not None and (version is None or version.text != "2"):
        yield Violation(found.key, f"{found}, but {version or 'no fsdp_version'}", "fsdp_version: 2")
