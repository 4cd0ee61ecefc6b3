"""CKPT06x: what is saved, what can be loaded again, and memory that is spent twice."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.preflight.rules.rule import AI_PROCESS, HF, Case, Setting, Violation, enabled, error_rule, warning_rule
from ckpt_tools.units import format_size

_MANY_BYTES = 64 * 10**9
"""What rank 0 may gather on its host before it is worth a word."""
_VERL_SAVES = "actor_rollout_ref.actor.checkpoint"


def _gathered(case: Case) -> int | None:
    """Return the bytes that rank 0 holds when it gathers parameters and Adam's two moments in f32."""
    params = case.facts.num_params
    return None if params is None else params * (4 if case.spec.adapter is not None else 12)


@warning_rule(
    "CKPT060: FULL_STATE_DICT, because nothing else is set",
    why="Every save gathers all parameters and the optimizer's state in the host memory of rank 0, while others wait;"
    " resuming needs the same again",
    fix="state_dict_type: SHARDED_STATE_DICT; ckpt gather turns it into one model afterwards",
    frameworks=HF,
)
def full_by_default(case: Case) -> Iterator[Violation]:
    """Look for the default.

    Source: `FullyShardedDataParallelPlugin.set_state_dict_type` (FULL under FSDP1, SHARDED under FSDP2),
    `transformers/training_args.py:_process_fsdp_args` (FULL).
    """
    if not case.is_fsdp or case.fsdp_option("state_dict_type") is not None:
        return
    if case.framework == "accelerate" and case.is_fsdp2:
        return
    nbytes = _gathered(case)
    amount = f", {format_size(nbytes)} with the optimizer" if nbytes is not None else ""
    section = case.get("fsdp_config")
    prefixed = case.framework == "accelerate" or (
        section is not None
        and isinstance(section.value, dict)
        and any(str(key).startswith("fsdp_") for key in section.value)
    )
    key = f"fsdp_config.{'fsdp_' if prefixed else ''}state_dict_type"
    yield Violation(
        key,
        f"{key} is missing, which means FULL_STATE_DICT: rank 0 gathers everything{amount}",
        f"{key}: SHARDED_STATE_DICT",
    )


@warning_rule(
    "CKPT061: FULL_STATE_DICT of a large model",
    why="Rank 0 gathers all parameters and the optimizer's state in its host memory at every save",
    fix="SHARDED_STATE_DICT; ckpt gather turns it into one model afterwards",
    frameworks=HF,
)
def full_and_large(case: Case) -> Iterator[Violation]:
    """Compare what is gathered with what a host can be expected to spare."""
    found, nbytes = case.fsdp_option("state_dict_type"), _gathered(case)
    if found is None or not case.is_fsdp or found.text.upper() not in ("FULL_STATE_DICT", "1") or nbytes is None:
        return
    if nbytes > _MANY_BYTES:
        yield Violation(
            found.key,
            f"{found}: rank 0 gathers {format_size(nbytes)} on its host at every save",
            f"{found.key}: SHARDED_STATE_DICT",
        )


@warning_rule(
    "CKPT065: a run that resumes from checkpoints without optimizer state",
    why="Moments and step count start from zero: the loss jumps, and no message explains it",
    fix="save the optimizer too",
    frameworks=("trainer", "axolotl", "torchtitan", "verl", "openrlhf"),
)
def resumes_without_optimizer(case: Case) -> Iterator[Violation]:
    """Look for saves that leave the optimizer out beside an option that loads them again."""
    found, resume = _leaves_out(case), _resumes(case)
    if found is not None and resume is not None:
        yield Violation(
            found.key, f"{found} leaves out the optimizer, but {resume} goes on from it", _with_optimizer(found)
        )


def _leaves_out(case: Case) -> Setting | None:
    if case.framework in ("trainer", "axolotl"):
        return enabled(case.get("save_only_model"))
    if case.framework == "torchtitan":
        found = case.get("checkpoint.exclude_from_loading")
        return found if found is not None and "optimizer" in found.text else None
    if case.framework == "verl":
        for name in ("load_contents", "save_contents"):
            found = case.get(f"{_VERL_SAVES}.{name}")
            if found is not None and isinstance(found.value, list) and "optimizer" not in found.value:
                return found
        return None
    return enabled(case.flag("disable_ds_ckpt"))


def _resumes(case: Case) -> Setting | None:
    if case.framework in ("trainer", "axolotl"):
        found = case.first("resume_from_checkpoint", "auto_resume_from_checkpoints")
        return found if found is not None and not found.is_off else None
    if case.framework == "torchtitan":
        return enabled(case.first("checkpoint.enable", "checkpoint.enable_checkpoint"))
    if case.framework == "verl":
        found = case.get("trainer.resume_mode")
        return found if found is not None and found.text != "disable" else None
    return enabled(case.flag("load_checkpoint"))


def _with_optimizer(found: Setting) -> str:
    if found.key.endswith("_contents"):
        return f"{found.key}: [model, optimizer, extra]"
    if found.key.endswith("exclude_from_loading"):
        return f"{found.key} without optimizer"
    return f"remove {found.key}" if found.key.startswith("--") else f"{found.key}: false"


@error_rule(
    "CKPT066: offloading of activations that are not recomputed",
    why="accelerate and axolotl refuse it: what is offloaded is the input of a checkpointed block",
    fix="switch activation checkpointing on",
    frameworks=("accelerate", "axolotl"),
)
def offloaded_activations(case: Case) -> Iterator[Violation]:
    """Source: `FullyShardedDataParallelPlugin.__post_init__`, axolotl `check_activation_offloading_wo_gc`."""
    if case.framework == "axolotl":
        found, needed = case.get("activation_offloading"), case.get("gradient_checkpointing")
        if found is not None and not found.is_off and (needed is None or needed.is_off):
            yield Violation(found.key, f"{found} without gradient_checkpointing", "gradient_checkpointing: true")
        return
    found = enabled(case.fsdp_option("activation_checkpointing_offload"))
    if found is None or not case.is_fsdp:
        return
    if not enabled(case.fsdp_option("activation_checkpointing")):
        yield Violation(
            found.key, f"{found} without activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing: true"
        )
    elif not case.is_fsdp2:
        yield Violation(found.key, f"{found} needs FSDP2", "fsdp_config.fsdp_version: 2")


def _own_checkpointing(case: Case) -> Setting | None:
    """Return Trainer's or axolotl's own checkpointing option if it is on (its old name too)."""
    found = case.first("activation_checkpointing", "gradient_checkpointing")
    return found if found is not None and not found.is_off else None


@warning_rule(
    "CKPT068: gradient checkpointing where FSDP does it better, or makes it unnecessary",
    why="Trainer's own gathers the parameters of every block once more in backward; ai-toolkit's costs a third of the"
    " speed for memory that sharding has freed",
    fix="FSDP's own activation_checkpointing, or none",
    frameworks=("trainer", "axolotl", "ai-toolkit"),
)
def redundant_checkpointing(case: Case) -> Iterator[Violation]:
    """Source: `transformers/training_args.py:_process_fsdp_args`; ai-toolkit's FSDP plan."""
    if case.framework == "ai-toolkit":
        found = enabled(case.ai_option("train.gradient_checkpointing"))
        if found is not None and case.wants_ai_fsdp:
            yield Violation(
                found.key,
                f"{found} beside dist_mode: fsdp, which shards what it would save",
                f"{AI_PROCESS}.train.gradient_checkpointing: false, if ckpt estimate says that it fits",
            )
        return
    outer, inner = _own_checkpointing(case), enabled(case.fsdp_option("activation_checkpointing"))
    if case.is_fsdp and outer is not None and inner is None:
        yield Violation(
            outer.key,
            f"{outer} under FSDP gathers every block once more in backward",
            f"{outer.key}: false and fsdp_config.activation_checkpointing: true",
        )
