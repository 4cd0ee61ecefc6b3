"""Jobs that end in files of ranks: a step of verl's for another number of ranks."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace

from ckpt_tools.checkpoint.entries import Asset, Checkpoint, Chunk
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.format import read_document
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.rank_files import VERL_FILE, RankFiles
from ckpt_tools.checkpoint.formats.rank_writer import RankFile, places_of, plan_rank_file
from ckpt_tools.checkpoint.layout import Mesh, parse_mesh
from ckpt_tools.convert.job import Job
from ckpt_tools.convert.to_step import given_flags, outer_job
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.options.convert import ConvertOptions
from ckpt_tools.text import first_few

_CONFIG = "fsdp_config.json"
_MAX_CONFIG_BYTES = 1 << 20
_REPLICATE, _SHARD = "dp_replicate", "dp_shard"  # What the dims of verl's mesh are; the last one is always there


def is_of_verl(opened: Opened) -> bool:
    """Does a checkpoint consist of what verl's ranks left?"""
    names = (os.path.basename(file) for file in opened.checkpoint.files)
    return isinstance(opened.format, RankFiles) and any(map(VERL_FILE.fullmatch, names))


def ranks_job(opened: Opened, options: ConvertOptions, stack: ExitStack) -> Job:
    """Return the job that writes files of ranks for another mesh, of one model or of every model of a step."""
    mesh, destination = _mesh(options), os.fspath(options.destination)
    if opened.step is None:
        return _job(opened, mesh, destination)
    parts = {}
    for part in opened.step.parts:
        own = stack.enter_context(open_path(os.path.join(opened.checkpoint.root, part.directory)))
        parts[part.directory] = _job(own, mesh, destination)
    outer = outer_job(opened, destination, parts, mesh)
    outer.assets = [(opened.source, asset) for asset in opened.step.companions if asset.file != MANIFEST_NAME]
    return outer


def _mesh(options: ConvertOptions) -> Mesh:
    stated = ("rules", "set", "tp_plan", "prefix", "include", "exclude", "dtype", "dtype_for", "dequantize")
    if flag := next(given_flags(options, stated), None):
        raise UsageError(f"--for verl changes the mesh and nothing else, and {flag} is given", hint="leave out one")
    mesh = parse_mesh(options.mesh, world_size=options.world_size) if isinstance(options.mesh, str) else options.mesh
    if mesh is None or [name for name, _ in mesh.axes] not in ([_REPLICATE, _SHARD], [_SHARD]):
        what = f"verl's ranks are a mesh of {_SHARD}, or of {_REPLICATE} and {_SHARD}"
        raise UsageError(what, hint=f"--mesh {_SHARD}=N")
    return mesh


def _job(opened: Opened, mesh: Mesh, destination: str) -> Job:
    """Return the job for one model: its files, those of its optimizer, and what else its ranks keep."""
    if opened.broken:
        raise opened.broken[0]
    source, files = opened.source, opened.source.list_files()
    ranks: dict[str, dict[int, str]] = {}
    for file in files:
        if (match := VERL_FILE.fullmatch(file)) is not None:
            ranks.setdefault(match["kind"], {})[int(match["rank"])] = file
    own = {file for found in ranks.values() for file in found.values()}
    assets = [Asset(file=file, nbytes=n) for file, n in files.items() if file not in own and file != MANIFEST_NAME]
    read = {chunk.span.file for entry in opened.checkpoint.tensors for chunk in entry.chunks}
    places = places_of(opened.checkpoint.tensors)
    planned: list[RankFile] = []
    warnings = []
    sizes = tuple(size for _, size in mesh.axes)
    for kind, found in ranks.items():
        order = sorted(found)
        for rank in range(mesh.world_size):
            pattern = found[order[rank % len(order)]]
            name = f"{kind}_world_size_{mesh.world_size}_rank_{rank}.pt"
            if pattern in read:
                planned.append(plan_rank_file(source, pattern, name, rank=rank, sizes=sizes, places=places))
            elif kind == "extra_state":
                assets.append(Asset(file=name, nbytes=files[pattern], stored_as=pattern))
        if kind == "optim" and found[order[0]] not in read:
            why = next((what for what in opened.unread if "optimizer" in what), "it is of a kind that is not read")
            warnings.append(f"without the optimizer: {why}; checkpoint.load_contents=['model','extra'] resumes so")
    chunks: dict[str, list[Chunk]] = {}
    for each in planned:
        for fqn, chunk in each.chunks:
            chunks.setdefault(fqn, []).append(chunk)
    entries = opened.checkpoint.tensors
    if shared := [entry.fqn for entry in entries if entry.fqn not in chunks]:
        raise UsageError(
            f"tensors that share their memory with others cannot be written for other ranks: {first_few(shared)}",
            where=opened.source.root,
            hint="without --for verl, `ckpt reshard` writes DCP",
        )
    config = _config(opened) if _CONFIG in files else {}
    if config.get("FSDP_version") != 2 and (mesh.size(_SHARD) == 1 or len(mesh.axes) > 1):
        what = "whole tensors on one rank" if mesh.size(_SHARD) == 1 else f"the process groups of {_REPLICATE} by name"
        hint = "gather gives the model that verl starts from; with FSDP2, fsdp_config.json says FSDP_version 2"
        raise UsageError(f"FSDP1 has {what}, which cannot be written", where=opened.source.root, hint=hint)
    rewritten = {_CONFIG: json.dumps({**config, "world_size": mesh.world_size}, indent=4).encode()} if config else {}
    before = len(ranks["model"])
    note = f"{before} ranks become {mesh.world_size}; rank R has the scheduler and the RNG state of rank R mod {before}"
    return Job(
        opened=opened,
        source=replace(opened.checkpoint, tensors=tuple(map(opened.resolve, opened.ahead(entries))), blobs=()),
        target=Checkpoint(
            root="",
            format=RankFiles.name,
            tensors=tuple(replace(entry, chunks=tuple(chunks[entry.fqn])) for entry in entries),
            files={each.name: each.frame.nbytes for each in planned},
        ),
        destination=destination,
        heads={each.name: each.frame.before for each in planned},
        seals={each.name: each.frame.seal for each in planned},
        assets=[(source, asset) for asset in assets],
        rewritten=rewritten,
        mesh=mesh,
        notes=[*opened.notes, note],
        warnings=warnings,
    )


def _config(opened: Opened) -> dict[str, object]:
    """Return verl's own note of its ranks."""
    content = read_document(opened.source, _CONFIG, _MAX_CONFIG_BYTES)
    stated = parse_json(content, what="verl's note of its ranks", where=_CONFIG)
    if not isinstance(stated, dict):
        raise UnreadableError("verl's note of its ranks is no JSON object", where=_CONFIG)
    return stated
