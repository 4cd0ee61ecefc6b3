"""CKPT03x: tensor, sequence, expert and pipeline parallelism against the model and against each other."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.preflight.rules.rule import ALL, Case, Violation, enabled, error_rule, warning_rule


def _divisors(number: int, limit: int) -> str:
    """Return the divisors of a number up to `limit`, as text."""
    return ", ".join(str(size) for size in range(1, min(number, limit) + 1) if number % size == 0)


@error_rule(
    "CKPT030: tp does not divide the attention heads",
    why="Each rank computes whole heads; with a remainder, reshaping the projections fails in the first forward",
    fix="a tp that divides both the heads and the key and value heads",
)
def tp_divides_heads(case: Case) -> Iterator[Violation]:
    """Source: torchtitan `models/common/decoder.py`; transformers' attention views (…, -1, head_dim) of each shard."""
    tp = case.axis("tp")
    for what, heads in (("attention heads", case.facts.num_heads), ("key and value heads", case.facts.num_kv_heads)):
        if heads is not None and tp > 1 and heads % tp:
            yield case.on_axis(
                "tp",
                f"tp={tp} does not divide the {heads} {what} of {case.facts.where}",
                f"one of {_divisors(heads, 64)}",
            )
            return


@error_rule(
    "CKPT031: sequence parallelism does not divide the attention heads",
    why="Ulysses gives each rank some heads of the whole sequence; the trainer refuses a remainder",
    fix="a size that divides the heads, and divides the key and value heads or is a multiple of them",
    frameworks=("accelerate", "verl"),
)
def sp_divides_heads(case: Case) -> Iterator[Violation]:
    """Source: verl `models/transformers/monkey_patch.py:apply_monkey_patch`; DeepSpeed's UlyssesSPAttentionHF."""
    size = case.axis("sp")
    if size <= 1:
        return
    heads, kv_heads = case.facts.num_heads, case.facts.num_kv_heads
    if heads is not None and heads % size:
        yield case.on_axis(
            "sp",
            f"sp={size} does not divide the {heads} attention heads of {case.facts.where}",
            f"one of {_divisors(heads, 64)}",
        )
    elif kv_heads is not None and kv_heads % size and size % kv_heads:
        yield case.on_axis(
            "sp",
            f"sp={size} neither divides the {kv_heads} key and value heads nor is a multiple of them",
            f"one of {_divisors(kv_heads, 64)}",
        )


@error_rule(
    "CKPT032: ep does not divide the experts",
    why="Each rank of the axis owns the same number of experts",
    fix="an ep that divides the number of experts",
)
def ep_divides_experts(case: Case) -> Iterator[Violation]:
    """Source: torchtitan `models/common/decoder.py`, transformers `integrations/tensor_parallel.py`."""
    ep, experts = case.axis("ep"), case.facts.num_experts
    if ep > 1 and experts is not None and experts % ep:
        yield case.on_axis(
            "ep",
            f"ep={ep} does not divide the {experts} experts of {case.facts.where}",
            f"one of {_divisors(experts, 256)}",
        )


@error_rule(
    "CKPT033: ep does not divide the ranks that it borrows",
    why="Experts are spread over the ranks of dp_shard, cp and tp: ep must divide their product",
    fix="an ep that divides dp_shard × cp × tp",
    frameworks=("torchtitan", "trainer"),
)
def ep_divides_ranks(case: Case) -> Iterator[Violation]:
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
    why="The axis does nothing for a dense model; in axolotl it still takes its ranks away",
    fix="set it to 1",
)
def ep_without_experts(case: Case) -> Iterator[Violation]:
    """Look for an ep axis that no layer uses."""
    if case.axis("ep") > 1 and case.facts.num_layers and not case.facts.is_moe:
        yield case.on_axis("ep", f"ep={case.axis('ep')}, but {case.facts.where} has no experts", "1")


@warning_rule(
    "CKPT035: expert parallelism that takes ranks of its own",
    why="In axolotl ep is an axis of the mesh, and dp_shard_size counts the ranks beside it: an expert is sharded over"
    " dp_shard ranks, everything else over ep × dp_shard × cp (in older versions over dp_shard × cp, and kept ep"
    " times); torchtitan and transformers fold ep into dp_shard × cp × tp",
    fix="nothing if that is intended: ep × dp_shard_size × context_parallel_size is the world size",
    frameworks=("axolotl",),
)
def ep_is_an_axis(case: Case) -> Iterator[Violation]:
    """Say what is sharded over which ranks.

    Source: axolotl `expert_parallel/plugin.py:_resolve_ep_group`, `monkeypatch/accelerate/parallelism_config.py` (its
    `dp_shard_cp_dim_names`); torchtitan `ParallelismConfig`.
    """
    ep, world = case.axis("ep"), case.spec.world_size
    if ep > 1:
        left = f"{world // ep} of {world}" if world else f"1/{ep} of the"
        yield Violation(
            case.axis_key("ep"),
            f"ep={ep} takes ranks of its own: {left} are left for dp_shard_size, and an expert is sharded over"
            " those; everything else is sharded over the ranks of ep as well",
            "nothing if that is intended; else a smaller expert_parallel_size",
        )


@error_rule(
    "CKPT036: expert parallelism beside axes that it cannot be combined with",
    why="axolotl's plugin has no EP with TP, and wants dp_shard_size or context_parallel_size to name the other ranks",
    fix="ep × cp × dp_shard = world size, and tensor_parallel_size 1",
    frameworks=("axolotl",),
)
def ep_combination(case: Case) -> Iterator[Violation]:
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
        yield Violation(
            "expert_parallel_size",
            f"ep={ep} × dp_shard_size={shard} × context_parallel_size={cp} is not the world of {world} ranks",
            f"dp_shard_size: {rest}" if rest else "sizes whose product is the world size",
        )


@error_rule(
    "CKPT037: tied embeddings with pipeline parallelism",
    why="Embeddings and head are one tensor, and would lie in the first and in the last stage",
    fix="pipeline_parallel_degree 1, or a model with its own head",
    frameworks=ALL,
)
def tied_and_pipelined(case: Case) -> Iterator[Violation]:
    """Source: torchtitan `models/common/decoder.py`."""
    if case.facts.tied_embeddings and case.axis("pp") > 1:
        yield case.on_axis("pp", f"pp={case.axis('pp')}, and {case.facts.where} ties its embeddings to its head", "1")


@error_rule(
    "CKPT038: the sequence is cut, but what that needs is off",
    why="The trainer refuses it, or computes attention over pieces as if they were whole sequences",
    fix="switch on what the finding names",
    frameworks=("axolotl", "verl", "openrlhf"),
)
def sequence_parts(case: Case) -> Iterator[Violation]:
    """Look for ring attention without flash attention or packing, and Ulysses with padding.

    Source: axolotl `check_context_parallel_size`, verl `FSDPActorConfig.validate` and `fsdp_sft_trainer.py`,
    OpenRLHF `cli/train_sft.py`.
    """
    if case.framework == "axolotl":
        yield from _axolotl_sequence(case)
    elif case.framework == "verl":
        yield from _verl_sequence(case)
    else:
        ring, packing = case.flag("ring_attn_size"), case.flag("packing_samples")
        if ring is not None and case.axis("sp") > 1 and not enabled(packing):
            yield Violation(
                ring.key,
                f"{ring.key} {ring.value} needs packed samples",
                "--ds.packing_samples" if "." in ring.key else "--packing_samples",
            )


def _verl_sequence(case: Case) -> Iterator[Violation]:
    is_sft = case.get("model.partial_pretrain") is not None
    path = "use_remove_padding" if is_sft else "actor_rollout_ref.model.use_remove_padding"
    padding, size = case.get(path), case.axis("sp")
    # PPO's own config switches it on, the one for SFT leaves it out.
    is_off = padding.is_off if padding is not None else is_sft
    if size > 1 and is_off:
        yield Violation(
            case.axis_key("sp"), f"ulysses_sequence_parallel_size={size} needs use_remove_padding", f"{path}: true"
        )


def _axolotl_sequence(case: Case) -> Iterator[Violation]:
    size = case.first("context_parallel_size", "sequence_parallel_degree")
    if size is None or (size.count or 1) <= 1:
        return
    kernel, old = case.get("attn_implementation"), case.get("flash_attention")
    if enabled(case.get("use_glm_dsa_kernels")):
        return
    is_flash = (kernel is not None and "flash" in kernel.text) or (kernel is None and enabled(old) is not None)
    if not is_flash:
        yield Violation(size.key, f"{size} needs flash attention", "attn_implementation: flash_attention_2")
    packing, batch = enabled(case.get("sample_packing")), case.get("micro_batch_size")
    if packing is not None and batch is not None and (batch.count or 1) > 1:
        yield Violation(
            "micro_batch_size",
            f"{size} with packed samples takes one sample at a time, the config has {batch}",
            "micro_batch_size: 1",
        )


@error_rule(
    "CKPT039: more pipeline stages than layers",
    why="Some stage would be empty",
    fix="fewer stages",
    frameworks=("torchtitan",),
)
def stages_have_layers(case: Case) -> Iterator[Violation]:
    """Source: torchtitan `distributed/pipeline_parallel.py`: the embedding and the head count as a layer each."""
    pp, layers = case.axis("pp"), case.facts.num_layers
    if pp <= 1 or layers is None:
        return
    weights = 0
    for name in ("first_stage_less_layers", "last_stage_less_layers"):
        weights += case.count(f"parallelism.pipeline_parallel_{name}")
    if pp > layers + weights:
        yield case.on_axis("pp", f"pp={pp} stages for {layers} layers", f"{layers}")
