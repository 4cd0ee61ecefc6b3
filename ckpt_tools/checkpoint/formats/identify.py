"""Say what an open checkpoint is, and whether it is whole: once, at opening, from what was read there anyway.

Reads no tensor data; of further files, config.json alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.file_names import NamedPart, parts_of, read_part_name
from ckpt_tools.checkpoint.formats.format import Opened, read_document
from ckpt_tools.checkpoint.formats.judge_step import StepVerdict
from ckpt_tools.checkpoint.identity import Identity, Whole
from ckpt_tools.checkpoint.infer_mesh import block_of, rank_of_file
from ckpt_tools.checkpoint.names import (
    Expected,
    config_misfits,
    group_names,
    is_adapter,
    load_table,
    match_names,
    origins_of,
)
from ckpt_tools.checkpoint.names.foreign import FLAT
from ckpt_tools.checkpoint.transform import find_model, strip_wrappers
from ckpt_tools.errors import CkptError
from ckpt_tools.storage.locations import is_remote
from ckpt_tools.storage.source import Source
from ckpt_tools.text import counted, first_few

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 << 20
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers")
_HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim")
HOLLOW = (
    "ZeRO-3 saves this when weights are not gathered: set stage3_gather_16bit_weights_on_model_save, or convert the "
    "DeepSpeed checkpoint itself (ckpt gather)"
)
"""What to do about weights of shape [0]."""
_MOST_EMPTY = 0.5  # Share of a model's tensors that may have shape [0]: buffers do, and states of empty modules
_INNER = ("text_config", "llm_config", "language_config", "decoder")


class _Judged(NamedTuple):
    """See the fields of `Identity`."""

    whole: Whole
    evidence: tuple[str, ...]
    by_names: bool = False


def identify(opened: Opened, files: Collection[str], verdict: StepVerdict) -> Identity:
    """Return what an open checkpoint is; `files` are the names of all that lie in its directory, or beside a file."""
    checkpoint = opened.checkpoint
    model, prefix = find_model(checkpoint)
    names = [strip_wrappers(entry.fqn)[len(prefix) :] for entry in model.tensors]
    config, problem = read_config(opened)
    hollow = _hollow(opened, model.tensors)
    shapes = [entry.shape for entry in model.tensors]
    judged = _Judged("part", (hollow,)) if hollow else _judge(opened, files, config, names, shapes)
    dtypes: dict[str, int] = {}
    for entry in model.tensors:
        dtypes[entry.dtype.name] = dtypes.get(entry.dtype.name, 0) + entry.nbytes
    ranks = {rank for file in checkpoint.files if (rank := rank_of_file(file)) is not None}
    mesh = checkpoint.mesh
    owners = origins_of(names)
    return Identity(
        format=checkpoint.format,
        trainer=verdict.trainer if verdict.trainer != "plain" else "",
        steps=verdict.steps,
        resumable="not known" if verdict.is_weights_only and not verdict.trainer else verdict.resumable,
        reasons=(
            *(("weights only, not resumable",) if verdict.is_weights_only and verdict.trainer else ()),
            *(f"{each.file}: {each.what}: {each.does}" for each in verdict.reasons),
            *(f"not of one step: {one}, {other}" for one, other in verdict.mixed),
        ),
        mesh="" if mesh is None else str(mesh),
        num_ranks=mesh.world_size if mesh is not None else (1 + max(ranks) if ranks else None),
        architecture=_architecture(config),
        num_parameters=sum(entry.num_elems for entry in model.tensors),
        num_layers=_number(config, _LAYER_KEYS) or _count_layers(names),
        hidden_size=_number(config, _HIDDEN_KEYS),
        dtypes=dict(sorted(dtypes.items(), key=lambda pair: -pair[1])),
        quantisation=_quantisation(config),
        names=owners[0].code if owners else "",
        whole=judged.whole,
        evidence=judged.evidence,
        by_names=judged.by_names,
        hollow=hollow,
        components=() if opened.step is None else opened.step.components,
        chosen=_chosen(opened) if judged.whole == "part" and not hollow else "",
        candidates=opened.candidates,
        not_read=(*((problem,) if problem else ()), *opened.unread),
    )


def read_config(opened: Opened) -> tuple[Mapping[str, Any], str]:
    """Return the model's config.json, {} where there is none that can be read, and why it cannot be."""
    for source, asset in opened.own_assets:
        if asset.file == _CONFIG:
            try:
                text = read_document(source, asset.source_file, _MAX_CONFIG_BYTES)
                values = parse_json(text, what=_CONFIG, where=_CONFIG, infinite=True)
            except CkptError as error:
                return {}, f"{_CONFIG}: {error.what}"
            return (values, "") if isinstance(values, dict) else ({}, f"{_CONFIG} is not a JSON object")
    return {}, ""


def expected_beside(source: Source) -> tuple[Expected | None, Mapping[str, Any]]:
    """Return the names of the class that a directory's config.json names, and the config; None where nothing tells."""
    with suppress(CkptError):
        text = read_document(source, _CONFIG, _MAX_CONFIG_BYTES)
        config = parse_json(text, what=_CONFIG, where=_CONFIG, infinite=True)
        if isinstance(config, dict) and (architecture := _architecture(config)):
            return load_table().expected(architecture, config), config
    return None, {}


def _judge(
    opened: Opened, files: Collection[str], config: Mapping[str, Any], names: list[str], shapes: Sequence[Sequence[int]]
) -> _Judged:
    """Return whether nothing lacks, and why: what the names of files, the format and config.json say, in this order."""
    partial = list(opened.partial)
    forgotten = ""
    for named, what in () if opened.format.is_sharded else _of_names(opened, files):
        if named.count is None or opened.format.is_file:
            partial.append(what)
        else:
            forgotten = what
    if any(owner.code == "fsdp1" for owner in origins_of(names)):
        partial.insert(0, FLAT)
    if opened.lost:
        partial.append(f"{counted(len(opened.lost), 'file')} missing: {first_few(opened.lost)}")
    architecture = _architecture(config)
    expected = load_table().expected(architecture, config) if architecture and names else None
    if opened.format.is_file and not config and not is_remote(opened.source.root):
        expected, config = expected_beside(opened.source)
    held = None if expected is None else match_names(names, expected, config)
    if held is not None and held.foreign and not architecture:
        held = None  # the config is of another file
    architecture = architecture or _architecture(config)
    if partial or (forgotten and (held is None or not held.is_whole)):
        return _Judged("part", tuple(filter(None, (*partial, forgotten))))
    if is_adapter(names):
        return _Judged("not known", ("an adapter alone: its base model is not here",))
    if held is None or expected is None:
        return _Judged("yes", (opened.complete,)) if opened.complete else _Judged("not known", ())
    if held.foreign:
        what = f"{len(held.foreign)} of {len(names)} names are not of {architecture}, the architecture in {_CONFIG}"
        return _Judged("yes" if opened.complete else "not known", tuple(filter(None, (opened.complete, what))))
    absent = [*held.missing, *held.incomplete]
    # Many save without a pooler (add_pooling_layer), and a counter of batches starts at 0.
    if lacking := [n for n in absent if ".pooler." not in f".{n}" and not n.endswith(".num_batches_tracked")]:
        shown = first_few(group_names(lacking, expected), 4)
        return _Judged(
            "part", (f"{len(lacking)} weights of the {architecture} in {_CONFIG} are not here ({shown})",), True
        )
    if misfits := config_misfits(config, zip(names, shapes, strict=True)):
        return _Judged("part" if all(each.is_part for each in misfits) else "not known", tuple(misfits[:4]))
    return _Judged("yes", (f"every weight of the {architecture} in {_CONFIG} is here",))


def _hollow(opened: Opened, model: Sequence[TensorEntry]) -> str:
    """Say that there are no tensors, or that weights are of shape [0], as ZeRO-3 saves them when nobody gathers."""
    if not opened.checkpoint.tensors:
        return "" if opened.checkpoint.blobs or opened.format.has_parts else "it contains no tensors"
    empty = [entry.fqn for entry in model if entry.shape == (0,) and not entry.fqn.endswith("_extra_state")]
    is_own = not is_adapter(empty)  # of an adapter, check-lora says more
    weights = [fqn for fqn in empty if is_own and fqn.rpartition(".")[2] == "weight"]
    if not weights and len(empty) <= _MOST_EMPTY * len(model):
        return ""
    return f"{len(empty)} of {len(model)} tensors have shape [0]: {first_few(weights or empty)}"


def _chosen(opened: Opened) -> str:
    """Return what the manifest says of tensors that were left out on purpose, where it still is of these."""
    manifest = opened.manifest
    if opened.excuse and not opened.partial:
        return opened.excuse
    if manifest is None or manifest.tensors.keys() != {entry.fqn for entry in opened.checkpoint.tensors}:
        return ""
    return str(manifest.source.get("chosen", ""))


def _of_names(opened: Opened, files: Collection[str]) -> Iterator[tuple[NamedPart, str]]:
    """Yield what the names of its files say of others, directories above it included."""
    root = opened.source.root.rstrip("/")
    inside = os.path.basename(root)
    taken = list(dict.fromkeys(chunk.span.file for entry in opened.checkpoint.tensors for chunk in entry.chunks))
    yield from parts_of(taken, {*files, *taken})
    above = [f"{inside}/{name}" for name in taken]
    if inside and any(
        read_part_name(name) is not None and read_part_name(name.partition("/")[2]) is None for name in above
    ):
        yield from parts_of(above, {*above, *_siblings(root, above)})


def _siblings(root: str, above: Iterable[str]) -> Iterator[str]:
    """Yield files of these names in the directories beside one."""
    if is_remote(root):
        return
    try:
        directories = os.listdir(os.path.dirname(root) or ".")
    except OSError:
        return
    for name in dict.fromkeys(each.partition("/")[2] for each in above):
        yield from (f"{directory}/{name}" for directory in directories)


def _architecture(config: Mapping[str, Any]) -> str:
    listed = config.get("architectures")
    name = listed[0] if isinstance(listed, list) and listed else config.get("_class_name")
    return name if isinstance(name, str) else ""


def _number(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    for part in (config, *(config.get(key) for key in _INNER)):
        values = part if isinstance(part, dict) else {}
        found = next((values[key] for key in keys if type(values.get(key)) is int), None)
        if found is not None:
            return int(found)
    return None


def _count_layers(names: Iterable[str]) -> int | None:
    """Return how many blocks the longest row of them has."""
    most: dict[str, set[int]] = {}
    for name in names:
        if (block := block_of(name)) is not None:
            most.setdefault(block[0], set()).add(block[1])
    return max(map(len, most.values()), default=None)


def _quantisation(config: Mapping[str, Any]) -> str:
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return ""
    bits = "4-bit " if settings.get("load_in_4bit") else "8-bit " if settings.get("load_in_8bit") else ""
    return f"{bits}{settings.get('quant_method') or 'quantised'}"
