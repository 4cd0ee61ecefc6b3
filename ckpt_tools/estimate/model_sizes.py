"""What the formula needs to know of a model: counts, and the sizes of its matrices. No torch."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.errors import UsageError
from ckpt_tools.tables import read_rows

_NUMBER = re.compile(r"^(.*?)\.(\d+)\.(.+)$")
_OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out|output_projection|output)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|word_embeddings|wte|tok_embeddings|shared)\.weight$")
DEFAULT_VOCAB = 32000  # Rows of the output layer when only `--params` describes the model: Llama's


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A kind of block: the unit that FSDP gathers."""

    count: int
    params: int
    matrices: int  # Parameters of its linear layers' weights, which is what adapters and quantisation go for
    outputs: int  # O: outputs of its linear layers, summed up
    matrix_sides: int
    """Inputs plus outputs of its linear layers, summed up: an adapter of rank 1 has as many parameters."""
    hidden: int  # h: width of its input
    widest: int
    experts: int = 0  # Parameters of its experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A model in numbers."""

    params: int  # P
    blocks: tuple[Block, ...]  # Every kind of block; without one the root is all there is
    hidden: int  # h of the root
    vocab: int  # V: rows of the output layer, 0 for none
    tokens: int | None = None  # Of a sample that is no text: patches of an image. None leaves it to the case

    @property
    def largest(self) -> Block:
        """The block with the most parameters."""
        if self.blocks:
            return max(self.blocks, key=lambda block: block.params)
        return Block(count=0, params=0, matrices=0, outputs=0, matrix_sides=0, hidden=self.hidden, widest=0)

    @property
    def num_blocks(self) -> int:
        """L."""
        return sum(block.count for block in self.blocks)

    @property
    def root(self) -> int:
        """R: parameters in no block."""
        return self.params - sum(block.count * block.params for block in self.blocks)


def figures_from_counts(*, params: int, layers: int, hidden: int, vocab: int | None) -> Figures:
    """Return the figures of a decoder like Llama's with so many parameters.

    Every block has four h × h matrices for attention and three for the gated feed-forward network, which get what is
    left; embeddings and output layer are two V × h matrices.
    """
    rows = DEFAULT_VOCAB if vocab is None else vocab
    root = 2 * rows * hidden + hidden
    each = (params - root) // layers
    attention = 4 * hidden * hidden
    inner = (each - attention - 2 * hidden) // (3 * hidden)
    if inner < 1:
        raise UsageError(
            f"{params} parameters are too few for {layers} layers of width {hidden} and a vocabulary of {rows}",
            hint="check --layers and --hidden, or add --vocab",
        )
    block = Block(
        count=layers,
        params=each,
        matrices=attention + 3 * inner * hidden,
        outputs=5 * hidden + 2 * inner,
        matrix_sides=8 * hidden + 3 * (hidden + inner),
        hidden=hidden,
        widest=max(hidden * hidden, inner * hidden),
    )
    return Figures(params=params, blocks=(block,), hidden=hidden, vocab=rows)


def figures_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Figures, tuple[str, ...]]:
    """Return the figures of a model by the names and shapes of its tensors, and what they leave open.

    Blocks are the members of the outermost numbered lists (`layers.0.`, `transformer_blocks.0.`) in which at least
    two members look alike. A weight with two dims is a linear layer's, (out, in).
    """
    members: dict[tuple[str, int], dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        match = _NUMBER.match(name)
        if match is not None:
            members[match[1], int(match[2])][match[3]] = shape
    looks = Counter((key[0], tuple(sorted(parts.items()))) for key, parts in members.items())
    kinds = [(dict(parts), count) for (_, parts), count in looks.items() if count > 1]
    if not kinds:
        raise UsageError(
            "these tensors contain no repeated blocks, so what FSDP would wrap is not known",
            hint="use --params, --layers and --hidden instead",
        )
    notes: list[str] = []
    blocks = []
    for parts, count in kinds:
        matrices = [(s[0], s[1]) for name, s in parts.items() if len(s) == 2 and name.endswith("weight")]
        blocks.append(block_of(parts.values(), count, matrices))
        deep = sum(math.prod(shape) for shape in parts.values() if len(shape) > 2)
        if 2 * deep > blocks[-1].params:
            notes.append("more than half of a block is not matrices, and the formula leaves out its activations")
    hidden = blocks[0].hidden
    rows = [(name, shape[0]) for name, shape in shapes.items() if len(shape) == 2]
    vocab = next((num for pattern in (_OUTPUT, _EMBEDDING) for name, num in rows if pattern.search(name) and num), 0)
    params = sum(map(math.prod, shapes.values()))
    return Figures(params=params, blocks=tuple(blocks), hidden=hidden, vocab=vocab), tuple(dict.fromkeys(notes))


def block_of(shapes: Iterable[Sequence[int]], count: int, matrices: Sequence[tuple[int, int]]) -> Block:
    """Return the figures of a block from the shapes of its parameters, and (out, in) of its linear layers."""
    sides = Counter(side for pair in matrices for side in pair)
    return Block(
        count=count,
        params=sum(math.prod(shape) for shape in shapes),
        matrices=sum(out * into for out, into in matrices),
        outputs=sum(out for out, _ in matrices),
        matrix_sides=sum(out + into for out, into in matrices),
        # What most matrices have in common is the width of the stream that they read from and write to.
        hidden=max(sides, key=lambda side: (sides[side], -side), default=0),
        widest=max((out * into for out, into in matrices), default=0),
    )


# What estimate knows by name: dtypes, optimizers, devices. No torch.

DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "f16": 2, "f32": 4}
NF4_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)
"""Per weight: an 8-bit scale for 64 weights, and an f32 scale for 256 of those (double quantisation)."""


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """What an optimizer keeps per trained value: a row of `optimizers.tsv`."""

    values: int  # Moments
    nbytes: float | None  # Bytes of one of them; None: the dtype of the state decides
    is_paged: bool


OPTIMIZERS: Mapping[str, OptimizerCost] = {
    row["optimizer"]: OptimizerCost(
        values=int(row["values"]),
        nbytes=None if row["nbytes"] == "-" else float(row["nbytes"]),
        is_paged=row["paged"] == "yes",
    )
    for row in read_rows(__package__, "optimizers.tsv")
}
"""By the names that `--optimizer` takes."""
TRACKED_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
"""Those whose step is run; the state of the others is computed."""

GPUS: Mapping[str, int] = {
    row["gpu"]: round(float(row["gib"]) * (1 << 30)) for row in read_rows(__package__, "gpus.tsv")
}
"""Bytes that the driver leaves to a program."""


def gpu_bytes(name: str) -> int | None:
    """Return the memory of a device by its name in any case, None for a name that is not known."""
    return {known.lower(): size for known, size in GPUS.items()}.get(name.strip().lower().replace(" ", "-"))
