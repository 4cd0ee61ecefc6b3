"""DeepSpeed's checkpoints: the model that the trainer computes with.

In stages 1 and 2 of ZeRO one file has it whole, and every rank has a part of the fp32 weights and of the optimizer's
state. In stage 3 there are only the parts. A Trainer's or accelerate's step has such a directory inside.

Source: deepspeed 0.19.8 `runtime/engine.py` (`save_checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.checkpoint.entries import Asset, Checkpoint, KeyPath, TensorEntry, fqn_problem, is_possible_shape
from ckpt_tools.checkpoint.formats._pickle_values import Record
from ckpt_tools.checkpoint.formats._torch_file import TorchFile, read_torch_file
from ckpt_tools.checkpoint.formats._torch_pieces import MAX_SHARED, MAX_TENSORS, TensorPiece, describe_state
from ckpt_tools.checkpoint.formats.file_names import is_hf_asset
from ckpt_tools.checkpoint.formats.format import Format, Opened, read_document
from ckpt_tools.checkpoint.formats.manifest import Manifest
from ckpt_tools.checkpoint.formats.table import find_format
from ckpt_tools.checkpoint.formats.torch_save import list_tied, whole_tensor
from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

MERGE = "merge it with DeepSpeed's ds_to_universal.py, whose result ckpt reads"
FROZEN = "frozen weights, which DeepSpeed leaves out with exclude_frozen_parameters"
ALL_RANKS = "copy the files of all ranks, from every node and of one save, into one directory"
Shapes = Mapping[str, tuple[int, ...]]  # Name of a parameter → its shape, in the order in which parameters lie
_LATEST = ("latest", "latest_universal")
_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<part>\d{1,6})_?(?P<holds>model|optim)_states\.pt"
)
_PART = re.compile(r"(layer_|expert_|expp_rank_)[\w-]+_states\.pt")
_UNIVERSAL = re.compile(r"((?:[^/]+/)?)zero/([^/]+)/(fp32|step|exp_avg|exp_avg_sq)\.pt")
_KNOWN = (
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("ds_version", "ds_config", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    "optimizer_state_dict",
)
"""Keys of a file that say what its weights are."""


@dataclass(slots=True, kw_only=True)
class Save:
    """The files of one save."""

    directory: str  # In the checkpoint's, with its slash; "" for itself
    names: list[str] = field(default_factory=list)  # All of its files
    parts: list[str] = field(default_factory=list)  # Those of them that tensor parallelism, a pipeline or experts leave
    twins: list[str] = field(default_factory=list)  # Those of them for which there is another
    model: str = ""  # Of stages 0 to 2; "" where there is none
    models: dict[int, str] = field(default_factory=dict)  # Rank → its file of the model's, of stage 3
    optimizers: dict[int, str] = field(default_factory=dict)  # Rank → its file of the optimizer's
    universal: dict[str, dict[str, str]] = field(default_factory=dict)  # Parameter → fp32, exp_avg, … → file

    def add(self, path: str, name: str) -> bool:
        """Take a file of this name, if it is DeepSpeed's."""
        found = _FILE.fullmatch(name)
        if found is None and _PART.fullmatch(name) is None:
            return False
        self.names.append(path)
        if found is None or int(found["part"]):
            self.parts.append(name)
        elif found["rank"] is None and found["holds"] == "model":
            self.model = path
        elif found["rank"] is not None:
            files = self.models if found["holds"] == "model" else self.optimizers
            if files.setdefault(int(found["rank"]), path) != path:
                self.twins.append(name)
        return True


def list_saves(files: Mapping[str, int]) -> dict[str, Save]:
    """Return the saves in a directory: itself, or those one below; each by its directory."""
    found: dict[str, Save] = {}
    for path in files:
        directory, slash, name = path.rpartition("/")
        if (match := _UNIVERSAL.fullmatch(path)) is not None:
            save = found.setdefault(match[1], Save(directory=match[1]))
            save.universal.setdefault(match[2], {})[match[3]] = path
            save.names.append(path)
        elif "/" not in directory:
            save = found.get(directory + slash, Save(directory=directory + slash))
            if save.add(path, name):
                found[save.directory] = save
    return {"": found[""]} if "" in found else found


def find_save(source: Source, files: Mapping[str, int], path: str) -> Save:
    """Return the save that `latest` names, or the only one."""
    saves = list_saves(files)
    shown = first_few([each.rstrip("/") for each in sorted(saves)])
    save = next(iter(saves.values())) if len(saves) == 1 else None
    if "" not in saves:
        name = next((name for name in _LATEST if name in files), None)
        if name is not None:
            named = read_document(source, name, 4096).decode(errors="replace").strip()
            save = saves.get(f"{named}/")
            if save is None:
                what = f"{name} names {named!r}, which is missing; found: {shown or 'no other'}"
                raise UnreadableError(what, where=path, hint="restore it, or pass the directory of another")
    if save is None:
        what = f"several DeepSpeed saves, but no file `latest`: {shown}" if saves else "no DeepSpeed save here"
        hint = "pass the directory of one" if saves else "restore the directory with mp_rank_… and zero_pp_rank_… files"
        raise UnreadableError(what, where=path, hint=hint)
    if save.parts and not save.universal:
        what = f"a save with tensor parallelism, a pipeline or experts ({save.parts[0]}), which ckpt does not read"
        raise UnreadableError(what, where=path, hint=MERGE)
    if save.twins or (save.model and save.models):
        what = f"two files of one rank ({save.twins[0]})" if save.twins else "files of ZeRO stage 3 and another stage"
        raise UnreadableError(what, where=path, hint="one save was written over another: move the files of one away")
    if not save.model and not save.models and not save.universal:
        raise UnreadableError("a save without the model's file (…_model_states.pt)", where=path, hint="restore it")
    return save


def list_of(value: object) -> list[object]:
    """Return what a list or tuple holds; [] for anything else."""
    return list(value) if isinstance(value, list | tuple) else []


def read_shapes(value: object, where: str) -> list[Shapes]:
    """Return the shapes of every group's parameters, in their order."""
    groups: list[Shapes] = []
    for group in value if isinstance(value, list) else [None]:
        if not isinstance(group, dict):
            raise UnreadableError("no param_shapes: not a ZeRO file", where=where)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in group.items():
            saved = shape.args[0] if type(shape) is Record and shape.name == "torch.Size" and shape.args else shape
            sizes = tuple(n for n in list_of(saved) if type(n) is int and n >= 0)
            is_whole = isinstance(saved, tuple | list) and len(sizes) == len(saved)
            if type(name) is not str or fqn_problem(name) or not is_whole or not is_possible_shape(sizes):
                raise UnreadableError(f"parameter {len(shapes)} has an invalid shape or name", where=where)
            shapes[name] = sizes
        groups.append(shapes)
    if sum(map(len, groups)) > MAX_TENSORS:
        raise LimitError(f"more than {MAX_TENSORS} parameters", where=where)
    return groups


def content_of(file: TorchFile) -> Mapping[object, object]:
    """Return what a file holds: a dict of DeepSpeed's."""
    return file.value if isinstance(file.value, dict) else {}


def integer_of(file: TorchFile, key: str, default: int) -> int:
    """Return a number that a file says; -1 where there is something else."""
    value = content_of(file).get(key, default)
    return value if type(value) is int else -1


def check_number(file: TorchFile, key: str, wanted: int, hint: str) -> None:
    """Refuse a file that says another number."""
    if (said := integer_of(file, key, wanted)) != wanted:
        raise UnreadableError(f"{key} is {said}, here are files of {wanted}", where=file.name, hint=hint)


def read_files(source: Source, names: Mapping[int, str]) -> list[TorchFile]:
    """Read the pickles of files, in the order of their ranks."""
    return [read_torch_file(source, name) for _, name in sorted(names.items())]


def read_pieces(file: TorchFile, key: str) -> dict[str, TensorPiece]:
    """Return the tensors of a state dict in a file, by their names."""
    try:
        found = describe_state(replace(file, value={key: content_of(file).get(key)})).pieces
    except UnreadableError as error:
        raise type(error)(error.what, where=file.name, hint=error.hint) from error
    return {".".join(map(str, piece.path[1:])): piece for piece in found}


def plain_entry(piece: TensorPiece, path: KeyPath) -> TensorEntry:
    """Return a tensor that is whole in one file."""
    return replace(whole_tensor(piece, where=piece.chunks[0].span.file), fqn=".".join(map(str, path)), path=path)


def open_save(
    kind: Format,
    source: Source,
    files: Mapping[str, int],
    save: Save,
    tensors: Sequence[TensorEntry],
    read: Sequence[TorchFile],
    notes: Iterable[str],
    unread: Iterable[str],
) -> Opened:
    """Return what was read of a save, with what lies beside it."""
    top = [name for name in files if "/" not in name and save.directory and name not in _LATEST]
    top = [name for name in top if not name.startswith("zero_to_")]
    assets = [name for name in top if is_hf_asset(name)]
    state = (key for file in read for key, value in content_of(file).items() if type(key) is str and value is not None)
    said = [
        ("what DeepSpeed keeps beside weights", [key for key in dict.fromkeys(state) if key not in _KNOWN]),
        ("files beside the save", [name for name in top if name not in assets]),
        ("other saves", [each.rstrip("/") for each in list_saves(files) if each != save.directory]),
    ]
    if sum(entry.nbytes for entry in tensors) > MAX_SHARED * sum(files[name] for name in save.names):
        raise LimitError(f"tensors of {MAX_SHARED} times as many bytes as are stored", where=source.root)
    return Opened(
        format=kind,
        checkpoint=Checkpoint(
            root=source.root,
            format=kind.name,
            tensors=tuple(tensors),
            assets=tuple(Asset(file=name, nbytes=files[name]) for name in assets),
            files={name: files[name] for name in save.names},
        ),
        source=source,
        notes=(*notes, *list_tied(tensors)),
        unread=(*unread, *(f"{what}: {first_few(names, 6)}" for what, names in said if names)),
        sums=tuple(each for file in read for each in file.sums),
    )


_FP32 = "deepspeed-fp32"
_WHOLE = ("pytorch_model.bin", "pytorch_model.bin.index.json")  # The model itself beside the save: there it is read


class DeepSpeed(Format):
    """A save of DeepSpeed's, as the trainer computes with it; where only fp32 weights are, `deepspeed-fp32`."""

    name = "deepspeed"
    found_by = (
        "`mp_rank_00_model_states.pt`, `zero_pp_rank_N_…` in a directory, or in the one below that `latest` names"
    )
    about = (
        "the model as the trainer computes with it; ZeRO-3 and the universal form, which have no such "
        "model, are read as `deepspeed-fp32`. `verify` reads the model's file alone and names the others"
    )
    whole_by = "`param_shapes`, which lists what is trained; frozen weights may be left out on purpose"
    suffix = ".pt"
    is_training = True
    has_views = True

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the names of its files, in the directory or in one below."""
        return not any(name in files for name in _WHOLE) and ("zero_to_fp32.py" in files or bool(list_saves(files)))

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:
        """Read the pickle with the model, without running it."""
        save = find_save(source, files, path)
        if save.models or save.universal:
            return find_format(_FP32).open(source, files, path=path, manifest=manifest)
        (file,) = read_files(source, {0: save.model})
        check_number(file, "mp_world_size", 1, MERGE)
        tensors = [plain_entry(piece, (name,)) for name, piece in read_pieces(file, "module").items()]
        if not tensors:
            raise UnreadableError("a save without the model's weights", where=save.model)
        buffers = content_of(file).get("buffer_names")
        known = buffers if isinstance(buffers, list) else []
        dtypes = dict.fromkeys(entry.dtype.name for entry in tensors if entry.fqn not in known)
        notes = [f"reads the weights that the trainer computes with ({first_few(list(dtypes))})"]
        unread = []
        if save.optimizers:
            found, ranks = len(save.optimizers), integer_of(file, "dp_world_size", len(save.optimizers))
            notes[0] += f"; --from {_FP32} reads the fp32 weights and the optimizer's state"
            unread.append(
                f"the fp32 weights and the optimizer's state, in files of {found}{f' of {ranks}' * (found != ranks)} "
                f"ranks (--from {_FP32})"
            )
        opened = open_save(self, source, files, save, tensors, [file], notes, unread)
        trained = {
            name for group in read_shapes(content_of(file).get("param_shapes") or [], file.name) for name in group
        }
        lacking = trained - {entry.fqn for entry in tensors}
        partial = (f"{len(lacking)} of {len(trained)} parameters are not here: {first_few(sorted(lacking))}",)
        return replace(opened, partial=partial if lacking else (), excuse=FROZEN)


FORMAT = DeepSpeed()
