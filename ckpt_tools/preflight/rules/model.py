"""CKPT04x and CKPT07x: the config against the model; adapters, and quantised base models."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping

from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.plain_values import dtype_name
from ckpt_tools.preflight.rules.rule import Subject, Violation, error_rule, shown, warning_rule
from ckpt_tools.units import format_size

# CKPT04x: the config against the model: classes that are wrapped, tied weights, shards that do not come out even.

_IMBALANCE = 1.25  # how much more than the mean the fullest rank may hold. Padding of small tensors stays far below.
_NAMED = 3  # tensors that a message names


def _wrap_key(case: Subject) -> str:
    found = case.fsdp_option("transformer_layer_cls_to_wrap")
    return found.key if found is not None else case.key("wrap_classes")


@error_rule(
    "CKPT040 (accelerate, trainer, axolotl): a class to wrap that the model does not have",
    why="accelerate fails: it cannot find the transformer layer class",
    fix="use the class name in the model",
)
def wrap_classes_exist(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/utils/fsdp_utils.py:fsdp2_prepare_auto_wrap_policy`."""
    known = case.facts.module_classes
    if not case.is_fsdp or known is None:
        return
    for name in case.spec.wrap_classes:
        if name not in known:
            near = difflib.get_close_matches(name, [*case.facts.blocks, *known], n=1, cutoff=0.5)
            proposal = next(iter((*near, *case.facts.blocks)), None)
            key, what = _wrap_key(case), f"no module of {case.facts.architecture or 'the model'} is a {shown(name)}"
            yield Violation(key, what, f"write {proposal}" if proposal else "see the model's own class names")


@warning_rule(
    "CKPT041 (accelerate, trainer, axolotl): the blocks of the model are not among the classes to wrap",
    why="Unwrapped modules belong to the root: they are gathered together and kept through forward and backward",
    fix="name the model's blocks",
)
def blocks_are_named(case: Subject) -> Iterator[Violation]:
    """Compare with transformers' `_no_split_modules`; a block that holds a wrapped class counts as covered."""
    wrapped, classes = set(case.spec.wrap_classes), case.facts.module_classes
    if not case.is_fsdp or not wrapped or (classes is not None and not wrapped.issubset(classes)):
        return  # CKPT040 has classes that the model does not have
    missing = [name for name in case.facts.blocks if classes is None or name in classes]
    if missing and wrapped.isdisjoint(missing):
        what = f"{', '.join(case.spec.wrap_classes)} is wrapped, but the model's blocks are {', '.join(missing)}"
        yield Violation(_wrap_key(case), what, f"write {','.join(missing)}")


@warning_rule(
    "CKPT042: tied embeddings, and a head of its own among the weights",
    why="The config ties them, but the files contain two tensors: one of them is dropped, or FSDP2's mapping of"
    " the optimizer's parameters fails",
    fix="tie_word_embeddings: false in config.json if the head was trained, else remove it from the weights",
)
def tied_but_stored(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/accelerator.py:_prepare_fsdp2`, which names this cause when the mapping fails."""
    facts = case.facts
    if not facts.tied_embeddings or not case.is_fsdp:
        return
    heads = [name for name in facts.stored if name.endswith("lm_head.weight")]
    embeddings = [name for name in facts.stored if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if heads and embeddings:
        key = case.key("model", "the model")
        what = f"{facts.where} ties the embeddings, but the weights have both {heads[0]} and {embeddings[0]}"
        yield Violation(key, what, "tie_word_embeddings: false in config.json, or weights without lm_head.weight")


@warning_rule(
    "CKPT043 (accelerate, trainer, axolotl, openrlhf): shards of very different size",
    why="FSDP cuts dim 0 into equal pieces of rows: a tensor with fewer rows than ranks lies on the first ranks only,"
    " which then need far more memory than the mean",
    fix="use fewer shard ranks (replicate over the others), or expert parallelism for stacked experts",
)
def even_shards(case: Subject) -> Iterator[Violation]:
    """Source: PyTorch `FSDPParam._init_sharded_param`; torchtitan and verl choose another dim for too few rows."""
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
    why="A tensor that TP and FSDP cut on the same dim with a remainder trains, but is saved in a form that"
    " cannot be loaded again",
    fix="use a tp that divides the dim, or a vocabulary that is padded to a multiple of it",
)
def same_dim(case: Subject) -> Iterator[Violation]:
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
    "CKPT045 (verl): tied embeddings keep every rank from starting empty",
    why="verl builds a model with tied embeddings on the CPU of every rank instead of on meta: each process holds all"
    " weights in host memory while it loads",
    fix="provide host memory for ranks × model, or fewer ranks on a node",
)
def tied_on_cpu(case: Subject) -> Iterator[Violation]:
    """Source: verl `workers/fsdp_workers.py` (`use_meta_tensor=not tie_word_embeddings`)."""
    facts = case.facts
    if not facts.tied_embeddings or not case.is_fsdp or facts.num_params is None:
        return
    width = 2 if case.spec.master_dtype in ("bf16", "f16") else 4
    local = case.count("trainer.n_gpus_per_node", 8)
    nbytes = facts.num_params * width * local
    if nbytes > _HOST_BYTES:
        key = case.key("model", "actor_rollout_ref.model.path")
        what = f"{facts.where} ties its embeddings: {local} ranks of a node load {format_size(nbytes)} together"
        yield Violation(key, what, "nodes with that much memory, or trainer.n_gpus_per_node lower")


_HOST_BYTES = 256 * 10**9  # host memory of a node below which nothing is said


@error_rule(
    "CKPT046 (torchtitan): a sequence longer than the model's positions",
    why="torchtitan rejects it: its table of rotary embeddings ends there",
    fix="use a shorter sequence",
)
def sequence_fits(case: Subject) -> Iterator[Violation]:
    """Source: torchtitan `models/common/decoder.py`."""
    length, limit = case.spec.seq_len, case.facts.max_positions
    if length is not None and limit is not None and length > limit:
        key = case.key("seq_len", "training.seq_len")
        yield Violation(key, f"{length} tokens, but the model has {limit} positions", f"{key}: {limit}")


@error_rule(
    "CKPT047 (trainer, axolotl, verl, openrlhf): samples longer than the model's table of positions",
    why="The model has a learned table of positions: the first sample that is longer than the"
    " table ends the run with an index out of range",
    fix="use samples no longer than the table, or a model with rotary positions",
)
def positions_are_in_the_table(case: Subject) -> Iterator[Violation]:
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
        what = f"{length} tokens, but {shown(tables[0])} has {facts.max_positions} positions"
        yield Violation(key, what, f"{key}: {facts.max_positions}")


_TABLES = ("position_embeddings.weight", "embed_positions.weight", "wpe.weight")


# CKPT07x: adapters, and base models whose weights are quantised.

_LONG = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_STORAGE: Mapping[Framework, str] = {
    "accelerate": "bnb_4bit_quant_storage",
    "trainer": "bnb_4bit_quant_storage",
    "axolotl": "bnb_config_kwargs.bnb_4bit_quant_storage",
}
"""Option that says how 4-bit weights are stored; a script beside accelerate's config says it elsewhere."""


@error_rule(
    "CKPT070 (accelerate, trainer, axolotl): 4-bit weights stored as another dtype than the one that computes",
    why="FSDP2 gathers a block's parameters in one original dtype: packed bytes stored as another float type"
    " cannot join them",
    fix="bnb_4bit_quant_storage equal to the compute dtype",
)
def storage_dtype(case: Subject) -> Iterator[Violation]:
    """Source: PyTorch `FSDPParamGroup`, the bitsandbytes guide on FSDP-QLoRA, axolotl `_set_quantization_config`."""
    found, packed = case.get(_STORAGE[case.framework]), case.get("load_in_4bit")
    if found is not None:
        storage, key = found.text, found.key
    elif packed is not None and packed.is_on and case.framework == "axolotl":
        storage, key = "bfloat16", packed.key  # axolotl's own default
    elif case.facts.quantization is not None and case.facts.quantization.bits == 4:
        storage, key = case.facts.quantization.storage or "", f"{case.facts.where}: quantization_config"
    else:
        return
    compute = case.spec.param_dtype
    if case.is_fsdp and compute in _LONG and dtype_name(storage) is not None and dtype_name(storage) != compute:
        what = f"4-bit weights are stored as {dtype_name(storage)}, but {compute} is the compute dtype"
        yield Violation(key, what, f"bnb_4bit_quant_storage: {_LONG[compute]}")


@warning_rule(
    "CKPT071 (accelerate, trainer, axolotl): 4-bit weights stored as bytes",
    why="accelerate excludes non-floating-point parameters from FSDP2: every rank keeps the whole base model",
    fix="bnb_4bit_quant_storage: bfloat16",
)
def storage_bytes(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/utils/fsdp_utils.py:fsdp2_prepare_model`; bitsandbytes stores uint8 unless told otherwise."""
    if not case.is_fsdp:
        return
    found = case.get(_STORAGE[case.framework])
    if found is not None or case.framework == "axolotl":
        if found is not None and found.text.endswith("int8"):
            yield Violation(found.key, f"{found}: 4-bit weights stay on every rank", f"{found.key}: bfloat16")
        return
    packed = case.facts.quantization
    if packed is None or (packed.method, packed.bits) != ("bitsandbytes", 4):
        return
    if packed.storage in (None, "uint8"):
        what = "4-bit weights are stored as uint8 and stay whole on every rank"
        yield Violation(f"{case.facts.where}: quantization_config", what, '"bnb_4bit_quant_storage": "bfloat16"')


@error_rule(
    "CKPT077: an adapter named, but no rank",
    why="A rank below 1 has no weights to train",
    fix="set the rank of the adapter",
)
def adapter_rank(case: Subject) -> Iterator[Violation]:
    """Look at the rank of the adapter."""
    adapter = case.spec.adapter
    if adapter is not None and adapter.rank is not None and adapter.rank < 1:
        key = case.key("adapter")
        yield Violation(key, f"an adapter of rank {adapter.rank}", f"{key}: 16")


@error_rule(
    "CKPT079 (trainer, axolotl, verl, openrlhf): an adapter for modules that the model does not have",
    why="PEFT fails if the model has none of the target modules",
    fix="use names of the model's own linear modules, or all-linear",
)
def targets_exist(case: Subject) -> Iterator[Violation]:
    """Source: `peft/tuners/tuners_utils.py:BaseTuner.inject_adapter`; patterns are not looked at."""
    adapter, facts = case.spec.adapter, case.facts
    if adapter is None or facts.module_classes is None or not adapter.targets:
        return
    if any(target == "all-linear" or not _PLAIN_NAME.fullmatch(target) for target in adapter.targets):
        return
    modules = {module for name in facts.shapes for module in _modules_around(name)}
    if any(module.endswith(f".{target}") for module in modules for target in adapter.targets):
        return
    linear = sorted({module.rpartition(".")[2] for module in modules if module.endswith(("_proj", "_lin", "dense"))})
    found = case.first(*_TARGETS)
    what = f"{facts.architecture} has no module {' or '.join(map(shown, adapter.targets[:_MAX_NAMED]))}"
    fix = f"for example {', '.join(linear[:_MAX_NAMED])}" if linear else "names of its linear modules"
    yield Violation(case.key("adapter") if found is None else found.key, what, fix)


_PLAIN_NAME = re.compile(r"[\w.]+")
_MAX_NAMED = 4
_TARGETS = tuple(f"{at}target_modules" for at in ("lora_", "actor_rollout_ref.model.", "model.", "ds.lora.", ""))


def _modules_around(name: str) -> Iterator[str]:
    """Yield the modules that a parameter is in, each with a dot in front."""
    parts = name.split(".")[:-1]
    return ("." + ".".join(parts[: i + 1]) for i in range(len(parts)))
