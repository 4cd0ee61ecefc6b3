"""Options that say whose names tensors have, or are to get."""

from __future__ import annotations

from typing import Annotated, Literal

from ckpt_tools.options import AnyPath, Option

ShardNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan", "megatron", "meta", "torchtune"],
    Option(
        "Names to write: those of the live model, of the hub's files, or of a library; auto is live where ckpt knows "
        "the architecture, else the file's."
    ),
]
GatherNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan", "megatron", "meta", "torchtune"],
    Option(
        "Names to write: auto is hub where ckpt knows the architecture; live keeps those of SRC; a library's name says "
        "whose those are, and writes the hub's."
    ),
]
OtherNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan", "megatron", "meta", "torchtune"],
    Option(
        "Names of the weights: those of the live model, of the hub's files, or of a library; auto keeps those of SRC."
    ),
]
LibraryNames = Annotated[
    Literal["auto", "torchtitan", "megatron", "meta", "torchtune"],
    Option("Library whose names are compared with the hub's; auto finds it."),
]
MapFile = Annotated[
    AnyPath | None,
    Option("Key map of your own, from the hub's names to others, instead of --names.", metavar="FILE"),
]
