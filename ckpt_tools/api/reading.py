"""`open_checkpoint` and `inspect`: what reads headers alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import starmap

from ckpt_tools.description.checkpoint import Checkpoint
from ckpt_tools.description.summarise import ContentSummary, Summary, overlay, summarise
from ckpt_tools.description.transform import select
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import Opened, open_path
from ckpt_tools.formats.steps import list_contents
from ckpt_tools.models.naming import MapFile, Naming, OtherNames
from ckpt_tools.options import Exclude, From, Include, MeshOptions, Source, takes


def open_checkpoint(path: str | os.PathLike[str], *, format: str | None = None) -> Checkpoint:  # noqa: A002
    """Describe the checkpoint at `path` from its headers alone.

    Args:
        path: A safetensors file, an HF directory or a DCP directory.
        format: Overrides what would be detected.

    Raises:
        UnreadableError: Not a complete, readable checkpoint.
    """
    with open_path(os.fspath(path), format=format) as opened:
        return opened.checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions(MeshOptions):
    """The options of `inspect`; those of `MeshOptions` show a layout that is not on disk."""

    source: Source = field(kw_only=False)
    include: Include = ()
    exclude: Exclude = ()
    names: OtherNames = "auto"
    map: MapFile = None
    format: From = None


@takes(InspectOptions)
def inspect(options: InspectOptions) -> Summary:
    """Summarise a checkpoint from its headers alone; with a mesh or other names, as it would be then.

    Raises:
        UsageError: An impossible mesh or rule.
        UnreadableError: Not a complete, readable checkpoint.
    """
    source = os.fspath(options.source)
    notes: list[str] = []
    with open_path(source, format=options.format) as opened:
        checkpoint = select(opened.checkpoint, include=options.include, exclude=options.exclude)
        naming = Naming.of(options.names, options.map)
        if naming.names != "auto":
            from ckpt_tools.conversions.find import name_again

            named, _ = name_again(replace(opened, checkpoint=checkpoint), naming, notes)
            checkpoint = named.checkpoint
        if options.mesh is None and options.rules is None:
            if options.set or options.tp_plan is not None:
                raise UsageError("rules need a mesh", hint="add for example --mesh dp_shard=8,tp=2")
            return replace(summarise(checkpoint, path=source), names="; ".join(notes), contents=_contents(opened))
        from ckpt_tools.conversions.to_mesh import find_layout

        virtual = overlay(checkpoint, find_layout(opened, checkpoint, options))
        summary = summarise(virtual, path=source, mesh_source="overlay")
        return replace(summary, names="; ".join(notes), contents=_contents(opened))


def _contents(opened: Opened) -> tuple[ContentSummary, ...]:
    return () if opened.step is None else tuple(starmap(ContentSummary, list_contents(opened.step)))
