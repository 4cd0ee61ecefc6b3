"""CKPT09x: what only one framework does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tools.preflight.rules.rule import Case, Violation, enabled, error_rule, warning_rule

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "3", "4", "5")


@error_rule(
    "CKPT090: reshard_after_forward is not a strategy's name under FSDP1",
    why="Trainer hands it to FSDP1 as the name of a sharding strategy, and true is not one: a KeyError",
    fix="full_shard or shard_grad_op, or FSDP2",
    frameworks=("trainer", "axolotl"),
)
def strategy_name(case: Case) -> Iterator[Violation]:
    """Source: `transformers/training_args.py:_process_fsdp_args`, `FullyShardedDataParallelPlugin.__post_init__`."""
    found = case.fsdp_option("reshard_after_forward")
    if found is not None and case.spec.engine == "fsdp1" and found.text.upper() not in _STRATEGIES:
        name = "shard_grad_op" if found.is_off else "full_shard"
        fix = "fsdp_version: 2" if case.framework == "axolotl" else f"{found.key}: {name}, or fsdp_config.version: 2"
        yield Violation(found.key, f"{found} under FSDP1, which takes the name of a strategy", fix)


@warning_rule(
    "CKPT091: `fsdp` as text",
    why="Trainer will soon accept only true; the words belong in fsdp_config",
    fix="fsdp: true",
    frameworks=("trainer",),
)
def fsdp_words(case: Case) -> Iterator[Violation]:
    """Source: `transformers/training_args.py:_apply_legacy_fsdp_to_config`."""
    found = case.get("fsdp")
    if found is None or not case.is_fsdp or not isinstance(found.value, (str, list)) or found.is_on:
        return
    words = found.value.split() if isinstance(found.value, str) else [str(word) for word in found.value]
    said = []
    if "shard_grad_op" in words:
        said.append("reshard_after_forward: false")
    if "offload" in words:
        said.append("cpu_offload: true")
    more = f" and fsdp_config: {{{', '.join(said)}}}" if said else ""
    yield Violation("fsdp", f"{found} is deprecated", f"fsdp: true{more}")


@warning_rule(
    "CKPT092: keys of fsdp_config with the prefix `fsdp_`",
    why="axolotl accepts them without it and will soon refuse the prefix",
    fix="remove the prefix (fsdp_version keeps it)",
    frameworks=("axolotl",),
)
def prefixed_keys(case: Case) -> Iterator[Violation]:
    """Source: axolotl `check_fsdp_config_kwargs_prefix`."""
    section = case.get("fsdp_config")
    if section is None or not isinstance(section.value, Mapping):
        return
    old = [str(key) for key in section.value if str(key).startswith("fsdp_") and key != "fsdp_version"]
    if old:
        yield Violation(
            f"fsdp_config.{old[0]}",
            f"{len(old)} keys of fsdp_config have the old prefix",
            f"fsdp_config.{old[0].removeprefix('fsdp_')}",
        )


@error_rule(
    "CKPT094: Ulysses ranks that do not divide the world",
    why="verl puts all ranks on a mesh of dp × sp",
    fix="a size that divides the world size",
    frameworks=("verl",),
)
def ulysses_world(case: Case) -> Iterator[Violation]:
    """Source: verl `workers/fsdp_workers.py:ActorRolloutRefWorker.__init__`."""
    size, world = case.axis("sp"), case.spec.world_size
    if size > 1 and world is not None and world % size:
        yield case.on_axis("sp", f"sp={size} does not divide the {world} ranks", f"a divisor of {world}")


@warning_rule(
    "CKPT095: sequence parallelism without tensor parallelism",
    why="OpenRLHF's --sequence_parallel spreads activations over the TP ranks; with one rank it does nothing",
    fix="--fsdp_tensor_parallel_size 2, or remove it",
    frameworks=("openrlhf",),
)
def sequence_without_tp(case: Case) -> Iterator[Violation]:
    """Source: OpenRLHF's FSDP2 strategy."""
    found = enabled(case.flag("sequence_parallel"))
    if found is not None and case.axis("tp") == 1:
        yield Violation(
            found.key,
            f"{found.key} with tp=1",
            f"{case.axis_key('tp')} 2" if "axes.tp" in case.spec.keys else "--fsdp_tensor_parallel_size 2",
        )
