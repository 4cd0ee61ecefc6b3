"""CKPT02x and CKPT09x: the options of FSDP1 and FSDP2, and what only one framework does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.plain_values import as_truth
from ckpt_tools.preflight.rules.option_words import holds
from ckpt_tools.preflight.rules.rule import Subject, Violation, enabled, error_rule, shown, warning_rule

# CKPT02x: the options of FSDP1 and FSDP2, which share names and little else.

_V1_STRATEGIES = ("no_shard", "hybrid_shard", "hybrid_shard_zero2")
_OBSOLETE: Mapping[str, str] = {
    "sharding_strategy": "reshard_after_forward and the mesh replace it",
    "backward_prefetch": "FSDP2 prefetches on its own",
    "backward_prefetch_policy": "FSDP2 prefetches on its own",
    "forward_prefetch": "FSDP2 prefetches on its own",
    "use_orig_params": "FSDP2 always uses the original parameters",
    "sync_module_states": "FSDP2 does not broadcast from rank 0",
}
"""Option of FSDP1 → why FSDP2 has none."""
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def _uses_fsdp_section(case: Subject) -> bool:
    """Is `fsdp_config` read at all?"""
    if case.framework == "accelerate":
        return holds(case, "distributed_type=FSDP|fsdp")
    return holds(case, "fsdp") or (case.framework == "axolotl" and holds(case, "fsdp_config"))


def default_version(framework: Framework) -> int:
    """Return what a missing `fsdp_version` means. Source: accelerate `launch.py`, axolotl 0.20, transformers 5.10."""
    return 1 if framework == "accelerate" else 2


@error_rule(
    "CKPT020 (accelerate, trainer, axolotl): reshard_after_forward is not a bool under FSDP2",
    why="FSDP1's strategy names are not booleans: the trainer fails when it parses its options",
    fix="true for FULL_SHARD, false for SHARD_GRAD_OP; a replicated axis for HYBRID_SHARD",
)
def reshard_is_bool(case: Subject) -> Iterator[Violation]:
    """Source: `FullyShardedDataParallelPlugin.__post_init__` and the two `str_to_bool`."""
    found = case.fsdp_option("reshard_after_forward")
    if found is None or not case.is_fsdp2 or as_truth(found.text) is not None:
        return
    means = {"FULL_SHARD": "true", "1": "true", "SHARD_GRAD_OP": "false", "2": "false"}.get(found.text.upper())
    yield Violation(
        found.key, f"{found}; FSDP2 accepts true or false", f"{found.key}: {means}" if means else f"{found.key}: true"
    )


@error_rule(
    "CKPT021 (trainer): a word in `fsdp` that Trainer does not accept, or accepts only under FSDP1",
    why='Trainer fails when it parses its arguments; it does not accept the text "true"',
    fix="fsdp: true, and the strategy in fsdp_config",
)
def v1_strategy(case: Subject) -> Iterator[Violation]:
    """Source: `transformers/training_args.py:_apply_legacy_fsdp_to_config`, to which truths are words."""
    found = case.get("fsdp")
    if found is None or not isinstance(found.value, (str, list)):
        return
    if isinstance(found.value, str) and as_truth(found.text) is not None:
        plain = "true" if found.is_on else "false"
        yield Violation("fsdp", f'"{shown(found.value)}" as text is an unknown option', f"fsdp: {plain}")
        return
    words = found.value.split() if isinstance(found.value, str) else [str(item) for item in found.value]
    for word in words:
        if word.lower() in _V1_STRATEGIES and case.is_fsdp2:
            what = f"{word} is a strategy of FSDP1, but the config uses FSDP2"
            yield Violation("fsdp", what, "fsdp: true with fsdp_config.reshard_after_forward: true")


@warning_rule(
    "CKPT022 (accelerate, trainer, axolotl, verl): an option of FSDP1 under FSDP2",
    why="It is ignored (accelerate's plugin rejects forward_prefetch if passed directly)",
    fix="remove it",
)
def obsolete_options(case: Subject) -> Iterator[Violation]:
    """Source: `FullyShardedDataParallelPlugin.__post_init__`; verl `fsdp_workers.py`, whose fsdp2 branch reads none."""
    if not case.is_fsdp2:
        return
    if case.framework == "verl":
        for name in ("forward_prefetch", "use_orig_params"):
            if found := enabled(case.get(f"actor_rollout_ref.actor.fsdp_config.{name}")):
                yield Violation(found.key, f"{name} is ignored under strategy fsdp2: {_OBSOLETE[name]}", "remove it")
        return
    needed = case.get("optimizer") if case.framework == "axolotl" else None
    for name, reason in _OBSOLETE.items():
        found = case.fsdp_option(name)
        if found is None or (name == "sync_module_states" and found.is_off and _stops_launch(case)):
            continue
        if name == "use_orig_params" and needed is not None and needed.text == "q_galore_adamw8bit":
            continue  # axolotl asks for it there
        instead = ": use reshard_after_forward and a replicated axis instead" if name == "sharding_strategy" else ""
        yield Violation(found.key, f"{name} is ignored under FSDP2: {reason}", f"remove {found.key}{instead}")


@warning_rule(
    "CKPT023 (accelerate, trainer, axolotl): the config does not state its FSDP version",
    why="A missing version is FSDP1 in accelerate and in axolotl before 0.20, and FSDP2 in Trainer and newer axolotl: "
    "the same options with different meanings",
    fix="write the version",
)
def version_missing(case: Subject) -> Iterator[Violation]:
    """Look for FSDP without a version."""
    if not _uses_fsdp_section(case) or case.fsdp_option("version") is not None:
        return
    if case.framework == "axolotl" and (case.get("fsdp_version") is not None or case.get("fsdp") is not None):
        return
    means = f"FSDP{default_version(case.framework)} in {case.framework}"
    means += " 0.20 and later, and FSDP1 before" if case.framework == "axolotl" else ""
    key = "fsdp_version" if case.framework == "axolotl" else case.fsdp_key("version")
    yield Violation(key, f"{key} is missing, which means {means}", f"{key}: 2")


@error_rule(
    "CKPT026 (accelerate, trainer, axolotl): an auto_wrap_policy that does not exist",
    why="The trainer fails when it parses its options",
    fix="TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP",
)
def known_policy(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/utils/constants.py:FSDP_AUTO_WRAP_POLICY`; Trainer and axolotl compare case and all."""
    found = case.fsdp_option("auto_wrap_policy")
    if found is None or not _uses_fsdp_section(case):
        return
    text = found.text.upper() if case.framework == "accelerate" else found.text
    known = _POLICIES[:2] if case.framework == "axolotl" else _POLICIES
    if text not in known:
        near = found.text.upper() if found.text.upper() in known else known[0]
        yield Violation(found.key, f"{found}; must be one of {', '.join(known)}", f"{found.key}: {near}")


def _policy(case: Subject) -> str | None:
    """Return the policy in force; None for none."""
    found = case.fsdp_option("auto_wrap_policy")
    if found is not None:
        return found.text.upper()
    # axolotl hands its options to Trainer, which has a default.
    return None if case.framework == "accelerate" else "TRANSFORMER_BASED_WRAP"


@warning_rule(
    "CKPT027 (accelerate, trainer, axolotl): an option of another wrap policy",
    why="Classes are read under TRANSFORMER_BASED_WRAP only, min_num_params under SIZE_BASED_WRAP only",
    fix="remove it, or change auto_wrap_policy",
)
def matching_policy(case: Subject) -> Iterator[Violation]:
    """Source: `FullyShardedDataParallelPlugin.__post_init__`."""
    policy = _policy(case)
    if not case.is_fsdp or policy is None or policy not in _POLICIES:
        return
    others = {"transformer_layer_cls_to_wrap": _POLICIES[0], "min_num_params": _POLICIES[1]}
    for name, reader in others.items():
        found = case.fsdp_option(name)
        if found is not None and policy != reader and found.value not in (0, "", []):
            what = f"{name} is read under {reader} only, but the policy is {policy}"
            yield Violation(found.key, what, f"{case.fsdp_key('auto_wrap_policy')}: {reader}, or remove {found.key}")


@warning_rule(
    "CKPT028 (accelerate, trainer, axolotl): nothing wraps the blocks of the model",
    why="All blocks are one group: every rank gathers the whole model in forward, and keeps it until backward",
    fix="auto_wrap_policy: TRANSFORMER_BASED_WRAP",
)
def blocks_are_wrapped(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/utils/fsdp_utils.py:fsdp2_prepare_auto_wrap_policy`, which then returns None."""
    if not case.is_fsdp:
        return
    policy, found = _policy(case), case.fsdp_option("auto_wrap_policy")
    smallest = case.fsdp_option("min_num_params")
    key = found.key if found is not None else case.fsdp_key("auto_wrap_policy")
    if policy is None:
        yield Violation(key, f"no {key}: all blocks are one FSDP group", f"{key}: {_POLICIES[0]}")
    elif policy == "NO_WRAP":
        yield Violation(key, "NO_WRAP: all blocks are one FSDP group", f"{key}: {_POLICIES[0]}")
    elif policy == "SIZE_BASED_WRAP" and case.framework == "trainer" and (smallest is None or smallest.value == 0):
        what = "SIZE_BASED_WRAP with min_num_params 0 wraps nothing in Trainer"
        yield Violation(key, what, f"{case.fsdp_key('min_num_params')}: 100000000")


def _stops_launch(case: Subject) -> bool:
    """Does `accelerate launch` refuse the two loading options? Missing ones count as true there."""
    loading, sync = case.fsdp_option("cpu_ram_efficient_loading"), case.fsdp_option("sync_module_states")
    if case.framework != "accelerate" or sync is None or not isinstance(sync.value, bool) or sync.value:
        return False
    # A bare `false` in YAML is False; the text "false" is truthy in the launcher's test.
    return loading is None or bool(loading.value)


@error_rule(
    "CKPT029 (accelerate): cpu_ram_efficient_loading without sync_module_states",
    why="Only rank 0 would read the weights, and the others never get them: the launcher rejects it, in FSDP2 too",
    fix="sync_module_states: true, or remove it; it defaults to true",
)
def loading_needs_sync(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/utils/launch.py:prepare_multi_gpu_env`; both options default to true on its command line."""
    sync = case.fsdp_option("sync_module_states")
    if sync is None or not _uses_fsdp_section(case) or not _stops_launch(case):
        return
    loading = case.fsdp_option("cpu_ram_efficient_loading")
    said = f"{loading}" if loading is not None else "cpu_ram_efficient_loading is missing, which means true"
    yield Violation(sync.key, f"{sync}, but {said}", f"remove {sync.key}" if case.is_fsdp2 else f"{sync.key}: true")


# CKPT09x: what only one framework does.


@warning_rule(
    "CKPT091 (trainer): `fsdp` as text",
    why="Trainer will soon accept only true; the words belong in fsdp_config",
    fix="fsdp: true",
)
def fsdp_words(case: Subject) -> Iterator[Violation]:
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
    "CKPT092 (axolotl): keys of fsdp_config with the prefix `fsdp_`",
    why="axolotl accepts them without it and will soon refuse the prefix",
    fix="remove the prefix (fsdp_version keeps it)",
)
def prefixed_keys(case: Subject) -> Iterator[Violation]:
    """Source: axolotl `check_fsdp_config_kwargs_prefix`."""
    section = case.get("fsdp_config")
    if section is None or not isinstance(section.value, Mapping):
        return
    old = [str(key) for key in section.value if str(key).startswith("fsdp_") and key != "fsdp_version"]
    if old:
        what = f"{len(old)} keys of fsdp_config have the old prefix"
        yield Violation(f"fsdp_config.{old[0]}", what, f"fsdp_config.{old[0].removeprefix('fsdp_')}")


@error_rule(
    "CKPT094 (verl): Ulysses ranks that do not divide the world",
    why="verl puts all ranks on a mesh of dp × sp",
    fix="use a size that divides the world size",
)
def ulysses_world(case: Subject) -> Iterator[Violation]:
    """Source: verl `workers/fsdp_workers.py:ActorRolloutRefWorker.__init__`."""
    size, world = case.axis("sp"), case.spec.world_size
    if size > 1 and world is not None and world % size:
        yield case.on_axis("sp", f"sp={size} does not divide the {world} ranks", f"a divisor of {world}")
