"""Open a checkpoint: find its format, read its headers, describe it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ckpt_tools.checkpoint.formats._torch_file import is_torch_file
from ckpt_tools.checkpoint.formats.file_names import read_part_name
from ckpt_tools.checkpoint.formats.format import Format, Opened, Shapes, read_document
from ckpt_tools.checkpoint.formats.identify import HOLLOW, identify
from ckpt_tools.checkpoint.formats.judge_step import judge_step
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, parse_manifest
from ckpt_tools.checkpoint.formats.repositories import (
    WeightSet,
    choose,
    compare,
    files_of,
    find_repository,
    find_sets,
    is_index,
    lies_below,
    may_be_one_of_several,
    option_for,
    without_markers,
)
from ckpt_tools.checkpoint.formats.safetensors import read_file
from ckpt_tools.checkpoint.formats.step_layouts import HERE
from ckpt_tools.checkpoint.formats.table import detect_format, find_format
from ckpt_tools.checkpoint.formats.unsupported import HEAD_BYTES, explain, explain_file
from ckpt_tools.checkpoint.identity import Candidate
from ckpt_tools.checkpoint.names.foreign import FLAT, FLAT_WAY
from ckpt_tools.errors import CkptError, PartError, UnreadableError
from ckpt_tools.storage.locations import open_place
from ckpt_tools.storage.source import Source

__all__ = ["Opened", "open_path", "read_document", "read_file"]


def open_path(
    path: str,
    *,
    format: str | None = None,  # noqa: A002 - the option's name
    shapes_from: str | os.PathLike[str] | None = None,
    as_part: bool | None = None,
    weights: str | None = None,
    component: str | None = None,
    source: Source | None = None,
) -> Opened:
    """Open the checkpoint at `path`, a file or a directory, with its identity."""
    # `shapes_from` is a checkpoint with the shapes that these files lack (FSDP1's local state dicts). `as_part` takes a
    # known part of a model as what it is (else that is a `PartError`), and of sets of weights that differ the one that
    # a loader takes; None where nobody can ask for that. `weights` and `component` choose one of several
    # (`Candidate.name`, `Identity.components`). `source` is the directory where it is open already; it stays the
    # caller's to close when this fails.
    with ExitStack() as stack:
        file = None
        if source is None:
            source, file = open_place(path)
            stack.callback(source.close)
        wanted = None if format is None else find_format(format)
        if file is not None and _is_one_of_several(source, file):
            path, file, weights = os.path.dirname(path) or ".", None, file
        files = source.list_files() if file is None else {file: source.size(file)}
        is_whole = file is None and (wanted is None or component is not None)
        step = find_repository(source, files) if is_whole else None
        if component is not None:
            step, part = choose(step, component, path)
            if part.directory:
                below = os.path.join(path, part.directory)
                return open_path(below, format=format, shapes_from=shapes_from, as_part=as_part)
            files, step = files_of(step, files), None
        if step is not None:
            wanted = find_format("step")
        sets = find_sets(files) if file is None and step is None else []
        ours = [each for each in sets if each.name == weights] or [
            each for each in sets if wanted is None or wanted.name.startswith(each.format)
        ]
        if ours and len(sets) > 1:
            rest = {name for each in sets if each is not ours[0] for name in each.names}
            files = {name: size for name, size in files.items() if name not in rest}
            wanted = wanted if wanted is not None and weights is None else find_format(ours[0].format)
        told = files if file is not None else without_markers(files)
        found = _choose(source, told, path, wanted, is_file=file is not None)
        if shapes_from is not None:
            with open_path(os.fspath(shapes_from), as_part=True) as like:
                shapes = Shapes.of(like.checkpoint, os.fspath(shapes_from), is_ordered=like.format.has_views)
            found = found.shaped(shapes)
        manifest = None
        if MANIFEST_NAME in (files if file is None else source.list_files(max_depth=0)):
            manifest = parse_manifest(read_document(source, MANIFEST_NAME, MAX_MANIFEST_BYTES))
            if file is not None and [*manifest.files] != [file]:
                manifest = None  # of more than this file
        verdict = judge_step(source, files) if found.has_parts else None  # whose parts have sources of their own
        opened = found.open(source, files, path=path, manifest=manifest)
        opened = opened if file is None or manifest is None else replace(opened, manifest=manifest)
        opened = replace(opened, notes=(*source.notes, *opened.notes)) if source.notes else opened
        if ours and len(sets) > 1:
            lying = tuple(_candidates(opened, sets, ours, path, component, is_named=weights is not None))
            own = {name for each in lying for name in each.files}
            opened = replace(opened, candidates=lying, left_out=tuple(n for n in opened.left_out if n not in own))
        companions = files if file is None or read_part_name(file) is None else source.list_files()
        opened = replace(opened, identity=identify(opened, companions, verdict or judge_step(source, files, opened)))
        if not as_part:
            check_candidates(opened.candidates, path)
        identity = opened.identity
        if identity.whole == "part" and not (as_part or identity.chosen or opened.lost):  # a lost file is damage
            raise refuse_part(opened, path, can_ask=as_part is not None)
        stack.pop_all()
        return opened


def _is_one_of_several(source: Source, file: str) -> bool:
    """Is a file an index, or one of several sets of weights in its directory? It means the directory then."""
    return is_index(file) or (may_be_one_of_several(file) and len(find_sets(source.list_files(max_depth=0))) > 1)


def _candidates(
    opened: Opened,
    sets: Sequence[WeightSet],
    ours: Sequence[WeightSet],
    path: str,
    component: str | None,
    *,
    is_named: bool,
) -> Iterator[Candidate]:
    """Yield the sets of weights that lie together, the others compared with the one that was opened."""
    for each in sets:
        if each is ours[0]:
            yield Candidate(name=each.name, files=tuple(opened.checkpoint.files), is_taken=True, why=each.why)
            continue
        if is_named or each not in ours:
            yield Candidate(name=each.name, files=each.names, is_taken=False, why="not asked for")
            continue
        try:
            inner = os.path.join(path, each.name) if lies_below(each) else path
            inside = None if lies_below(each) else component
            with open_path(inner, as_part=True, weights=each.name, component=inside) as other:
                files = tuple(other.checkpoint.files)
                differs, what = compare(opened, other)
        except CkptError as error:
            is_empty = each.format == "hf" and not any(map(opened.source.size, each.names))  # and would be taken
            files, differs, what = each.names, "yes" if is_empty else "not known", f"cannot be read: {error.what}"
        yield Candidate(name=each.name, files=files, is_taken=False, why=what, differs=differs)


def check_candidates(candidates: Sequence[Candidate], path: str) -> None:
    """Refuse sets of weights that lie together and differ, where nobody has said which is meant."""
    other = next((each for each in candidates if each.differs == "yes"), None)
    if other is not None:
        taken = next(each for each in candidates if each.is_taken)
        what = f"two different sets of weights are here, {taken.name} ({taken.why}) and {other.name}: {other.why}"
        hint = f"choose one: {option_for(taken.name, path)} or {option_for(other.name, path)}"
        raise UnreadableError(what, where=path, hint=hint)


def refuse_part(opened: Opened, path: str, *, can_ask: bool) -> PartError:
    """Return the error for a part of a model, with the way to the whole."""
    (why, *_) = opened.identity.evidence
    if opened.identity.hollow:
        return PartError(f"a model without its weights: {why}", where=path, hint=HOLLOW)
    named = next((each for each in map(read_part_name, _names_above(opened)) if each is not None), None)
    rest = "restore or fetch the rest of the model" if named is None else named.kind.whole
    ways = [FLAT_WAY if why == FLAT else rest]
    if opened.step is not None and opened.step.is_repository:
        ways = [f"pass one model: {os.path.join(path, opened.step.parts[0].directory or HERE)}"]
    ways += ["use it as it is with --as-part"] if can_ask and why != FLAT else []
    error = PartError(f"a part of a model: {why}", where=path, hint="; ".join(ways))
    error.by_names = opened.identity.by_names
    return error


def _names_above(opened: Opened) -> Iterator[str]:
    """Yield the names of its files, with the directory that they lie in."""
    inside = os.path.basename(opened.source.root.rstrip("/"))
    return (os.path.join(inside, name) for name in opened.checkpoint.files)


def _choose(source: Source, files: Mapping[str, int], path: str, wanted: Format | None, *, is_file: bool) -> Format:
    """Return the format that was asked for (or its counterpart), else the one that is found."""
    found = wanted
    if found is None:
        found = detect_format(files, is_file=is_file)
    elif found.is_file != is_file:
        found = None if found.counterpart is None else find_format(found.counterpart)
    if found is not None and found.loads_by_dcp and not found.detects(files):
        whole = detect_format(files, is_file=is_file)  # a step in parts, each of this format
        return found if whole is None or not whole.has_parts else whole
    if found is not None:
        return found
    if not is_file:
        raise explain(files, path)
    (name,) = files
    head = source.read(name, 0, min(files[name], HEAD_BYTES))
    if is_torch_file(head):
        return find_format("torch")
    raise explain_file(path, head)
