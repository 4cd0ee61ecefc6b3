"""CKPT021 and CKPT092: how `fsdp` and `fsdp_config` are written; the rest of CKPT02x and CKPT09x is in `pairs.tsv`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tools.preflight.plain_values import as_truth
from ckpt_tools.preflight.rules.rule import Subject, Violation, error_rule, shown, warning_rule

_V1_STRATEGIES = ("no_shard", "hybrid_shard", "hybrid_shard_zero2")


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
