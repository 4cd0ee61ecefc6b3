"""A model's tensors, and which of a checkpoint's belong to them: what `meta_model.compare` says. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckpt_tools.checkpoint.entries import Chunk, TensorEntry
from ckpt_tools.checkpoint.layout import BoxIndex, Mesh, Placement
from ckpt_tools.checkpoint.names.match_architecture import NameContract
from ckpt_tools.checkpoint.summarise import chunk_bytes
from ckpt_tools.preflight.model_facts import ModelFacts
from ckpt_tools.transfer.placement.place import cut_entry

# Which files, and how many bytes, every rank of a mesh reads of a checkpoint. Pure; no torch.
# What a rank holds is a box of every tensor (`layout.cut_tensor`). PyTorch's DCP reader loads every stored item that
# shares elements with it, whole; its safetensors reader takes slices.
# Source: `FileSystemReader.read_data` and `HuggingFaceStorageReader._process_read_request` of torch 2.13.

MAX_RANKS = 64  # Ranks that are counted; of larger worlds as many, spread evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReads:
    """What one rank reads."""

    rank: int
    num_files: int
    needed_bytes: int
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What the ranks of a mesh read, or why that is not known."""

    ranks: tuple[RankReads, ...] = ()
    refused: tuple[str, str | None] | None = None
    unknown: str | None = None


def count_reads(
    tensors: Sequence[TensorEntry],
    mesh: Mesh,
    placements: Mapping[str, Mapping[str, Placement]],
    *,
    whole_items: bool,
    max_ranks: int = MAX_RANKS,
) -> tuple[RankReads, ...]:
    """Return what at most `max_ranks` ranks, spread evenly, read of `tensors`; DCP reads `whole_items`."""
    size = mesh.world_size
    ranks = range(size) if size <= max_ranks else [i * size // max_ranks for i in range(max_ranks)]
    files: dict[int, set[str]] = {rank: set() for rank in ranks}
    needed = dict.fromkeys(ranks, 0)
    read = dict.fromkeys(ranks, 0)
    for tensor in tensors:
        grid = cut_entry(tensor, mesh, placements.get(tensor.fqn, {}))
        index: BoxIndex[Chunk] = BoxIndex((chunk, chunk.box) for chunk in tensor.chunks)
        cells: dict[tuple[int, ...], tuple[set[str], int, int]] = {}
        for rank in ranks:
            box = grid.local_box(rank)
            if 0 in box.sizes:
                continue
            if box.offsets not in cells:  # replicas read alike
                found = list(index.overlaps(box))
                own = chunk_bytes(tensor.dtype, box.sizes)
                items = sum(chunk_bytes(tensor.dtype, chunk.box.sizes) for chunk, _ in found) if whole_items else own
                cells[box.offsets] = ({chunk.span.file for chunk, _ in found}, own, items)
            names, own, items = cells[box.offsets]
            files[rank] |= names
            needed[rank] += own
            read[rank] += items
    return tuple(
        RankReads(rank=rank, num_files=len(files[rank]), needed_bytes=needed[rank], read_bytes=read[rank])
        for rank in ranks
    )


MAX_ELEMS = 12_000_000  # Parameters of a model that is tried as it is: more take longer than a minute on a laptop
Kind = Literal["parameter", "buffer", "transient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A tensor of the model."""

    dtype: str
    shape: tuple[int, ...]
    kind: Kind  # "buffer" is saved, "transient" is a buffer that is not


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTensor:
    """What the checkpoint has for a name of the model."""

    dtype: str
    shape: tuple[int, ...]
    fqns: tuple[str, ...]  # Its names there; several when the model fuses them


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model cut down, and whether it runs by itself."""

    path: str | None  # Its config.json; None when nothing could be cut so that it runs
    num_elems: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model, and which of a checkpoint's tensors belong to it, by the model's names."""

    title: str
    base_prefix: str  # What transformers adds to or takes from a file's names by itself
    num_elems: int
    tensors: Mapping[str, ModelTensor]
    ties: tuple[tuple[str, ...], ...]
    found: Mapping[str, FoundTensor] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    contract: NameContract = field(default_factory=NameContract)  # What loading makes of names that only one side has
    adapters: tuple[str, ...] = ()
    refused: tuple[str, str | None] | None = None
    trial: Trial | None = None
    """What was found to run in place of a large model; None when it was not looked for, or need not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """What a process with torch is to look at: a config, a checkpoint, the mesh that reads it. Paths are absolute."""

    config: str
    checkpoint: str | None
    mesh: Mesh | None
    cuts: tuple[str, ...]  # Smaller configs, tried in order when the model has more than `MAX_ELEMS` parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What a process with torch has seen of a model."""

    facts: ModelFacts | None = None
    comparison: Comparison | None = None
    reads: Reads | None = None
    why_not: str = ""
