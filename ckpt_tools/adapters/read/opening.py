"""Read an adapter out of whatever holds one, from headers alone; `load` reads its bytes.

with read_adapter("runs/step-1000") as (opened, adapter):
    loaded = load(adapter, opened)
"""

from __future__ import annotations

import os
import re
import shlex
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Convention, Sourced
from ckpt_tools.adapters.architectures import ARCHITECTURES, candidates
from ckpt_tools.adapters.architectures.names import readings
from ckpt_tools.adapters.families import FAMILIES, PEFT_TYPES
from ckpt_tools.adapters.families.tokens import without_copies
from ckpt_tools.adapters.read.assemble import (
    NORM_SCALE,
    NamedFactor,
    assemble,
    is_for_training,
    parse_key,
    refused_kind,
    without_wrappers,
)
from ckpt_tools.adapters.read.other_runtimes import as_peft, open_adapter
from ckpt_tools.adapters.read.sidecars import MODEL_FAMILY, PEFT_FILE, Sidecars, locate, of_adapter, read_sidecars
from ckpt_tools.adapters.settings import add_settings
from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.blob_contents import check_sealed, revealed
from ckpt_tools.checkpoint.formats.opening import Opened, refuse_part
from ckpt_tools.checkpoint.formats.step import open_optimizer, refuse_mixed
from ckpt_tools.checkpoint.transform import find_model, is_optimizer, select, strip_wrappers
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.box_reader import BytesReader

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array


_ROOT = re.compile(r"(?:(?:model|module|app|app_state|state_dict|model_state|state)\.)*base_model\.model\.")
_STATE = re.compile(r"^(?:[^.]+\.)?state\.")
_OF_FLUX1 = re.compile(rf"(?:diffusion_model\.)?double_blocks\.\d+\.(?:processor\.\w+_lora\d|.*{NORM_SCALE}$)")
_PEFT_ROOT = "base_model.model."
_LANGUAGE_MODEL = re.compile(r"transformer\.(?:h|encoder|wte|word_embeddings|output_layer)\.")
"""Language models (GPT-2, Falcon, Bloom, ChatGLM) whose own root is called like diffusers' component."""
_COMPONENTS = ("transformer.", "unet.", "text_encoder.", "text_encoder_2.", "text_encoder_3.", "text_model.")
"""Prefixes by which a file names the parts of a diffusers pipeline."""


BUNDLED = "bundle_emb."
"""Begins the names of textual inversions that OneTrainer and A1111 put into the file of a LoRA."""


class UnknownTypeError(UnreadableError):
    """An adapter of a kind that ckpt does not judge; nothing says that it is broken."""


class OpenedAdapter(NamedTuple):
    """What `read_adapter` yields."""

    opened: Opened
    adapter: Adapter[TensorEntry]


@contextmanager
def read_adapter(
    path: str,
    *,
    adapter_name: str | None = None,
    format: str | None = None,  # noqa: A002 - the option's name
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    settings: Mapping[str, Sourced[object]] | None = None,
    as_part: bool | None = None,
) -> Iterator[OpenedAdapter]:
    """Open `path` and describe the adapter that it holds. Nothing but headers and scalars (alphas) is read.

    A DCP directory may hold the base model and optimizer state too. Fields of PEFT's configuration in `settings` go
    before those of files. Raise UnknownTypeError for a kind that is not supported.
    """
    location = locate(path, adapter_name)
    with open_adapter(location.path, format) as whole:
        identity = whole.identity
        if identity.whole == "part" and not (
            as_part or identity.hollow or identity.chosen
        ):  # of hollow ones more is said
            raise refuse_part(whole, path, can_ask=as_part is not None)
        refuse_mixed(whole)
        whole = revealed(whole)  # noqa: PLW2901 - closed as the same source
        if not whole.format.is_training and not whole.checkpoint.tensors:
            raise UnreadableError(
                "an empty adapter: there are no tensors in it, and loading it changes nothing",
                where=path,
                hint="it was saved without its weights, as by FSDP and ZeRO-3 runs that gather none: export from the "
                "training checkpoint (its DCP directory, or accelerate's pytorch_model_fsdp_0)",
            )
        opened = replace(whole, checkpoint=select(whole.checkpoint, include=include, exclude=exclude))
        check_sealed(opened)
        described, sidecars, own = as_peft(opened, location.sidecars)
        named = _name(described, path)
        chosen, name, is_one_of = _choose(named, None if location.took_adapter else adapter_name, path)
        if sidecars is None:
            places = of_adapter(location.sidecars, name, is_one_of_several=is_one_of)
            sidecars = read_sidecars(places, opened.metadata, is_training=opened.format.is_training)
        stated = {**sidecars.stated, **_told_by_names(named)}
        sidecars = replace(sidecars, peft={**sidecars.peft, **(settings or {})}, stated=stated)
        _refuse_type(sidecars, path)
        adapter = assemble(
            chosen,
            convention=own or _convention(chosen, sidecars, is_alone=_is_alone(opened)),
            is_training=opened.format.is_training,
            trained=_trained(opened),
            bias=sidecars.peft["bias"].value if "bias" in sidecars.peft else None,
            path=path,
            all_names=[strip_wrappers(entry.fqn) for entry in whole.checkpoint.tensors if not is_optimizer(entry)],
        )
        adapter = replace(
            adapter,
            name=name,
            left_out=_left_out(opened, named, adapter),
            omitted=_omitted(whole, opened.checkpoint) if include or exclude else frozenset(),
        )
        reader = TensorReader(opened)
        yield OpenedAdapter(opened, add_settings(without_copies(adapter, reader.read), sidecars, reader.read_scalar))


def _refuse_type(sidecars: Sidecars, path: str) -> None:
    for fields in (sidecars.peft, *sidecars.components.values()):
        found = fields.get("peft_type")
        if found is not None and found.value not in (*PEFT_TYPES, None):
            raise _refusal(str(found.value), path)


def _refusal(kind: str, path: str) -> UnknownTypeError:
    hint = (
        "supported are LoRA (rsLoRA, DoRA, LoCon), LoHa, LoKr, OFT, BOFT, trained tokens, full differences, and "
        "most types of PEFT in its own format; the library that wrote this one can merge it"
    )
    return UnknownTypeError(f"an adapter of the type {kind}, which ckpt does not convert", where=path, hint=hint)


def _name(opened: Opened, path: str) -> list[NamedFactor]:
    """Name every tensor as a plain model does, adapters' suffixes apart."""
    checkpoint = opened.checkpoint
    prefix = ""
    if opened.format.is_training:
        checkpoint, prefix = find_model(checkpoint)
    cut = [(entry, *_cut_root(strip_wrappers(entry.fqn).removeprefix(prefix))) for entry in checkpoint.tensors]
    roots = {root for _, root, _ in cut if root is not None}
    is_pipeline = len(roots) > 1 and all(f"{root}." in _COMPONENTS for root in roots)
    named = []
    for entry, root, inner in cut:
        name = f"{root}.{inner}" if root is not None and is_pipeline else inner
        if is_for_training(name):
            continue
        named.append(NamedFactor(name, parse_key(name), entry))
    if len(roots) > 1 and not is_pipeline:
        shown = ", ".join(sorted(roots))
        what = f"adapters of {len(roots)} models: {shown}"
        raise UsageError(what, where=path, hint=f"choose one: --include {shlex.quote(min(roots) + '.**')}")
    has_any = any(item.key is not None and not item.key.is_weak for item in named)
    named = [item for item in named if not (has_any and item.name.startswith(BUNDLED))]
    for sure in (True,) if has_any else (True, False):
        for item in named:
            if (item.key is None or (not has_any and item.key.is_weak)) and (
                kind := refused_kind(item.name, sure=sure)
            ) is not None:
                raise _refusal(kind, path)
    if not any(item.key is not None for item in named):
        what = f"no adapter here: none of {len(named)} tensors has a name that adapters use"
        raise UnreadableError(what, where=path, hint="`ckpt inspect SRC --tensors` lists the names")
    return named


def _cut_root(name: str) -> tuple[str | None, str]:
    """Return whose name it is, where a trainer holds several models, and the name inside that model."""
    match = _ROOT.match(name)
    if match is not None:
        return None, name[match.end() :]
    at = name.find("." + _PEFT_ROOT)
    return (None, name) if at < 0 else (name[:at], name[at + 1 + len(_PEFT_ROOT) :])


def _omitted(whole: Opened, chosen: Checkpoint) -> frozenset[str]:
    prefix = find_model(chosen)[1] if whole.format.is_training else ""
    model = find_model(whole.checkpoint)[0] if whole.format.is_training else whole.checkpoint
    kept = {entry.fqn for entry in chosen.tensors}
    paths = set()
    for entry in model.tensors:
        if entry.fqn in kept:
            continue
        _, name = _cut_root(strip_wrappers(entry.fqn).removeprefix(prefix))
        key = parse_key(name)
        paths.add(key.path if key is not None else without_wrappers(name).rpartition(".")[0])
    return frozenset(paths)


def _choose(named: list[NamedFactor], adapter_name: str | None, path: str) -> tuple[list[NamedFactor], str, bool]:
    """Keep the tensors of one adapter, and whatever carries no adapter's name; say whether there are others."""
    names = sorted({item.key.adapter for item in named if item.key is not None and item.key.adapter is not None})
    shown = ", ".join(names)
    if adapter_name is not None and adapter_name not in names:
        what = f"it holds {shown}" if names else "its tensor names contain no adapter name"
        what = f"no adapter {adapter_name!r} here: {what}"
        raise UsageError(what, where=path, hint=f"--adapter {names[0]}" if names else "leave --adapter out")
    if adapter_name is None and len(names) > 1:
        raise UsageError(f"{len(names)} adapters here: {shown}", where=path, hint=f"choose one: --adapter {names[0]}")
    chosen = adapter_name if adapter_name is not None else names[0] if names else None
    kept = [item for item in named if item.key is None or item.key.adapter in (None, chosen)]
    return kept, chosen or "default", len(names) > 1


def _convention(named: list[NamedFactor], sidecars: Sidecars, *, is_alone: bool) -> Convention:
    keys = [item.key for item in named if item.key is not None]
    has_root = any(_PEFT_ROOT in item.entry.fqn for item in named)
    if has_root or any(key.adapter is not None for key in keys):
        families = candidates(key.path for key in keys) if is_alone and "peft_type" not in sidecars.peft else ()
        if any(all(readings(key.path, ARCHITECTURES[name]) for key in keys) for name in families):
            return "diffusers" if has_root else "diffsynth"
        return "peft"
    if any(FAMILIES[key.family].is_carried and not key.is_weak for key in keys):
        return "peft"
    strong = [key for key in keys if not key.is_weak]
    styles = Counter(key.style for key in strong)
    paths = [key.path for key in keys]
    if styles["trainer"]:
        return "trainer"
    if _told_by_names(named):
        return "diffusers"
    if any(path.startswith("diffusion_model.") for path in paths):
        return "ai-toolkit" if sidecars.is_ai_toolkit else "comfyui"
    is_flat = all("." not in path for path in paths)
    if is_flat and not (strong and all(key.style == "peft" and key.family == "lora" for key in strong)):
        return "kohya"
    if sidecars.is_ai_toolkit:
        return "ai-toolkit"
    is_pipeline = any(path.startswith(_COMPONENTS) and not _LANGUAGE_MODEL.match(path) for path in paths)
    if styles["diffusers-old"] or (is_pipeline and "peft_type" not in sidecars.peft):
        return "diffusers"
    return "kohya" if styles["lycoris"] else "peft"


def _told_by_names(named: list[NamedFactor]) -> dict[str, Sourced[object]]:
    """Return the family of which alone X-Labs and Black Forest Labs write adapters with names of their own."""
    is_flux1 = any(_OF_FLUX1.match(item.name) for item in named)
    return {MODEL_FAMILY[0]: Sourced("flux1", "names of its tensors")} if is_flux1 else {}


def _is_alone(opened: Opened) -> bool:
    """Is it one file, and not of the name for which PEFT needs a configuration?"""
    files = [os.path.basename(name) for name in opened.checkpoint.files]
    return not opened.format.is_training and len(files) == 1 and files[0] != PEFT_FILE


def _trained(opened: Opened) -> frozenset[str] | None:
    """Return the names that the optimizer has state for, as a plain model has them; None without an optimizer."""
    states = [entry for entry in opened.checkpoint.tensors if opened.format.is_training and is_optimizer(entry)]
    if not states and opened.step is not None:
        with suppress(UnreadableError, UsageError), open_optimizer(os.path.dirname(opened.source.root)) as own:
            states = [entry for entry in own.checkpoint.tensors if is_optimizer(entry)]
    if not states:
        return None
    names = set()
    for entry in states:
        # optim.state.<fqn>.exp_avg, or state.<fqn>.exp_avg; the root is cut off as it is for the parameters.
        name = str(entry.path[-2]) if len(entry.path) > 2 else _STATE.sub("", entry.fqn.rpartition(".")[0])
        name = strip_wrappers(name)
        match = _ROOT.match(name)
        names.add(name if match is None else name[match.end() :])
    return frozenset(names)


def _left_out(opened: Opened, named: list[NamedFactor], adapter: Adapter[TensorEntry]) -> tuple[str, ...]:
    checkpoint = opened.checkpoint
    used = {entry.fqn for module in adapter.modules for entry in module.factors.values()} | set(adapter.unknown)
    optimizer = sum(map(is_optimizer, checkpoint.tensors)) if opened.format.is_training else 0
    base = len(adapter.base_shapes)
    alphas = sum(item.key is not None and item.key.role == "alpha" for item in named)
    others = len(checkpoint.tensors) - len(used) - optimizer - base - alphas
    rows = (
        (base, "tensors of the base model"),
        (optimizer, "tensors of optimizer state"),
        (max(others, 0), "other tensors"),
        (len(checkpoint.blobs), "items that are not tensors"),
    )
    return tuple(f"{count} {what}" for count, what in rows if count)


# The bytes of an adapter: whole tensors, the numbers that some of them are, and all of it, at once or when needed.

_SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "U8": "<B", "I8": "<b"}


class TensorReader(BytesReader):
    """Reads tensors of one open checkpoint, and scalars as numbers."""

    def read_scalar(self, entry: TensorEntry) -> float | None:
        """Return the number that a tensor of one element holds; None when it holds none, or of no known type."""
        if entry.num_elems != 1:
            return None
        name, content = entry.dtype.name, self.read(entry)
        if name == "BF16":
            return float(struct.unpack("<f", b"\0\0" + bytes(content))[0])
        code = _SCALARS.get(name)
        return None if code is None else float(struct.unpack(code, content)[0])


def load(adapter: Adapter[TensorEntry], opened: Opened, reader: TensorReader | None = None) -> Adapter[Array]:
    """Read the adapter's tensors, and no other byte.

    Memory: the adapter. CRC-32s and digests are checked where the source records them.
    """
    reader = reader or TensorReader(opened)
    read: dict[str, Array] = {}  # what several modules share is read once

    def array(module: AdapterModule[TensorEntry], role: str) -> Array:
        entry = module.factors[role]
        if entry.fqn not in read:
            read[entry.fqn] = to_array(reader, entry)
        return read[entry.fqn]

    return adapter.with_factors(array)


def to_array(reader: TensorReader, entry: TensorEntry) -> Array:
    """Read one tensor; raise UnreadableError if it is damaged, or of a type that is no array's."""
    from ckpt_tools.transfer.arrays import array_of, numpy_dtype

    if numpy_dtype(entry.dtype) is None:
        raise UnreadableError(f"an adapter of {entry.dtype.name} elements", where=entry.fqn)
    return array_of(reader.read(entry), entry.dtype, entry.shape)


def entry_of(name: str, array: Array) -> TensorEntry:
    """Return what a header would say of an array."""
    from ckpt_tools.transfer.arrays import dtype_of

    return TensorEntry(fqn=name, dtype=dtype_of(array), shape=tuple(array.shape), chunks=())


class LazyAdapter:
    """An adapter's tensors, read once."""

    def __init__(self, adapter: Adapter[TensorEntry], opened: Opened) -> None:
        self._adapter = adapter
        self._opened = opened
        self.reader = TensorReader(opened)
        self._lock = threading.Lock()
        self._loaded: Adapter[Array] | None = None
        self._settings = ExitStack()

    def get(self) -> Adapter[Array]:
        """Return the loaded adapter."""
        from threadpoolctl import threadpool_limits

        with self._lock:
            if self._loaded is None:
                self._loaded = load(self._adapter, self._opened, self.reader)
                # The executor's workers compute side by side: threads of each one's own would wait for each other.
                self._settings.enter_context(threadpool_limits(1, user_api="blas"))
            return self._loaded

    def replace(self, adapter: Adapter[Array]) -> None:
        """Give another adapter from now on: the same change under other names."""
        self._loaded = adapter

    def close(self) -> None:
        """Give numpy its threads back."""
        self._settings.close()
