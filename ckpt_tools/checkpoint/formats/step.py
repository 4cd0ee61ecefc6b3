"""Directories of a training step that keep the model and the optimizer apart: each a DCP checkpoint of its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

from ckpt_tools.checkpoint.entries import Checkpoint
from ckpt_tools.checkpoint.formats.dcp import Dcp
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.checkpoint.formats.format import Format, Opened, read_document
from ckpt_tools.checkpoint.formats.judge_step import StepVerdict, judge_step
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, parse_manifest
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.formats.repositories import MARKERS, find_repository, is_repository
from ckpt_tools.checkpoint.formats.step_layouts import (
    HERE,
    MODEL_PART,
    OPTIMIZER_PART,
    Step,
    StepPart,
    find_step,
    is_part,
)
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.errors import PartError, StorageError, UnreadableError, UsageError
from ckpt_tools.storage.locations import is_directory, is_remote, local, open_place, open_source
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

_MAX_DEPTH = 16  # Directories below the step in which files are looked for


class StepDirectory(Format):
    """What accelerate's `save_state` and transformers' Trainer write under FSDP with SHARDED_STATE_DICT."""

    name = "step"
    found_by = "`pytorch_model_fsdp_N/`, `optimizer_N/`; `model_index.json`, `modules.json`; files of several models"
    about = (
        "a step of accelerate or the Trainer: [training steps](../dev/formats.md#training-steps); or a repository "
        "of several models: [directories of other tools](../dev/layouts.md)"
    )
    written_by = "`reshard`; with `--for`, or of a repository, `shard`; of a repository, `gather`"
    whole_by = "as its model, which is DCP"
    suffix = Dcp.suffix
    has_parts = True

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the directories of its parts, or the file that says which models there are."""
        return find_step(files) is not None or is_repository(files)

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:  # noqa: ARG002
        """Open the model's part; of several models the one that is trained, or that the others are put upon."""
        if (step := find_repository(source, files)) is not None:
            opened = open_path(path, component=step.components[0], as_part=True)
            source.close()
            what = f"one of the {len(step.parts)} models of {step.title}: {first_few(step.components, 12)}"
            return replace(opened, step=step, partial=opened.partial if step.has_own else (*opened.partial, what))
        step = find_step(files)
        _refuse_links(path)
        models = () if step is None else step.models
        if step is None or not models:
            hint = "restore it; the optimizer alone can be inspected and verified by its own directory"
            raise UnreadableError(f"a step without its model: {MODEL_PART} is missing", where=path, hint=hint)
        if len(models) > 1:
            what = f"{step.title} of {len(models)} models: {first_few([part.directory for part in models], 6)}"
            raise UsageError(what, where=path, hint=f"name one: {os.path.join(path, models[0].directory)}")
        opened = open_path(os.path.join(path, models[0].directory), as_part=True)  # judged once more as the step's
        source.close()
        return replace(opened, step=step)


FORMAT = StepDirectory()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedStep:
    """An open step: every part, and the files beside them."""

    step: Step
    root: Opened
    """The directory itself: the files beside the parts, and what a manifest of ckpt's says of all. It has tensors where
    the models are files in it: those of all."""
    parts: tuple[tuple[StepPart, Opened], ...]
    broken: tuple[tuple[StepPart, UnreadableError], ...]  # The parts that are not complete, readable checkpoints
    passed_over: tuple[str, ...]  # Hidden directories, links to directories and to nothing, and what is no regular file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in (self.root, *(opened for _, opened in self.parts)):
            opened.source.close()

    @property
    def models(self) -> tuple[tuple[str, Opened], ...]:
        """Directory of every model, and the model."""
        return tuple((part.name, opened) for part, opened in self.parts if part.holds == "model")

    @property
    def identity(self) -> Identity:
        """What its model is; of a repository what all are together."""
        models = [opened.identity for _, opened in self.models]
        if not self.step.is_repository:
            return models[0] if models else self.root.identity
        lacking = (*self.step.lacking, *(part.directory for part, _ in self.broken))
        lacking += tuple(name or HERE for name, opened in self.models if opened.identity.whole == "part")
        sizes = sum((Counter(each.dtypes) for each in models), Counter[str]())
        return Identity(
            format=FORMAT.name,
            num_parameters=sum(each.num_parameters for each in models),
            dtypes=sizes,
            components=self.step.components,
            whole="part" if lacking else min((each.whole for each in models), key=("not known", "yes").index),
            evidence=(f"without weights, or incomplete: {first_few(lacking, 6)}",) if lacking else (),
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(opened.checkpoint.total_bytes for _, opened in self.parts)


def open_step(path: str, *, as_part: bool = True) -> OpenedStep | None:
    """Open every part of the step, or model of the repository, at `path`; None when it is neither."""
    # With `as_part` false, a known part of a model is refused as by `open_path`.
    if not is_directory(path):
        return None
    with ExitStack() as stack:
        source = stack.enter_context(open_source(path))
        files = source.list_files(max_depth=_MAX_DEPTH)
        step = find_repository(source, files) or (None if Dcp().detects(files) else find_step(files))
        if step is None:
            return None
        _refuse_links(path)
        manifest = whole = None
        if MANIFEST_NAME in files:
            manifest = parse_manifest(read_document(source, MANIFEST_NAME, MAX_MANIFEST_BYTES))
        if any(part.name != part.directory for part in step.parts):
            whole = stack.enter_context(open_path(path, format="hf", as_part=True))
        parts, broken = [], []
        for part in step.parts:
            try:
                if step.is_repository:
                    opened = open_path(path, component=part.name or HERE, as_part=as_part)
                    opened = opened if whole is None else replace(opened, manifest=manifest)
                else:
                    kind = Dcp.name if part.is_saved else None
                    opened = open_path(os.path.join(path, part.directory), format=kind, as_part=as_part)
            except PartError:
                raise
            except UnreadableError as error:
                broken.append((part, error))
            else:
                parts.append((part, stack.enter_context(opened)))
        if not parts:
            raise broken[0][1]
        stack.pop_all()
        root = whole or Opened(
            format=FORMAT,
            checkpoint=Checkpoint(root=source.root, format=FORMAT.name, tensors=()),
            source=source,
            manifest=None if step.has_own else manifest,
            companions=step.companions,
        )
        return OpenedStep(step=step, root=root, parts=tuple(parts), broken=tuple(broken), passed_over=passed_over(path))


def open_repository(path: str, *, as_part: bool = True) -> OpenedStep | None:
    """Open every model of the repository at `path`; None when it is none. As `open_step`, and costs others less."""
    step = open_step(path, as_part=as_part) if may_be_repository(path) else None
    return step if step is not None and step.step.is_repository else None


def may_be_repository(path: str) -> bool:
    """Is there what says that there are several models?"""
    if not is_directory(path):
        return False
    with open_source(path) as source:
        names = source.list_files(max_depth=0)
    return not names.keys().isdisjoint(MARKERS) or sum(name.endswith(".safetensors") for name in names) > 1


def open_like(path: str, component: str | None) -> Opened:
    """Open what something is compared with: of a repository the same component, of anything else the whole."""
    return open_path(path, as_part=True, component=component if component and may_be_repository(path) else None)


def passed_over(path: str) -> tuple[str, ...]:
    """Return what a listing leaves out: hidden directories, links to directories and to nothing, special files."""
    if is_remote(path):  # where there are neither links nor devices
        return ()
    found = []
    for directory, subdirectories, files in os.walk(path):
        inside = "" if directory == path else os.path.relpath(directory, path)
        for name in list(subdirectories):
            relative = os.path.join(inside, name)
            if (
                name.startswith(".")
                or os.path.islink(os.path.join(directory, name))
                or relative.count("/") >= _MAX_DEPTH
            ):
                found.append(relative)
                subdirectories.remove(name)
        found += [os.path.join(inside, name) for name in files if not os.path.isfile(os.path.join(directory, name))]
    return tuple(sorted(found))


def open_optimizer(path: str) -> Opened:
    """Open what holds the optimizer's state: the part of a step, or a checkpoint that has everything in one."""
    if not is_directory(path):
        return open_path(path)
    with open_source(path) as source:
        files = source.list_files()
    step = None if Dcp().detects(files) else find_step(files)
    if step is None:
        return open_path(path)
    _refuse_links(path)
    optimizers = [part.directory for part in step.parts if part.holds == "optimizer"]
    if not optimizers:
        raise UnreadableError(f"{step.title} without {OPTIMIZER_PART}", where=path, hint="start with a new optimizer")
    if len(optimizers) > 1:
        hint = f"name one: {os.path.join(path, optimizers[0])}"
        what = f"{step.title} of {len(optimizers)} optimizers: {first_few(optimizers, 6)}"
        raise UsageError(what, where=path, hint=hint)
    return open_path(os.path.join(path, optimizers[0]))


def _refuse_links(path: str) -> None:
    """Refuse a step with directories that are links: what is behind them would be passed over."""
    if is_remote(path):
        return
    try:
        with os.scandir(local(path)) as entries:
            links = sorted(entry.name for entry in entries if entry.is_symlink() and entry.is_dir())
    except OSError as error:
        raise StorageError(f"cannot list: {error.strerror}", where=path) from error
    if links:
        what = "a part of the step" if is_part(links[0]) else "a directory of the step"
        what = f"{what} is a symbolic link, which ckpt does not follow"
        hint = "copy its target into the step if you trust it"
        raise UnreadableError(what, where=os.path.join(path, links[0]), hint=hint)


def judge(opened: Opened) -> StepVerdict:
    """Judge what is open by all that small reads tell."""
    files = dict(opened.checkpoint.files) if opened.format.is_file else opened.source.list_files()
    return judge_step(opened.source, files, opened, thorough=True)


def judge_path(path: str, *, num_ranks: int | None = None) -> StepVerdict:
    """Judge the step, or the checkpoint, at `path`; where `num_ranks` are given, for so many."""
    source, file = open_place(path)
    with ExitStack() as stack:
        stack.enter_context(source)
        files = source.list_files() if file is None else {file: source.size(file)}
        opened = stack.enter_context(open_path(path, as_part=True)) if METADATA_NAME in files else None
        return judge_step(source, files, opened, thorough=True, num_ranks=num_ranks)


def refuse_mixed(opened: Opened) -> None:
    """Refuse to make anything of files of two steps, as `verify` would find them.

    Raises:
        UnreadableError: The checkpoint, or the step that its path named, is not of one step.
    """
    root, part = opened.source.root, ""
    if opened.step is not None and is_part(os.path.basename(root)):
        root, part = os.path.dirname(root), root
    for one, other in (judge_path(root) if part else judge(opened)).mixed[:1]:
        hint = "restore the files of one save" + (f"; for the model as it is, pass {part}" if part else "")
        raise UnreadableError(f"not of one step: {one}, {other}", where=root, hint=hint)
