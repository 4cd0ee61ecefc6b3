"""CKPT05x and CKPT06x: dtypes; what is saved and can be loaded again, and memory that is spent twice."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.preflight.plain_values import dtype_name
from ckpt_tools.preflight.rules.rule import Subject, Violation, enabled, warning_rule
from ckpt_tools.units import format_size

# CKPT05x: dtypes that contradict each other, or lose what they should keep.

_BITS = {"bf16": 16, "f16": 16, "f32": 32}
_VERL = "actor_rollout_ref.actor.fsdp_config"


@warning_rule(
    "CKPT052: gradients are averaged in a narrower dtype than they were computed in",
    why="The sum over ranks loses precision that each rank had",
    fix="reduce in the compute dtype, or in f32",
)
def reduce_width(case: Subject) -> Iterator[Violation]:
    """Compare reduce_dtype with param_dtype."""
    compute, reduce = case.spec.param_dtype, case.spec.reduce_dtype
    if not case.is_fsdp or compute is None or reduce is None:
        return
    if _BITS.get(reduce, 0) < _BITS.get(compute, 0):
        key = case.key("reduce_dtype", case.key("param_dtype"))
        yield Violation(key, f"computed in {compute}, averaged in {reduce}", f"{key}: {compute}")


@warning_rule(
    "CKPT054 (axolotl, ai-toolkit, verl, torchtitan): two options name different dtypes for the same thing",
    why="One of them takes effect, and it may not be the intended one",
    fix="use the same dtype in both",
)
def same_dtype(case: Subject) -> Iterator[Violation]:
    """Source: axolotl `mixed_precision_policy`, verl `fsdp_workers.py`, torchtitan `TrainingConfig`."""
    if case.framework == "axolotl":
        policy = case.fsdp_option("mixed_precision_policy")
        flags = [one for path in ("bf16", "fp16") if (one := enabled(case.get(path)))]
        if policy is None or len(flags) != 1 or dtype_name(policy.text) is None:
            return
        if dtype_name(policy.text) != dtype_name(flags[0].key):
            yield Violation(policy.key, f"{policy}, but {flags[0]}", f"{policy.key}: {flags[0].key}")
        return
    pairs = {
        "verl": (case.get(f"{_VERL}.mixed_precision.param_dtype"), case.get(f"{_VERL}.dtype")),
        "ai-toolkit": (case.ai_option("train.fsdp_mixed_precision"), case.ai_option("train.dtype")),
    }
    if case.framework in pairs:
        first, second = pairs[case.framework]
        if case.framework == "ai-toolkit" and not case.is_fsdp:
            return
        if first is None or second is None or None in (dtype_name(first.text), dtype_name(second.text)):
            return
        if dtype_name(first.text) != dtype_name(second.text):
            yield Violation(first.key, f"{first}, but {second}", f"{second.key}: {first.text}")
        return
    stored, computed = case.get("training.dtype"), case.get("training.mixed_precision_param")
    if (
        stored is not None
        and computed is not None
        and (dtype_name(stored.text), dtype_name(computed.text)) == ("bf16", "f32")
    ):
        what = f"{stored}, but {computed}: bf16 weights are widened for each layer, which gains no precision"
        yield Violation(computed.key, what, f"{computed.key}: bfloat16")


# CKPT06x: what is saved, what can be loaded again, and memory that is spent twice.

_MANY_BYTES = 64 * 10**9  # what rank 0 may gather on its host before it is worth a word


def _gathered(case: Subject) -> int | None:
    """Return the bytes that rank 0 holds when it gathers parameters and Adam's two moments in f32."""
    params = case.facts.num_params
    return None if params is None else params * (4 if case.spec.adapter is not None else 12)


@warning_rule(
    "CKPT060 (accelerate, trainer, axolotl): FULL_STATE_DICT, because nothing else is set",
    why="Every save gathers all parameters and the optimizer's state in the host memory of rank 0, while others wait;"
    " resuming needs the same again",
    fix="state_dict_type: SHARDED_STATE_DICT; ckpt gather merges it into one model afterwards",
)
def full_by_default(case: Subject) -> Iterator[Violation]:
    """Source: accelerate `set_state_dict_type` (FULL under FSDP1, SHARDED under FSDP2), transformers (FULL)."""
    if not case.is_fsdp or case.fsdp_option("state_dict_type") is not None:
        return
    if case.framework == "accelerate" and case.is_fsdp2:
        return
    nbytes = _gathered(case)
    amount = f", {format_size(nbytes)} with the optimizer" if nbytes is not None else ""
    key = case.fsdp_key("state_dict_type")
    what = f"{key} is missing, which means FULL_STATE_DICT: rank 0 gathers everything{amount}"
    yield Violation(key, what, f"{key}: SHARDED_STATE_DICT")


@warning_rule(
    "CKPT061 (accelerate, trainer, axolotl): FULL_STATE_DICT of a large model",
    why="Rank 0 gathers all parameters and the optimizer's state in its host memory at every save",
    fix="use SHARDED_STATE_DICT; ckpt gather merges it into one model afterwards",
)
def full_and_large(case: Subject) -> Iterator[Violation]:
    """Compare what is gathered with what a host can be expected to spare."""
    found, nbytes = case.fsdp_option("state_dict_type"), _gathered(case)
    if found is None or not case.is_fsdp or found.text.upper() not in ("FULL_STATE_DICT", "1") or nbytes is None:
        return
    if nbytes > _MANY_BYTES:
        what = f"{found}: rank 0 gathers {format_size(nbytes)} on its host at every save"
        yield Violation(found.key, what, f"{found.key}: SHARDED_STATE_DICT")
