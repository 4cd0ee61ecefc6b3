"""CKPT04x: the config against the model: classes that are wrapped, tied weights, shards that do not come out even."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from ckpt_tools.preflight.rules.rule import HF, Case, Violation, error_rule, shown, warning_rule
from ckpt_tools.units import format_size

_IMBALANCE = 1.25
"""How much more than the mean the fullest rank may hold. Padding of small tensors stays far below."""
_NAMED = 3
"""Tensors that a message names."""


def _wrap_key(case: Case) -> str:
    found = case.fsdp_option("transformer_layer_cls_to_wrap")
    return found.key if found is not None else case.key("wrap_classes")


@error_rule(
    "CKPT040: a class to wrap that the model does not have",
    why="accelerate stops: it could not find the transformer layer class",
    fix="the class name as it is in the model",
    frameworks=HF,
)
def wrap_classes_exist(case: Case) -> Iterator[Violation]:
    """Source: `accelerate/utils/fsdp_utils.py:fsdp2_prepare_auto_wrap_policy`."""
    known = case.facts.module_classes
    if not case.is_fsdp or known is None:
        return
    for name in case.spec.wrap_classes:
        if name not in known:
            near = difflib.get_close_matches(name, [*case.facts.blocks, *known], n=1, cutoff=0.5)
            proposal = next(iter((*near, *case.facts.blocks)), None)
            yield Violation(
                _wrap_key(case),
                f"no module of {case.facts.architecture or 'the model'} is a {shown(name)}",
                f"write {proposal}" if proposal else "see the model's own class names",
            )


@warning_rule(
    "CKPT041: the blocks of the model are not among the classes to wrap",
    why="What is not wrapped belongs to the root: it is gathered at once and stays through forward and backward",
    fix="name the model's blocks",
    frameworks=HF,
)
def blocks_are_named(case: Case) -> Iterator[Violation]:
    """Compare with transformers' `_no_split_modules`; a block that holds a wrapped class counts as covered."""
    wrapped, classes = set(case.spec.wrap_classes), case.facts.module_classes
    if not case.is_fsdp or not wrapped or (classes is not None and not wrapped.issubset(classes)):
        return  # CKPT040 has classes that the model does not have
    missing = [name for name in case.facts.blocks if classes is None or name in classes]
    if missing and wrapped.isdisjoint(missing):
        yield Violation(
            _wrap_key(case),
            f"{', '.join(case.spec.wrap_classes)} is wrapped, the model's blocks are {', '.join(missing)}",
            f"write {','.join(missing)}",
        )


@warning_rule(
    "CKPT042: tied embeddings, and a head of its own among the weights",
    why="The config says that one tensor serves both, the files have two: one of them is dropped, or FSDP2's mapping of"
    " the optimizer's parameters fails",
    fix="tie_word_embeddings: false in config.json if the head was trained, else remove it from the weights",
)
def tied_but_stored(case: Case) -> Iterator[Violation]:
    """Source: `accelerate/accelerator.py:_prepare_fsdp2`, which names this cause when the mapping fails."""
    facts = case.facts
    if not facts.tied_embeddings or not case.is_fsdp:
        return
    heads = [name for name in facts.stored if name.endswith("lm_head.weight")]
    embeddings = [name for name in facts.stored if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if heads and embeddings:
        yield Violation(
            case.key("model", "the model"),
            f"{facts.where} ties the embeddings, but the weights have both {heads[0]} and {embeddings[0]}",
            "tie_word_embeddings: false in config.json, or weights without lm_head.weight",
        )


@warning_rule(
    "CKPT043: shards of very different size",
    why="FSDP cuts dim 0 into equal pieces of rows: a tensor with fewer rows than ranks lies on the first ranks only,"
    " which then need far more memory than the mean",
    fix="fewer shard ranks (replicate over the others), or expert parallelism for stacked experts",
    frameworks=("accelerate", "trainer", "axolotl", "openrlhf"),
)
def even_shards(case: Case) -> Iterator[Violation]:
    """Add up the rows of every rank.

    torchtitan and verl are not asked: they choose another dim where dim 0 has too few rows.
    Source: PyTorch `FSDPParam._init_sharded_param` (chunks of ceil(rows / ranks)).
    """
    ranks = case.shard_ranks
    if not case.is_fsdp2 or ranks <= 1:
        return
    fullest = total = 0
    small: list[tuple[int, str, tuple[int, ...]]] = []
    for name, shape in case.facts.shapes.items():
        num_elems = math.prod(shape)
        total += num_elems
        if not shape or not num_elems:
            continue
        share = num_elems // shape[0] * -(-shape[0] // ranks)
        fullest += share
        if shape[0] < ranks:
            small.append((share, name, shape))
    if total == 0 or fullest * ranks <= total * _IMBALANCE or not small:
        return
    worst = sorted(small, reverse=True)[:_NAMED]
    named = ", ".join(f"{shown(name)} {list(shape)}" for _, name, shape in worst)
    rows = max(shape[0] for _, _, shape in worst)
    yield Violation(
        case.axis_key("dp_shard"),
        f"the fullest of {ranks} ranks holds {fullest * ranks / total:.1f} times the mean"
        f" ({format_size(4 * fullest)} of parameters in f32 instead of {format_size(4 * total // ranks)}):"
        f" {len(small)} tensors have fewer rows than ranks, such as {named}",
        f"at most {rows} shard ranks; the others as dp_replicate",
    )


@error_rule(
    "CKPT044: tp does not divide a dim that FSDP cuts too",
    why="A tensor that TP and FSDP cut on the same dim with a remainder is trained, but saved so that it cannot be"
    " loaded again",
    fix="a tp that divides the dim, or a vocabulary that is padded to a multiple of it",
)
def same_dim(case: Case) -> Iterator[Violation]:
    """Source: PyTorch's `_StridedShard`, which assumes even pieces; `ckpt shard` refuses the same."""
    tp, facts = case.axis("tp"), case.facts
    if tp <= 1 or not case.is_fsdp2 or case.shard_ranks <= 1:
        return
    sizes = [("intermediate size", size) for size in facts.intermediate_sizes]
    if facts.vocab_size is not None:
        sizes.append(("vocabulary", facts.vocab_size))
    for what, size in sizes:
        if size % tp:
            yield case.on_axis(
                "tp",
                f"tp={tp} does not divide the {what} of {size} in {facts.where}, which FSDP cuts as well",
                f"{math.gcd(size, tp)}, or pad it to {-(-size // tp) * tp}",
            )


@warning_rule(
    "CKPT045: tied embeddings keep every rank from starting empty",
    why="verl builds a model with tied embeddings on the CPU of every rank instead of on meta: each process holds all"
    " weights in host memory while it loads",
    fix="host memory for ranks × model, or fewer ranks on a node",
    frameworks=("verl",),
)
def tied_on_cpu(case: Case) -> Iterator[Violation]:
    """Source: verl `workers/fsdp_workers.py` (`use_meta_tensor=not tie_word_embeddings`)."""
    facts = case.facts
    if not facts.tied_embeddings or not case.is_fsdp or facts.num_params is None:
        return
    width = 2 if case.spec.master_dtype in ("bf16", "f16") else 4
    local = case.count("trainer.n_gpus_per_node", 8)
    nbytes = facts.num_params * width * local
    if nbytes > _HOST_BYTES:
        yield Violation(
            case.key("model", "actor_rollout_ref.model.path"),
            f"{facts.where} ties its embeddings: {local} ranks of a node load {format_size(nbytes)} together",
            "nodes with that much memory, or trainer.n_gpus_per_node lower",
        )


_HOST_BYTES = 256 * 10**9
"""Host memory of a node below which nothing is said."""


@error_rule(
    "CKPT046: a sequence longer than the model's positions",
    why="torchtitan refuses it: its table of rotary embeddings ends there",
    fix="a shorter sequence",
    frameworks=("torchtitan",),
)
def sequence_fits(case: Case) -> Iterator[Violation]:
    """Source: torchtitan `models/common/decoder.py`."""
    length, limit = case.spec.seq_len, case.facts.max_positions
    if length is not None and limit is not None and length > limit:
        key = case.key("seq_len", "training.seq_len")
        yield Violation(key, f"{length} tokens, the model has {limit} positions", f"{key}: {limit}")


@error_rule(
    "CKPT047: samples longer than the model's table of positions",
    why="The model looks every position up in a table that it has learned: the first sample that is longer than the"
    " table ends the run with an index out of range",
    fix="samples as long as the table at most, or a model with rotary positions",
    frameworks=("trainer", "axolotl", "verl", "openrlhf"),
)
def positions_are_in_the_table(case: Case) -> Iterator[Violation]:
    """Look for a table as long as the config says: GPT-2, BERT, OPT; rotary and relative positions have none."""
    length, facts = case.spec.seq_len, case.facts
    if length is None or facts.max_positions is None or length <= facts.max_positions:
        return
    # Some tables have a few rows more, for padding (OPT, RoBERTa).
    rows = range(facts.max_positions, facts.max_positions + 3)
    tables = [
        name for name, shape in facts.shapes.items() if name.endswith(_TABLES) and len(shape) == 2 and shape[0] in rows
    ]
    if tables:
        key = case.key("seq_len", "the length of samples")
        yield Violation(
            key,
            f"{length} tokens, and {shown(tables[0])} has places for {facts.max_positions}",
            f"{key}: {facts.max_positions}",
        )


_TABLES = ("position_embeddings.weight", "embed_positions.weight", "wpe.weight")
