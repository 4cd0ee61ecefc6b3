"""Which files of a directory are one save of DeepSpeed's, and what is read of all of them.

Source: deepspeed 0.19.8 `runtime/engine.py` (`save_checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_tools.description.checkpoint import Asset, ByteSpan, Checkpoint, KeyPath, TensorEntry, is_plain_path
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats._torch_file import TorchFile, read_torch_file
from ckpt_tools.formats._torch_pieces import Piece
from ckpt_tools.formats._torch_state import describe_state
from ckpt_tools.formats.file_names import is_hf_asset
from ckpt_tools.formats.format import Format, Opened, read_document
from ckpt_tools.formats.torch_save import list_tied, whole_tensor
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_?optim_states\.pt", re.ASCII)
_MODEL = re.compile(r"mp_rank_(\d{1,6})_model_states\.pt", re.ASCII)
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt", re.ASCII)
_PIPELINE = re.compile(r"layer_\d+-model_\d+-model_states\.pt", re.ASCII)
_EXPERTS = re.compile(
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_LATEST, _LATEST_UNIVERSAL = "latest", "latest_universal"
SCRIPT = "zero_to_fp32.py"
MERGE = "merge it with DeepSpeed's ds_to_universal.py, whose result ckpt reads"
_KNOWN = (
    *("buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "ds_version"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
)
"""Keys of a file that say what its weights are."""
ALL_RANKS = "copy the files of all ranks, from every node, into one directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """The files of one save."""

    directory: str
    """In the checkpoint's, with its slash; "" for itself."""
    model: str
    """Of stages 0 to 2; "" where there is none."""
    models: Mapping[int, str]
    """Rank → its file of the model's, of stage 3."""
    optimizers: Mapping[int, str]
    """Rank → its file of the optimizer's."""

    @property
    def files(self) -> list[str]:
        """All of them."""
        return [name for name in (self.model, *self.models.values(), *self.optimizers.values()) if name]


def list_saves(files: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the directories with files of DeepSpeed's, and these: in this directory, else one below."""
    found: dict[str, list[str]] = {}
    for path in files:
        directory, slash, name = path.rpartition("/")
        patterns = (_OPTIMIZER, _MODEL, _MODEL_OF_RANK, _PIPELINE, _EXPERTS)
        if directory.count("/") == 0 and any(pattern.fullmatch(name) for pattern in patterns):
            found.setdefault(directory + slash, []).append(path)
    return {"": found[""]} if "" in found else found


def find_save(source: Source, files: Mapping[str, int], path: str) -> Save:
    """Return the save that `latest` names, or the only one.

    Raises:
        UnreadableError: There is none, nothing says which, or it is cut in ways that are not read.
    """
    tags = list_saves(files)
    directory = next(iter(tags), "")
    if "" not in tags and _LATEST in files:
        named = read_document(source, _LATEST, 4096).decode(errors="replace").strip()
        directory = f"{named}/"
        if directory not in tags or not is_plain_path(named):
            shown = first_few([each.rstrip("/") for each in sorted(tags)]) or "no other"
            raise UnreadableError(
                f"{_LATEST} names {named!r}, which is not here; here is {shown}",
                where=path,
                hint="restore it, or pass the directory of another" if tags else "restore its directory",
            )
    elif len(tags) != 1:
        shown = first_few([each.rstrip("/") for each in sorted(tags)])
        raise UnreadableError(
            f"several of DeepSpeed's saves, and no file {_LATEST}: {shown}" if tags else "no save of DeepSpeed's here",
            where=path,
            hint="pass the directory of one" if tags else "restore the directory of its tag",
        )
    names = tags[directory]
    found: dict[re.Pattern[str], dict[int, str]] = {}
    for name in names:
        base = name.rpartition("/")[2]
        if _PIPELINE.fullmatch(base) or _EXPERTS.fullmatch(base):
            kind = "a pipeline's stages" if _PIPELINE.fullmatch(base) else "experts"
            raise UnreadableError(f"a save of {kind} ({base}), which is not read", where=path, hint=MERGE)
        for pattern in (_OPTIMIZER, _MODEL, _MODEL_OF_RANK):
            if (match := pattern.fullmatch(base)) is not None:
                *rank, model_rank = map(int, match.groups())
                if model_rank:
                    what = f"a save with tensor parallelism or a pipeline ({base}), which is not read"
                    raise UnreadableError(what, where=path, hint=MERGE)
                if (rank or [0])[0] in found.setdefault(pattern, {}):
                    what = f"two files of rank {(rank or [0])[0]}: {base} and {found[pattern][(rank or [0])[0]]}"
                    raise UnreadableError(what, where=path, hint="a save over an older one left both: remove one")
                found[pattern][(rank or [0])[0]] = name
    models, model = found.get(_MODEL_OF_RANK, {}), found.get(_MODEL, {}).get(0, "")
    if models and model:
        what = "files of ZeRO's stage 3 and of another"
        raise UnreadableError(what, where=path, hint="a save over an older one left both: remove one")
    if not models and not model:
        raise UnreadableError("a save without the model's file (…_model_states.pt)", where=path, hint="restore it")
    return Save(directory=directory, model=model, models=models, optimizers=found.get(_OPTIMIZER, {}))


def read_file(source: Source, name: str) -> TorchFile:
    file = read_torch_file(source, name)
    if not isinstance(file.value, dict):
        raise UnreadableError("not a state of DeepSpeed's", where=name)
    return file


def content_of(file: TorchFile) -> Mapping[object, object]:
    return file.value if isinstance(file.value, dict) else {}


def read_pieces(file: TorchFile, key: str) -> dict[str, Piece]:
    """Return the tensors of a state dict in a file, by their names."""
    part = replace(file, value={key: content_of(file).get(key)})
    try:
        return {".".join(map(str, piece.path[1:])): piece for piece in describe_state(part).pieces}
    except UnreadableError as error:
        raise type(error)(error.what, where=file.name, hint=error.hint) from error


def plain_entry(piece: Piece, path: KeyPath) -> TensorEntry:
    """Return a tensor that is whole in one file.

    Raises:
        UnreadableError: It is a part.
    """
    return replace(whole_tensor(piece, where=piece.chunks[0].span.file), fqn=".".join(map(str, path)), path=path)


def open_save(
    kind: Format,
    source: Source,
    files: Mapping[str, int],
    tag: Save,
    tensors: tuple[TensorEntry, ...],
    read: Sequence[TorchFile],
    notes: Iterable[str],
    unread: Iterable[str],
) -> Opened:
    """Return what was read of a save, with what lies beside it."""
    top = [name for name in files if "/" not in name and tag.directory and name not in (_LATEST, _LATEST_UNIVERSAL)]
    top = [name for name in top if not name.startswith("zero_to_")]
    assets = [name for name in top if is_hf_asset(name)]
    own = (*_KNOWN, "module", "optimizer_state_dict")
    rest = dict.fromkeys(str(k) for file in read for k, v in content_of(file).items() if k not in own and v is not None)
    said = [*unread]
    if rest:
        said.append(f"what DeepSpeed keeps beside weights: {first_few(list(rest), 6)}")
    if others := [name for name in top if name not in assets]:
        said.append(f"files beside the save: {first_few(others, 6)}")
    if len(tags := list_saves(files)) > 1:
        said.append(f"other saves: {first_few([each.rstrip('/') for each in tags if each != tag.directory], 6)}")
    numbers = source.numbers if isinstance(source, WithNumbers) else {}
    return Opened(
        format=kind,
        checkpoint=Checkpoint(
            root=source.root,
            format=kind.name,
            tensors=tensors,
            assets=tuple(Asset(file=name, nbytes=files[name]) for name in assets),
            files={name: files[name] for name in tag.files} | {name: len(each) for name, each in numbers.items()},
        ),
        source=source,
        notes=(*notes, *list_tied(tensors)),
        unread=tuple(said),
        sums=tuple(each for file in read for each in file.sums),
    )


class WithNumbers(Source):
    """The files of a save, and one with numbers of the optimizer's, which lie in pickles; shares the rest with it."""

    def __init__(self, source: Source) -> None:
        self.__dict__.update(source.__dict__)  # descriptors, identities: whoever closes this closes that
        self.numbers: dict[str, bytes] = {}

    def add(self, file: str, content: bytes) -> ByteSpan:
        """Return where a number of four bytes lies from now on."""
        known = self.numbers.get(file, b"")
        at = next((i for i in range(0, len(known), 4) if known[i : i + 4] == content), len(known))
        self.numbers[file] = known if at < len(known) else known + content
        return ByteSpan(file=file, offset=at, nbytes=len(content))

    def size(self, file: str) -> int:
        """Return the size of a file."""
        return len(self.numbers[file]) if file in self.numbers else super().size(file)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`."""
        if file in self.numbers:
            buffer[:] = self.numbers[file][offset : offset + len(buffer)]
        else:
            super().read_into(file, offset, buffer)
