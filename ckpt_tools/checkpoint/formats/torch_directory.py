"""Directories of `torch.save` files: one, or several with an index, as transformers and diffusers wrote them.

Source: transformers `modeling_utils.py` (4.x `save_pretrained`) for names and index, which is that of safetensors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.entries import Asset, ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats._json import MAX_JSON_BYTES
from ckpt_tools.checkpoint.formats._pickle_values import Record, build_pickle
from ckpt_tools.checkpoint.formats.file_names import PICKLES, is_side_file, is_weights
from ckpt_tools.checkpoint.formats.format import Format, Opened, Reader, read_document
from ckpt_tools.checkpoint.formats.hf import indexed_files, parse_index
from ckpt_tools.checkpoint.formats.item_frames import digest_frames
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, Manifest
from ckpt_tools.checkpoint.formats.torch_save import list_parts, list_tied, list_unread, read_state, whole_tensor
from ckpt_tools.checkpoint.formats.torch_zip import ArchiveFrame, archive_frame, plain_tensor
from ckpt_tools.checkpoint.formats.unsupported import explain_part
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

INDEX_SUFFIX = ".bin.index.json"
STEM = "pytorch_model"  # Of the names of the files that transformers looks for
_NAMES = (STEM, "diffusion_pytorch_model", "pytorch_model_fsdp", "adapter_model")
"""Of the files of one model, in the order in which they are looked for."""


class TorchDirectory(Format):
    """`pytorch_model.bin` with or without an index, or the one file of weights in a directory."""

    name = "torch-dir"
    found_by = "`pytorch_model.bin` with or without an index, or the one `torch.save` file in a directory"
    about = "safetensors beside them go first"
    written_by = "`gather --to torch`"
    whole_by = "the index; of one file, config.json beside it, its name and what it holds"
    suffix = ".bin"
    counterpart = "torch"
    is_training = True
    has_views = True

    def detects(self, files: Mapping[str, int]) -> bool:
        """By the names of its files; safetensors beside them go first."""
        return bool(_choose(files))

    def open(self, source: Source, files: Mapping[str, int], *, path: str, manifest: Manifest | None) -> Opened:
        """Read the pickle of every file, without running it."""
        names = _choose(files)
        index = None
        if not names:
            raise UnreadableError("no torch.save file, or several without an index", where=path)
        if names[0].endswith(INDEX_SUFFIX):
            index = parse_index(read_document(source, names[0], MAX_JSON_BYTES), where=names[0])
            names = tuple(indexed_files(index, files, path))
        read = [read_state(source, name) for name in names]
        tensors: dict[str, TensorEntry] = {}
        for name, (_, state) in zip(names, read, strict=True):
            for piece in state.pieces:
                if piece.fqn in tensors or (index is not None and index.get(piece.fqn) != name):
                    what = f"tensor {piece.fqn!r} is in two files, or not in the one that the index gives"
                    hint = "the file and the index are of different versions: restore both"
                    raise UnreadableError(what, where=os.path.join(path, name), hint=hint)
                tensors[piece.fqn] = whole_tensor(piece, where=os.path.join(path, name))
        if index is not None and (lost := [fqn for fqn in index if fqn not in tensors]):
            raise UnreadableError(f"no file has {first_few(lost)}, which the index lists", where=path)
        companions = [name for name in files if name not in (*names, MANIFEST_NAME) and not name.endswith(INDEX_SUFFIX)]
        entries = tuple(tensors.values())
        return Opened(
            format=self,
            checkpoint=Checkpoint(
                root=source.root,
                format=self.name,
                tensors=entries,
                assets=tuple(Asset(file=name, nbytes=files[name]) for name in companions if not is_weights(name)),
                files={name: files[name] for name in names},
                sealed={path: what for _, state in read for path, what in state.sealed.items()},
                objects=sum((state.census for _, state in read), Counter()),
            ),
            source=source,
            manifest=manifest if manifest is not None and manifest.format == self.name else None,
            left_out=tuple(name for name in companions if is_weights(name)),
            unread=list_unread(state for _, state in read),
            notes=list_tied(entries),
            sums=tuple(each for file, _ in read for each in file.sums),
            partial=list_parts(file for file, _ in read),
            complete="" if index is None else f"all {len(entries)} tensors of the index are there",
        )

    def digest_frames(self, target: Checkpoint, reader: Reader, *, marker: bytes | None = None) -> dict[str, str]:  # noqa: ARG002
        """Digest the pickles and directories of archives, and the padding between tensors."""
        payloads = (chunk.span for entry in target.tensors for chunk in entry.chunks)
        return digest_frames(target.files, payloads, (), reader)


def place(files: Mapping[str, Sequence[TensorEntry]]) -> tuple[Checkpoint, dict[str, ArchiveFrame]]:
    """Describe the files that hold `files`' tensors, each whole, as `torch.save` of a dict writes them."""
    # Also return, per file, what lies around the tensors.
    placed: list[TensorEntry] = []
    frames: dict[str, ArchiveFrame] = {}
    for name, entries in files.items():
        state = {entry.fqn: _plain_tensor(str(key), entry) for key, entry in enumerate(entries)}
        frame = frames[name] = archive_frame(build_pickle(state), [entry.nbytes for entry in entries])
        for entry, start in zip(entries, frame.starts, strict=True):
            box = Box((0,) * len(entry.shape), entry.shape)
            span = ByteSpan(file=name, offset=start, nbytes=entry.nbytes)
            placed.append(replace(entry, chunks=(Chunk(box=box, span=span),)))
    sizes = {name: frame.nbytes for name, frame in frames.items()}
    return Checkpoint(root="", format=TorchDirectory.name, tensors=tuple(placed), files=sizes), frames


def _plain_tensor(key: str, entry: TensorEntry) -> Record:
    try:
        return plain_tensor(key, entry.dtype, entry.shape)
    except UsageError as error:
        raise UsageError(f"tensor {entry.fqn!r}: {error.what}", hint="--exclude leaves it out") from error


def _choose(files: Mapping[str, int]) -> tuple[str, ...]:
    """Return the index or the only file of weights; () when there is none, or several."""
    for stem in _NAMES:
        for name in (stem + INDEX_SUFFIX, stem + ".bin"):
            if name in files:
                return (name,)
    singles = [name for name in files if "/" not in name and name.endswith(PICKLES) and not is_side_file(name)]
    return tuple(singles) if len(singles) == 1 and explain_part(singles[0], singles[0]) is None else ()


FORMAT = TorchDirectory()
