"""One tensor under way: its blocks, where they go, and which of them this share reads whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import Chunk, TensorEntry
from ckpt_tools.checkpoint.layout import Blocks, Box, BoxIndex
from ckpt_tools.transfer.plan import Copy, blocks_of, chunk_index, is_plain
from ckpt_tools.transfer.read import Edit, Parts
from ckpt_tools.transfer.split import hull, owned_blocks
from ckpt_tools.transfer.tensor_digest import AsStored, Seen


class Look(Protocol):
    """Looks at the elements of one tensor as they pass; called from any thread, for blocks in any order."""

    def see(self, block: Box, content: memoryview) -> None:
        """Look at the row-major bytes of a canonical block; they are valid until this returns."""

    def finish(self) -> None:
        """Its last block is done."""


class Task:
    """One tensor under way."""

    def __init__(
        self,
        number: int,
        entry: TensorEntry,
        copies: Sequence[tuple[str, Copy]],
        edit: Edit | None,
        *,
        counting: bool,
        before: Sequence[Box] | None = None,
    ) -> None:
        self.number = number
        self.entry = entry
        self.copies = copies
        self.edit = edit
        self.dtype: DType = copies[0][1].dtype if copies else entry.dtype
        self.blocks: Blocks = blocks_of(entry, self.dtype)
        self.chunks: BoxIndex[Chunk] = chunk_index(entry)
        self.targets = BoxIndex(((i, copy.box) for i, (_, copy) in enumerate(copies)))
        written = {copy.box for _, copy in copies}
        whole = not copies or (sum(box.num_elems for box in written) == entry.num_elems and before is None)
        self.owned = None if whole else owned_blocks(self.blocks, written, before or ())
        """Blocks that this share reads whole; None for all of them, and then every part of them is written here."""
        self.is_elsewhere = before is not None
        """Other shares have elements that are here as well."""
        self.seen = Seen(entry, self.dtype, self.blocks, counting=counting and not is_plain(entry))
        self.written_parts: list[Parts] = [[] for _ in copies]
        self.remaining = max(1, len(self.blocks))
        self.damaged = False
        self.stored: AsStored | None = None
        """Digests what is read, where it is not what is written and its source has a digest of it."""
        self.looks: Sequence[Look] = ()

    def owns(self, index: int) -> bool:
        """Does this share read a block whole?"""
        return self.owned is None or index in self.owned

    def read_bytes(self) -> int:
        """Return how many bytes of the tensor, as it is stored, this share reads."""
        elems = 0
        for index, block in enumerate(self.blocks):
            parts = [part for _, part in self.targets.overlaps(block)]
            if self.owns(index):
                elems += block.num_elems
            elif parts:
                elems += hull(block, parts).num_elems
        return self.entry.dtype.num_bytes(elems)

    def has_whole(self, index: int, block: Box, targets: Iterable[tuple[int, Box]]) -> bool:
        """Does this share own a block, and write every part of it?"""
        if self.owned is None:
            return True
        return index in self.owned and sum(part.num_elems for part in {part for _, part in targets}) == block.num_elems
