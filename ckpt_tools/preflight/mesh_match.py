"""How the ranks of a run read a checkpoint: files and bytes, and what would make them fewer. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.description.checkpoint import Checkpoint, Finding
from ckpt_tools.description.layout import FSDP_AXIS, Mesh
from ckpt_tools.formats.table import format_of
from ckpt_tools.preflight.reads import RankReads
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.units import format_size

_MANY_BYTES = 2.0
"""Bytes read for a byte that is kept, from which on a reshard is proposed."""
_MANY_FILES = 16


def shard_mesh(mesh: Mesh | None) -> Mesh | None:
    """Return the axes that cut or copy parameters; stages of a pipeline are left out.

    FSDP shards over dp_shard × cp, and over ep where that has ranks of its own (axolotl): an expert is then on one rank
    of ep and cut over the rest, which is as small a part.
    """
    if mesh is None:
        return None
    axes = []
    shard = mesh.size(FSDP_AXIS) * mesh.size("cp") * mesh.size("ep")
    replicate, tp = mesh.size("dp_replicate"), mesh.size("tp")
    if replicate > 1:
        axes.append(("dp_replicate", replicate))
    if shard > 1 or (replicate == 1 and tp == 1) or FSDP_AXIS in dict(mesh.axes):
        axes.append((FSDP_AXIS, shard))
    if tp > 1:
        axes.append(("tp", tp))
    return Mesh(tuple(axes))


def check_mesh(
    checkpoint: Checkpoint,
    reads: tuple[RankReads, ...],
    *,
    where: str,
    saved: Mesh | None,
    mesh: Mesh,
    spec: ParallelSpec,
) -> Iterator[Finding]:
    """Yield how the ranks of the run read the checkpoint, and what would make that cheaper."""
    if not format_of(checkpoint).is_sharded and spec.framework != "torchtitan":
        yield _whole_read(checkpoint, where, mesh, spec)
        return
    ranks = len(checkpoint.files)
    if format_of(checkpoint).has_views and ranks != (world := spec.world_size or mesh.world_size):
        what = f"{ranks} ranks saved a file each, and the run has {world}: its trainer gives every rank its own file"
        way = f"resume on {ranks} ranks; or start from the weights: ckpt gather {where} NEW"
        yield Finding.error("checkpoint-mesh", where, what, way)
        return
    files = max(one.num_files for one in reads)
    read = max(one.read_bytes for one in reads)
    needed = max(one.needed_bytes for one in reads)
    factor = sum(one.read_bytes for one in reads) / max(1, sum(one.needed_bytes for one in reads))
    came = f"saved for {saved}, " if saved is not None else ""
    what = (
        f"{came}read by {mesh}: each rank reads {'one file' if files == 1 else f'up to {files} files'}, "
        f"{format_size(read)} for the {format_size(needed)} that it keeps"
    )
    hint = None
    if format_of(checkpoint).loads_by_dcp and (factor >= _MANY_BYTES or files >= _MANY_FILES) and saved != mesh:
        plan = f" --tp-plan auto --assets {spec.model or 'MODEL'}" if mesh.size("tp") > 1 else ""
        hint = f"loads faster after: ckpt reshard {where} NEW --mesh {mesh}{plan}"
    yield Finding.info("checkpoint-mesh", where, what, hint)


def _whole_read(checkpoint: Checkpoint, where: str, mesh: Mesh, spec: ParallelSpec) -> Finding:
    """Return what it means that every rank calls from_pretrained."""
    size = format_size(checkpoint.total_bytes)
    files = f"{len(checkpoint.files)} file" + ("s" if len(checkpoint.files) != 1 else "")
    if spec.cpu_ram_efficient_loading:
        what = f"the first rank reads all {size} ({files}) and sends every rank its part"
        return Finding.info("checkpoint-mesh", where, what)
    world = spec.world_size or mesh.world_size
    total = format_size(checkpoint.total_bytes * world)
    key = spec.keys.get("cpu_ram_efficient_loading")
    return Finding.info(
        "checkpoint-mesh",
        where,
        f"each of {world} ranks reads all {size} ({files}): {total} together",
        None if key is None else f"with {key}: true only the first rank reads",
    )
