"""CKPT10x: sizes that no run has, and numbers on the wrong side of zero."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ckpt_tools.preflight.rules.rule import Case, Violation, error_rule, shown
from ckpt_tools.preflight.spec import Framework

MAX_RANKS = 1_000_000
"""Ranks, of the world or of one axis; the largest clusters have a few hundred thousand devices."""
MAX_BATCH = 1_000_000
"""Samples on one rank at once."""
MAX_SEQ_LEN = 100_000_000
"""Tokens of one sample; the longest contexts that were ever trained have some ten million."""
MAX_LORA_RANK = 65_536
"""Rank of an adapter; weights of language models are narrower."""

_AT_LEAST: Mapping[Framework, Mapping[str, int]] = {
    "trainer": {"gradient_accumulation_steps": 1, "per_device_eval_batch_size": 1},
    "axolotl": {
        "gradient_accumulation_steps": 1,
        "eval_batch_size": 1,
        "tensor_parallel_size": 0,
        "context_parallel_size": 0,
        "expert_parallel_size": 0,
        "dp_replicate_size": 0,
    },
    "torchtitan": {"training.steps": 1},
    "ai-toolkit": {
        "config.process[0].train.gradient_accumulation": 1,
        "config.process[0].train.gradient_accumulation_steps": 1,
        "config.process[0].train.steps": 1,
    },
    "verl": {
        "actor_rollout_ref.model.lora_rank": 0,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "data.train_batch_size": 1,
        "model.lora_rank": 0,
        "ulysses_sequence_parallel_size": 1,
    },
    "openrlhf": {
        "lora_rank": 0,
        "ds.lora.rank": 0,
        "fsdp2_tp_size": 1,
        "fsdp2_cp_size": 1,
        "fsdp_tensor_parallel_size": 1,
        "ds.tensor_parallel_size": 1,
        "ring_attn_size": 1,
        "ds.ring_attn_size": 1,
        "train_batch_size": 1,
        "train.batch_size": 1,
    },
}
"""Framework → option → the least that it can be; those whose type says so already are not here."""
_LEARNING_RATES: Mapping[Framework, tuple[str, ...]] = {
    "trainer": ("learning_rate",),
    "axolotl": ("learning_rate",),
    "torchtitan": ("optimizer.lr",),
    "ai-toolkit": ("config.process[0].train.lr",),
    "verl": ("actor_rollout_ref.actor.optim.lr", "optim.lr"),
    "openrlhf": ("learning_rate", "actor_learning_rate", "adam.lr", "actor.adam.lr"),
}


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
    frameworks=tuple(_AT_LEAST),
)
def least_sizes(case: Case) -> Iterator[Violation]:
    """Look at sizes that one of the trainers' own checks, or a division, would stop at."""
    for path, least in _AT_LEAST[case.framework].items():
        found = case.get(path)
        if found is not None and found.count is not None and found.count < least:
            key = f"--{path}" if case.framework == "openrlhf" else path
            yield Violation(key, f"{key} must be at least {least}, got {shown(found.value)}", f"{key}: {least}")


@error_rule(
    "CKPT102: a learning rate below zero",
    why="torch's optimizers stop at it: Invalid learning rate",
    fix="a learning rate above zero",
    frameworks=tuple(_LEARNING_RATES),
)
def learning_rate(case: Case) -> Iterator[Violation]:
    """Source: `torch/optim/adamw.py:AdamW.__init__`."""
    for path in _LEARNING_RATES[case.framework]:
        found = case.get(path)
        if found is None or isinstance(found.value, bool) or not isinstance(found.value, (int, float, str)):
            continue
        try:
            rate = float(found.value)
        except ValueError:
            continue
        if rate < 0 or math.isnan(rate):
            key = f"--{path}" if case.framework == "openrlhf" else path
            yield Violation(key, f"a learning rate of {shown(found.value)}", f"{key}: above zero")
