"""CKPT00x and CKPT03x: ranks, the mesh that they are meant to form, and its axes against the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ckpt_tools.preflight.plain_values import words_of
from ckpt_tools.preflight.rules.option_words import below_limits
from ckpt_tools.preflight.rules.rule import Subject, Violation, error_rule, shown, warning_rule

# CKPT00x: ranks, and the mesh that they are meant to form.


def parallelism_sizes(case: Subject) -> Mapping[str, object] | None:
    """Return accelerate's `parallelism_config`, or None where it is missing or empty, which switches it off."""
    found = case.get("parallelism_config")
    return found.value if found is not None and isinstance(found.value, Mapping) and found.value else None


@error_rule(
    "CKPT001: the axes of the mesh do not multiply to the world size",
    why="The mesh needs one place per rank: building it fails on all ranks, after the job was scheduled",
    fix="change one axis, or the number of processes, so that the product is the world size",
)
def axis_product(case: Subject) -> Iterator[Violation]:
    """Source: accelerate `_validate_accelerator`, torchtitan `ParallelDims._validate`, verl `create_device_mesh`."""
    world, axes = case.spec.world_size, case.spec.axes
    if world is None:
        return
    if case.framework in ("accelerate", "trainer") and axes.get("sp", 1) > 1:
        return
    sizes = {name: axes[name] for name in words_of(case.framework, "mesh") if name in axes}
    if not sizes or any(size == 0 or size < -1 for size in sizes.values()):
        return
    fixed = math.prod(size for size in sizes.values() if size > 0)
    rest = [name for name, size in sizes.items() if size == -1]
    if fixed == world or (rest and world % fixed == 0):
        return
    if case.framework in ("accelerate", "trainer") and fixed == 1:
        return  # accelerate then makes dp_replicate of all ranks
    product = " × ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "1"
    note = ""
    if case.framework == "torchtitan" and case.axis("ep") > 1:
        note = f"; {case.axis_key('ep')} adds no ranks"
    relation = f"does not divide {world}" if rest else f"is {fixed}"
    named = [name for name, size in sizes.items() if size > 0] or rest
    largest = max(named, key=lambda name: sizes[name])
    others = fixed // max(sizes[largest], 1)
    change = f"{case.axis_key(largest)}: {world // others}" if world % others == 0 else "sizes that divide the world"
    fix = f"set {change}, or start {fixed if not rest else math.lcm(fixed, world)} ranks"
    yield Violation(case.axis_key(largest), f"the mesh {product} {relation}, but there are {world} ranks{note}", fix)


@error_rule(
    "CKPT002 (accelerate, trainer, torchtitan, verl): a parallel size is not a positive number",
    why="The trainer rejects it when it builds the mesh",
    fix="write 1 to switch an axis off; only torchtitan's data_parallel_shard_degree and verl's fsdp_size may be -1",
)
def positive_sizes(case: Subject) -> Iterator[Violation]:
    """Look for sizes below 1."""
    for one, _ in below_limits(case, "CKPT002"):
        what = f"{one.key} must be at least 1, got {shown(one.value)}"
        yield Violation(one.key, what, f"{one.key}: 1 switches it off")
    lone = {
        "torchtitan": "parallelism.data_parallel_shard_degree",
        "verl": "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    }.get(case.framework)
    found = case.get(lone) if lone else None
    if found is not None and (case.count(found.key) == 0 or case.count(found.key) < -1):
        fix = f"{found.key}: -1 takes the rest"
        yield Violation(found.key, f"{found.key} must be -1 or at least 1, got {shown(found.value)}", fix)


@error_rule(
    "CKPT003 (accelerate, trainer): `parallelism_config` without FSDP2",
    why="accelerate builds the mesh and then rejects it or, under DDP, shards nothing on the axes that need it",
    fix="distributed_type: FSDP and fsdp_config.fsdp_version: 2, or remove parallelism_config",
)
def needs_fsdp2(case: Subject) -> Iterator[Violation]:
    """Source: accelerate `_validate_accelerator` (FSDP1 is no multi-device), `state.py` (cp without an fsdp_plugin)."""
    if parallelism_sizes(case) is None or case.is_fsdp2 or case.spec.world_size == 1:
        return
    sharded = [axis for axis in ("dp_shard", "cp") if case.axis(axis) > 1]
    if case.spec.engine == "fsdp1":
        version = case.fsdp_option("version")
        key = "parallelism_config"
        what = f"it needs FSDP2, but the config uses FSDP1 ({version or 'no fsdp_version, which means 1'})"
        yield Violation(key, what, f"{'fsdp_config.fsdp_version' if version is None else version.key}: 2")
    elif case.spec.engine in ("ddp", "none") and sharded:
        is_trainer = case.framework == "trainer"
        switch = case.get("fsdp" if is_trainer else "distributed_type")
        what = f"{sharded[0]}={case.axis(sharded[0])} needs FSDP2, but the config has {switch or 'no FSDP'}"
        fix = "fsdp: true" if is_trainer else "distributed_type: FSDP and fsdp_config: {fsdp_version: 2}"
        yield Violation(case.axis_key(sharded[0]), what, fix)


@error_rule(
    "CKPT004 (accelerate, trainer): FSDP2 has no axis to shard over",
    why="Parameters are sharded over dp_shard and cp; with both at 1 accelerate does not prepare the model",
    fix="dp_shard_size greater than 1, or no parallelism_config at all: then FSDP shards over all ranks",
)
def something_to_shard_over(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/parallelism_config.py:_validate_accelerator`."""
    if parallelism_sizes(case) is None or not case.is_fsdp2 or case.spec.world_size == 1:
        return
    is_ddp_with_tp = case.axis("dp_replicate") > 1 and case.axis("tp") > 1  # CKPT006 has it
    if case.axis("dp_shard") == 1 and case.axis("cp") == 1 and not is_ddp_with_tp:
        sizes = ", ".join(f"{axis}={case.axis(axis)}" for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
        key = case.key("axes.dp_shard", "parallelism_config")
        what = f"FSDP2 with {sizes}: dp_shard or cp must be greater than 1"
        yield Violation(key, what, "dp_shard_size: the ranks that are left, or a smaller tp_size")


@warning_rule(
    "CKPT008 (accelerate): the processes do not spread evenly over the machines",
    why="`accelerate launch` starts num_processes // num_machines on each machine: fewer ranks than the config says",
    fix="make num_processes (of all machines together) a multiple of num_machines",
)
def even_machines(case: Subject) -> Iterator[Violation]:
    """Source: `accelerate/utils/launch.py:prepare_multi_gpu_env`."""
    ranks, count = case.count("num_processes", 0), case.count("num_machines")
    if count > 0 and ranks > 0 and ranks % count:
        what = f"{ranks} processes on {count} machines: {ranks // count} start on each, {ranks % count} never start"
        yield Violation("num_processes", what, f"num_processes: {-(-ranks // count) * count}")


@warning_rule(
    "CKPT009 (accelerate, verl): --world-size is not the world size of the config",
    why="The config would start a different number of ranks from the one that was checked",
    fix="change the config, or pass its number of ranks to --world-size",
)
def other_world(case: Subject) -> Iterator[Violation]:
    """Compare `--world-size` with what the file starts."""
    if case.framework == "accelerate":
        keys: tuple[str, ...] = ("num_processes",)
    else:
        keys = ("trainer.n_gpus_per_node", "trainer.nnodes")
    ranks = math.prod(case.count(key, 0) for key in keys)  # 0 where the file does not say
    if ranks > 0 and case.spec.world_size not in (None, ranks):
        what = f"the config starts {ranks} ranks, but {case.spec.world_size} were checked"
        yield Violation(keys[0], what, f"{' × '.join(keys)} = {shown(case.spec.world_size)}, or --world-size {ranks}")


# CKPT03x: tensor, sequence, expert and pipeline parallelism against the model and against each other.


def _divisors(number: int, limit: int) -> str:
    """Return the divisors of a number up to `limit`, as text."""
    return ", ".join(str(size) for size in range(1, min(number, limit) + 1) if number % size == 0)


@error_rule(
    "CKPT030: tp does not divide the attention heads",
    why="Each rank computes whole heads; with a remainder, reshaping the projections fails in the first forward",
    fix="use a tp that divides both the heads and the key and value heads",
)
def tp_divides_heads(case: Subject) -> Iterator[Violation]:
    """Source: torchtitan `models/common/decoder.py`; transformers' attention views (…, -1, head_dim) of each shard."""
    tp = case.axis("tp")
    for what, heads in (("attention heads", case.facts.num_heads), ("key and value heads", case.facts.num_kv_heads)):
        if heads is not None and tp > 1 and heads % tp:
            fix = f"one of {_divisors(heads, 64)}"
            yield case.on_axis("tp", f"tp={tp} does not divide the {heads} {what} of {case.facts.where}", fix)
            return


@error_rule(
    "CKPT031 (accelerate, verl): sequence parallelism does not divide the attention heads",
    why="Ulysses assigns each rank some heads of the whole sequence; the trainer rejects a remainder",
    fix="use a size that divides the heads, and divides the key and value heads or is a multiple of them",
)
def sp_divides_heads(case: Subject) -> Iterator[Violation]:
    """Source: verl `models/transformers/monkey_patch.py:apply_monkey_patch`; DeepSpeed's UlyssesSPAttentionHF."""
    size = case.axis("sp")
    if size <= 1:
        return
    heads, kv_heads = case.facts.num_heads, case.facts.num_kv_heads
    if heads is not None and heads % size:
        what = f"sp={size} does not divide the {heads} attention heads of {case.facts.where}"
        yield case.on_axis("sp", what, f"one of {_divisors(heads, 64)}")
    elif kv_heads is not None and kv_heads % size and size % kv_heads:
        what = f"sp={size} neither divides the {kv_heads} key and value heads nor is a multiple of them"
        yield case.on_axis("sp", what, f"one of {_divisors(kv_heads, 64)}")


@error_rule(
    "CKPT032: ep does not divide the experts",
    why="Each rank of the axis owns the same number of experts",
    fix="use an ep that divides the number of experts",
)
def ep_divides_experts(case: Subject) -> Iterator[Violation]:
    """Source: torchtitan `models/common/decoder.py`, transformers `integrations/tensor_parallel.py`."""
    ep, experts = case.axis("ep"), case.facts.num_experts
    if ep > 1 and experts is not None and experts % ep:
        what = f"ep={ep} does not divide the {experts} experts of {case.facts.where}"
        yield case.on_axis("ep", what, f"one of {_divisors(experts, 256)}")


@error_rule(
    "CKPT033 (torchtitan, trainer): ep does not divide the ranks that it borrows",
    why="Experts are spread over the ranks of dp_shard, cp and tp: ep must divide their product",
    fix="use an ep that divides dp_shard × cp × tp",
)
def ep_divides_ranks(case: Subject) -> Iterator[Violation]:
    """Source: torchtitan `ParallelDims._validate`, `transformers/distributed/configuration_utils.py`."""
    ep, shard = case.axis("ep"), case.axis("dp_shard")
    if ep <= 1 or shard < 1:
        return
    ranks = shard * case.axis("cp") * case.axis("tp")
    if ranks % ep:
        yield case.on_axis(
            "ep", f"ep={ep} does not divide dp_shard × cp × tp = {ranks}", f"one of {_divisors(ranks, 256)}"
        )


@warning_rule(
    "CKPT034: expert parallelism for a model without experts",
    why="The axis does nothing for a dense model, but in axolotl it still uses up ranks",
    fix="set it to 1",
)
def ep_without_experts(case: Subject) -> Iterator[Violation]:
    """Look for an ep axis that no layer uses."""
    if case.axis("ep") > 1 and case.facts.num_layers and not case.facts.is_moe:
        yield case.on_axis("ep", f"ep={case.axis('ep')}, but {case.facts.where} has no experts", "1")


@warning_rule(
    "CKPT035 (axolotl): expert parallelism that takes ranks of its own",
    why="In axolotl ep is an axis of the mesh, and dp_shard_size counts the ranks beside it: an expert is sharded over"
    " dp_shard ranks, everything else over ep × dp_shard × cp (in older versions over dp_shard × cp, and kept ep"
    " times); torchtitan and transformers fold ep into dp_shard × cp × tp",
    fix="no change if this is intended: ep × dp_shard_size × context_parallel_size is the world size",
)
def ep_is_an_axis(case: Subject) -> Iterator[Violation]:
    """Source: axolotl `_resolve_ep_group` and its `dp_shard_cp_dim_names`; torchtitan `ParallelismConfig`."""
    ep, world = case.axis("ep"), case.spec.world_size
    if ep > 1:
        left = f"{world // ep} of {world}" if world else f"1/{ep} of the"
        yield Violation(
            case.axis_key("ep"),
            f"ep={ep} uses its own ranks: {left} are left for dp_shard_size, and an expert is sharded over"
            " those; everything else is sharded over the ranks of ep as well",
            "no change if this is intended; otherwise use a smaller expert_parallel_size",
        )


@error_rule(
    "CKPT036 (axolotl): expert parallelism beside axes that it cannot be combined with",
    why="axolotl's plugin does not support EP with TP, and needs dp_shard_size or context_parallel_size for the rest",
    fix="ep × cp × dp_shard = world size, and tensor_parallel_size 1",
)
def ep_combination(case: Subject) -> Iterator[Violation]:
    """Source: axolotl `expert_parallel/plugin.py:_resolve_ep_group`, which reads the options, not the filled mesh."""
    ep, world = case.axis("ep"), case.spec.world_size
    if ep <= 1 or world is None:
        return
    sizes = {name: case.count(name) for name in ("dp_shard_size", "context_parallel_size", "tensor_parallel_size")}
    shard, cp, tp = sizes.values()
    if tp > 1:
        yield Violation("tensor_parallel_size", f"ep={ep} with tp={tp} is not supported", "tensor_parallel_size: 1")
    elif ep * shard * cp * tp != world:
        rest = world // (ep * cp) if world % (ep * cp) == 0 else None
        key = "expert_parallel_size"
        what = f"ep={ep} × dp_shard_size={shard} × context_parallel_size={cp} does not equal the {world} ranks"
        yield Violation(key, what, f"dp_shard_size: {rest}" if rest else "sizes whose product is the world size")


@error_rule(
    "CKPT037: tied embeddings with pipeline parallelism",
    why="Embeddings and head are one tensor, which both the first and the last stage would need",
    fix="pipeline_parallel_degree 1, or a model with its own head",
)
def tied_and_pipelined(case: Subject) -> Iterator[Violation]:
    """Source: torchtitan `models/common/decoder.py`."""
    if case.facts.tied_embeddings and case.axis("pp") > 1:
        yield case.on_axis("pp", f"pp={case.axis('pp')}, and {case.facts.where} ties its embeddings to its head", "1")


@error_rule(
    "CKPT039 (torchtitan): more pipeline stages than layers", why="Some stage would be empty", fix="fewer stages"
)
def stages_have_layers(case: Subject) -> Iterator[Violation]:
    """Source: torchtitan `distributed/pipeline_parallel.py`: the embedding and the head count as a layer each."""
    pp, layers = case.axis("pp"), case.facts.num_layers
    if pp <= 1 or layers is None:
        return
    weights = 0
    for name in ("first_stage_less_layers", "last_stage_less_layers"):
        weights += case.count(f"parallelism.pipeline_parallel_{name}")
    if pp > layers + weights:
        yield case.on_axis("pp", f"pp={pp} stages for {layers} layers", f"{layers}")
