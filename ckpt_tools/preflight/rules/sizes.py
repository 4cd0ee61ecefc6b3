"""CKPT10x: sizes that no run has, and numbers on the wrong side of zero."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.preflight.rules.conditions import below_limits, frameworks_of
from ckpt_tools.preflight.rules.rule import Case, Violation, error_rule, shown

MAX_RANKS = 1_000_000
"""Ranks, of the world or of one axis; the largest clusters have a few hundred thousand devices."""
MAX_BATCH = 1_000_000
"""Samples on one rank at once."""
MAX_SEQ_LEN = 100_000_000
"""Tokens of one sample; the longest contexts that were ever trained have some ten million."""
MAX_LORA_RANK = 65_536
"""Rank of an adapter; weights of language models are narrower."""


@error_rule(
    "CKPT100: an impossibly large size",
    why="A digit too many, or the wrong unit: no cluster has these ranks, and no device holds such a sample",
    fix="the intended size",
)
def absurd_sizes(case: Case) -> Iterator[Violation]:
    """Compare sizes with bounds that lie far beyond the largest runs."""
    sizes = [
        (case.key("world_size"), case.spec.world_size, MAX_RANKS, "ranks"),
        *((case.axis_key(axis), size, MAX_RANKS, "ranks") for axis, size in case.spec.axes.items()),
        (case.key("batch_size"), case.spec.batch_size, MAX_BATCH, "samples on one rank"),
        (case.key("seq_len"), case.spec.seq_len, MAX_SEQ_LEN, "tokens in one sample"),
    ]
    adapter = case.spec.adapter
    if adapter is not None:
        sizes.append((case.key("adapter"), adapter.rank, MAX_LORA_RANK, "as the rank of an adapter"))
    for key, size, most, what in sizes:
        if size is not None and size > most:
            yield Violation(key, f"{size} {what}, more than {most}", f"{key}: at most {most}")


@error_rule(
    "CKPT101: a size below its minimum",
    why="The trainer stops at it, divides by it, or trains nothing",
    fix="a whole number that is large enough, or leave the option out",
    frameworks=frameworks_of("limits.tsv", "CKPT101"),
)
def least_sizes(case: Case) -> Iterator[Violation]:
    """Look at sizes that one of the trainers' own checks, or a division, would stop at: `limits.tsv`."""
    for found, least in below_limits(case, "CKPT101"):
        what = f"{found.key} must be at least {least}, got {shown(found.value)}"
        yield Violation(found.key, what, f"{found.key}: {least}")


@error_rule(
    "CKPT102: a learning rate below zero",
    why="torch's optimizers stop at it: Invalid learning rate",
    fix="a learning rate above zero",
    frameworks=frameworks_of("limits.tsv", "CKPT102"),
)
def learning_rate(case: Case) -> Iterator[Violation]:
    """Source: `torch/optim/adamw.py:AdamW.__init__`."""
    for found, _ in below_limits(case, "CKPT102"):
        yield Violation(found.key, f"a learning rate of {shown(found.value)}", f"{found.key}: above zero")
