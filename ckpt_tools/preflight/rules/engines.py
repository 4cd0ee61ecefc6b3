"""CKPT01x: what distributes the model, and what it excludes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tools.preflight.rules.rule import Case, Setting, Violation, enabled, error_rule, warning_rule

_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
"""Section of an accelerate config → the distributed_type that reads it."""

_STAGES = "distributed_config.pp_size"
"""How arguments for transformers ask for pipeline stages."""


def _has(found: Setting | None) -> bool:
    """Does an option say anything? False, null and empty containers do not."""
    return found is not None and found.value not in (False, "", [], {}, ()) and not found.is_off


def wants_fsdp(case: Case) -> Setting | None:
    """Return what asks for FSDP in a Trainer or axolotl config."""
    for path in ("fsdp", "fsdp_config") if case.framework == "axolotl" else ("fsdp",):
        found = case.get(path)
        if _has(found):
            return found
    return None


@error_rule(
    "CKPT010: more than one of DDP, FSDP and DeepSpeed",
    why="Each of them owns the gradients and the optimizer step; the trainer refuses the pair or silently drops one",
    fix="keep one of them",
    frameworks=("trainer", "axolotl", "ai-toolkit"),
)
def one_engine(case: Case) -> Iterator[Violation]:
    """Look for two engines.

    Source: `transformers/trainer.py:Trainer.__init__`, axolotl `check_fsdp_deepspeed` and `setup_fsdp_envs`;
    the table of exclusions in ai-toolkit's FSDP plan.
    """
    if case.framework == "ai-toolkit":
        yield from _ai_engines(case)
        return
    sharded, speed = wants_fsdp(case), case.get("deepspeed")
    if sharded is not None and speed is not None and _has(speed):
        yield Violation(
            "deepspeed",
            f"both {sharded.key} and deepspeed are set; only one engine can be used",
            f"remove deepspeed to train with FSDP, or {sharded.key} to train with DeepSpeed",
        )


def _ai_engines(case: Case) -> Iterator[Violation]:
    mode = case.ai_option("train.dist_mode")
    if case.wants_ai_fsdp:
        for name in ("ddp", "use_ddp"):
            if ddp := enabled(case.ai_option(f"train.{name}")):
                yield Violation(ddp.key, "DDP beside dist_mode: fsdp; only one can be used", f"remove {ddp.key}")
    elif mode is not None and mode.text.lower() == "ddp":
        for name in ("fsdp_auto_wrap", "fsdp_sharding", "fsdp_cpu_offload"):
            found = case.ai_option(f"train.{name}")
            if found is not None and _has(found):
                yield Violation(
                    found.key,
                    f"{name} beside dist_mode: ddp; only one engine can be used",
                    f"{mode.key}: fsdp, or remove the fsdp_ options",
                )
                return


@warning_rule(
    "CKPT011: the options of an engine that is not used",
    why="Nothing reads them: the run starts as if they were not there",
    fix="remove them, or choose that engine",
    frameworks=("accelerate", "trainer", "openrlhf"),
)
def unused_engine(case: Case) -> Iterator[Violation]:
    """Look for sections that nothing reads.

    Source: `accelerate/commands/launch.py:_validate_launch_command` (distributed_type alone chooses),
    `transformers/training_args.py:_process_fsdp_args` (returns at once without `fsdp`).
    """
    if case.framework == "accelerate":
        kind = case.get("distributed_type")
        for section, reader in _SECTIONS.items():
            found = case.get(section)
            if kind is None or found is None or not isinstance(found.value, Mapping) or not found.value:
                continue
            if kind.text.upper() != reader:
                yield Violation(
                    section,
                    f"{section} is only read with distributed_type: {reader}, the config has {kind.text}",
                    f"distributed_type: {reader}, or remove {section}",
                )
    elif case.framework == "trainer":
        options = case.get("fsdp_config")
        if options is not None and _has(options) and wants_fsdp(case) is None:
            yield Violation("fsdp_config", "fsdp_config is only read when fsdp is on, and it is not", "fsdp: true")
    elif case.is_fsdp2:
        for name in ("zero_stage", "zpg", "deepcompile", "ds.zero_stage", "ds.zpg", "ds.deepcompile"):
            found = case.get(name)
            if found is not None and found.value is not False:
                yield Violation(
                    f"--{name}",
                    f"--{name} is an option of DeepSpeed, --backend is fsdp2",
                    f"remove --{name}, or --backend deepspeed",
                )


@error_rule(
    "CKPT012: FSDP with pipeline parallelism",
    why="Transformers has no pipeline of FSDP stages: it refuses the pair",
    fix="pp_size 1, and shard over those ranks; or TP with PP and without FSDP",
    frameworks=("accelerate", "trainer", "axolotl"),
)
def no_pipeline(case: Case) -> Iterator[Violation]:
    """Source: `transformers/distributed/configuration_utils.py:_validate_mesh_config`."""
    if not case.is_fsdp:
        return
    found = case.get(_STAGES)
    size, key = case.axis("pp"), case.axis_key("pp")
    if size <= 1 and found is not None and found.count is not None:
        size, key = found.count, found.key
    if size > 1:
        yield Violation(key, f"FSDP with {size} pipeline stages", f"{key}: 1")
