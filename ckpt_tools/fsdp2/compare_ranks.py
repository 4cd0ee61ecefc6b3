"""Do all ranks have the same model? Compared before a collective mixes up what differs, or from traces after it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.names import group_names
from ckpt_tools.fsdp2.catalogue import build_finding
from ckpt_tools.fsdp2.internals import local_of, mesh_axes, non_persistent_names, read_groups, read_states, shown
from ckpt_tools.fsdp2.local import bytes_of
from ckpt_tools.text import first_few

_MAX_FINDINGS = 8  # Findings per code and rank: a whole model that differs says the same thing a thousand times


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank's model looks like, small enough to send."""

    structure: tuple[str, ...]  # Every wrapped module with its mesh and resharding, sorted
    parameters: tuple[str, ...]  # FQN, shape, dtype and requires_grad of every parameter, in the order of the model
    replicas: Mapping[str, str]  # Tensor that other ranks have too → digest of its bytes
    buffers: Mapping[str, str]  # Non-persistent buffer → digest of its bytes
    with_grad: tuple[str, ...]  # FQNs of the managed parameters that have a gradient


def compare_ranks(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> list[Finding]:
    """Compare structure, order of parameters, replicas and gradients over all ranks. Collective.

    Call it on the built model (weights that differ are still there to be seen), again once it is sharded, and after
    a backward pass. Reads every replicated byte once; sends digests.

    Args:
        model: On every rank.
        group: The ranks to compare; all by default.

    Returns:
        The same findings on every rank: `rank-structure`, `param-order`, `rank-init`, `garbage-buffer`, `rank-unused`.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return []
    record = read_record(model)
    digests: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, xxhash.xxh3_128_hexdigest(repr(record).encode()), group=group)
    if len(set(digests)) == 1:
        return []
    records: list[RankRecord | None] = [None] * len(digests)
    dist.all_gather_object(records, record, group=group)
    return compare_records([record for record in records if record is not None])


def read_record(model: nn.Module) -> RankRecord:
    """Return this rank's record."""
    groups = read_groups(model)
    is_fresh = all(state.is_root is None for state in read_states(model))
    replicas = {}
    for fqn, parameter in model.named_parameters():
        key = _replica_key(fqn, parameter)
        if not parameter.is_meta and key is not None:
            replicas[key] = _digest(parameter)
    buffers: dict[str, str] = {}
    for name, module in model.named_modules():
        transient = non_persistent_names(module)
        for key, buffer in module.named_buffers(recurse=False):
            # Running statistics and caches go their own ways on every rank once data has flowed.
            if is_fresh and not buffer.is_meta:
                target = buffers if key in transient else replicas
                target[f"{name}.{key}" if name else key] = _digest(buffer)
    return RankRecord(
        structure=read_structure(model),
        parameters=tuple(
            f"{fqn} {tuple(parameter.shape)} {parameter.dtype} {'trainable' if parameter.requires_grad else 'frozen'}"
            for fqn, parameter in model.named_parameters()
        ),
        replicas=replicas,
        buffers=buffers,
        with_grad=tuple(param.fqn for each in groups for param in each.params if param.sharded.grad is not None),
    )


def read_structure(model: nn.Module) -> tuple[str, ...]:
    """Return one line for every FSDP2 group: its modules, its mesh, and what a forward pass leaves."""
    lines = []
    for group in read_groups(model):
        axes = ",".join(f"{name}={size}" for name, size in mesh_axes(group.mesh))
        modules = "+".join(shown(fqn) for fqn in group.fqns)
        kind = "replicated" if group.replicated else f"{group.expected_after_forward} after forward"
        lines.append(f"{modules} on {axes}, {kind}")
    return tuple(sorted(lines))


def _replica_key(fqn: str, tensor: torch.Tensor) -> str | None:
    """Return a name that exactly the ranks with the same elements share."""
    if not isinstance(tensor, DTensor):
        return fqn
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    axes = zip(mesh_axes(tensor.device_mesh), tensor.placements, coordinate, strict=True)
    cuts = [f"{name}={index}" for (name, _), placement, index in axes if not isinstance(placement, Replicate)]
    return f"{fqn} at {','.join(cuts)}" if cuts else fqn


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(bytes_of(local_of(tensor).detach().to("cpu")).numpy().data)


def compare_records(records: Sequence[RankRecord]) -> list[Finding]:
    """Compare what `read_record` returned on every rank, in rank order."""
    findings = [*_compare_structures([record.structure for record in records])]
    findings += _compare_orders(records)
    findings += _compare_digests([record.replicas for record in records], "rank-init", "weights")
    findings += _compare_digests([record.buffers for record in records], "garbage-buffer", "contents")
    findings += _compare_gradients(records)
    return findings


def _compare_structures(structures: Sequence[Sequence[str]]) -> list[Finding]:
    findings = []
    for rank, structure in enumerate(structures[1:], start=1):
        missing = sorted(set(structures[0]) - set(structure))
        added = sorted(set(structure) - set(structures[0]))
        if missing or added:
            parts = [f"only rank 0 wraps {first_few(missing, _MAX_FINDINGS)}"] * bool(missing)
            parts += [f"only rank {rank} wraps {first_few(added, _MAX_FINDINGS)}"] * bool(added)
            where = (missing or added)[0].split(" on ")[0]
            findings.append(
                build_finding("rank-structure", where, f"rank {rank} differs from rank 0: {'; '.join(parts)}")
            )
    return findings


def _compare_orders(records: Sequence[RankRecord]) -> list[Finding]:
    findings = []
    first = records[0].parameters
    for rank, record in enumerate(records[1:], start=1):
        if record.parameters == first:
            continue
        index, one, other = _first_difference(first, record.parameters)
        what = f"parameter {index} is {one or 'missing'} on rank 0, {other or 'missing'} on rank {rank}"
        findings.append(build_finding("param-order", (one or other or "").split(" ")[0], what))
    return findings


def _first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[int, str | None, str | None]:
    for index, (here, there) in enumerate(zip_longest(one, other)):
        if here != there:
            return index, here, there
    return len(one), None, None


def _compare_digests(digests: Sequence[Mapping[str, str]], code: str, noun: str) -> list[Finding]:
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, table in enumerate(digests):
        for name, digest in table.items():
            owner, seen = first.setdefault(name, (rank, digest))
            if seen != digest:
                differing.setdefault(name, (owner, rank))
    findings = [
        build_finding(code, name, f"different {noun} on rank {one} and rank {other}")
        for name, (one, other) in differing.items()
    ]
    if len(findings) > _MAX_FINDINGS:
        rest = len(findings) - _MAX_FINDINGS
        findings = findings[:_MAX_FINDINGS]
        findings.append(build_finding(code, "…", f"different {noun} for {rest} more names"))
    return findings


def _compare_gradients(records: Sequence[RankRecord]) -> list[Finding]:
    """Return one finding for all parameters that have a gradient on some ranks only."""
    missing: dict[str, list[str]] = {}  # Ranks → names
    for fqn in dict.fromkeys(fqn for record in records for fqn in record.with_grad):
        ranks = [str(rank) for rank, record in enumerate(records) if fqn not in record.with_grad]
        if ranks:
            missing.setdefault(", ".join(ranks), []).append(fqn)
    parts = [f"rank {ranks}: {first_few(group_names(names, None), 4)}" for ranks, names in missing.items()]
    where = next(iter(missing.values()), [""])[0]
    return [build_finding("rank-unused", where, f"no gradient, but on others, on {'; '.join(parts)}")] if parts else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one rank did, in order."""

    rank: int
    structure: tuple[str, ...]
    """As `read_structure` when the watch began."""
    events: tuple[str, ...]
    """One line per event of a group, as `watch` writes them."""


def compare_traces(traces: Iterable[Trace]) -> list[Finding]:
    """Find where ranks parted: different wrapping, different calls, different gradients.

    For ranks that have ended, failed or hang; running ones are at different places without anything being wrong.

    Returns:
        At most one finding per rank: `rank-structure`, `rank-unused` or `rank-skip`.
    """
    ordered = sorted(traces, key=lambda trace: trace.rank)
    findings: list[Finding] = _compare_structures([trace.structure for trace in ordered]) if ordered else []
    if findings:
        return findings
    for trace in ordered[1:]:
        index, one, other = _first_difference(ordered[0].events, trace.events)
        if one == other:
            continue
        first = ordered[0].rank
        event = one or other or ""
        where = shown(event.partition(" ")[2].partition(" without ")[0])
        if one is not None and other is not None and one.partition(" without ")[0] == other.partition(" without ")[0]:
            what = f"event {index}: rank {first} {one}; rank {trace.rank} {other}"
            findings.append(build_finding("rank-unused", where, what))
            continue
        before = ordered[0].events[index - 1] if index else "the start"
        what = (
            f"after {before!r} (event {index}) rank {first} does {one or 'nothing more'!r} "
            f"and rank {trace.rank} {other or 'nothing more'!r}"
        )
        findings.append(build_finding("rank-skip", where, what))
    return findings
