"""`open_checkpoint`, `identify`, `inspect` and `scan`: what reads headers alone."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import starmap

from ckpt_tools.checkpoint.entries import Checkpoint
from ckpt_tools.checkpoint.formats.blob_contents import look_into
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.scan import Scan, scan_place, with_executables
from ckpt_tools.checkpoint.formats.step_layouts import list_contents
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.summarise import ContentSummary, MeshSource, Summary, overlay, summarise
from ckpt_tools.checkpoint.transform import select
from ckpt_tools.errors import UsageError
from ckpt_tools.models.open_asking import reconsider
from ckpt_tools.models.output_names import Named, Naming, name_live
from ckpt_tools.options import takes
from ckpt_tools.options.check import InspectOptions, OpenOptions, ScanOptions


@takes(OpenOptions, 'len(ckpt_tools.open_checkpoint("model").tensors)', "21")
def open_checkpoint(options: OpenOptions) -> Checkpoint:
    """Describe the checkpoint at a path from its headers alone.

    Raises:
        UnreadableError: Not a complete, readable checkpoint.
    """
    with open_path(os.fspath(options.path), format=options.format, as_part=True) as opened:
        return opened.checkpoint


@takes(OpenOptions, 'ckpt_tools.identify("model").architecture', "'LlamaForCausalLM'")
def identify(options: OpenOptions) -> Identity:
    """Say what the checkpoint at a path is and whether it is whole, from small reads alone.

    Raises:
        UnreadableError: Not a readable checkpoint.
    """
    with open_path(os.fspath(options.path), format=options.format, as_part=True) as opened:
        return reconsider(opened).identity


@takes(InspectOptions, 'str(ckpt_tools.inspect("model-dp8").mesh)', "'dp_shard=8'")
def inspect(options: InspectOptions) -> Summary:
    """Summarise a checkpoint from its headers alone; with a mesh or other names, as `shard` would write it.

    Raises:
        UsageError: An impossible mesh or rule.
        UnreadableError: Not a complete, readable checkpoint.
    """
    source = os.fspath(options.source)
    is_overlay = options.mesh is not None or options.rules is not None
    if not is_overlay and (options.set or options.tp_plan is not None):
        raise UsageError("rules need a mesh", hint="add for example --mesh dp_shard=8,tp=2")
    notes: list[str] = []
    with open_path(
        source, format=options.format, shapes_from=options.shapes_from, as_part=True, component=options.component
    ) as opened:
        named = _named(opened, options, notes, is_overlay=is_overlay)
        checkpoint = named.checkpoint
        mesh_source: MeshSource | None = None
        if is_overlay:
            from ckpt_tools.convert.to_mesh import find_layout

            checkpoint, mesh_source = (
                overlay(checkpoint, find_layout(opened, checkpoint, options, named.sources)),
                "overlay",
            )
        summary = summarise(checkpoint, path=source, mesh_source=mesh_source)
        contents = () if opened.step is None else tuple(starmap(ContentSummary, list_contents(opened.step)))
        identity = with_executables(reconsider(opened))[0].identity
        inside = {fqn: each.census for fqn, each in look_into(summary.blobs, opened.source).items()}
        summary = replace(summary, names="; ".join(notes), contents=contents, identity=identity)
        return replace(summary, inside=inside, census=sum(inside.values(), checkpoint.objects))


def _named(opened: Opened, options: InspectOptions, notes: list[str], *, is_overlay: bool) -> Named:
    """Return what is chosen of a checkpoint, by the names that are asked for, or those that `shard` would write."""
    naming = Naming.of(options.names, options.map)
    if naming.names != "auto":
        from ckpt_tools.convert.find_model import name_again, shown_again

        also = shown_again(opened, naming) if options.include or options.exclude else {}
        chosen = select(opened.checkpoint, include=options.include, exclude=options.exclude, also=also)
        return name_again(replace(opened, checkpoint=chosen), naming, notes)[0]
    named = Named.as_it_is(opened.checkpoint)
    if is_overlay and not opened.format.loads_by_dcp:
        named = name_live(opened.checkpoint, opened.assets, naming, opened.resolve)
        notes += [named.note] if named.note else []
    own = {fqn: (source,) for fqn, source in named.sources.items()}
    chosen = select(named.checkpoint, include=options.include, exclude=options.exclude, also=own)
    return replace(named, checkpoint=chosen)


@takes(ScanOptions, 'ckpt_tools.scan("model").executables', "()")
def scan(options: ScanOptions) -> Scan:
    """List what the files of a checkpoint would run: names in pickles, code. Nothing of it is executed.

    Raises:
        UnreadableError: There is no such file or directory.
    """
    return scan_place(os.fspath(options.source))
