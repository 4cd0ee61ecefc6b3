"""Which factors PEFT makes for a module of the base model, and of which shapes: a file with others does not load.

Source: peft 0.21, `update_layer` and `create_adapter_parameters` of tuners/{lora,loha,lokr,oft,boft}/layer.py.
Letters: o outputs, i inputs, k… kernel, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ckpt_tools.adapters.ecosystems.peft.config_rules import Config, rank_of
from ckpt_tools.adapters.families.factorization import factorise

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape | None]
"""Role → shape; None where several are right."""


def expected(family: str, config: Config, path: str, weight: Shape) -> tuple[Shapes, ...]:
    """Return what PEFT makes for a module, in every way that the shape of its weight allows; () where unknown.

    A matrix may be a Linear's (o, i), GPT-2's (i, o) or an embedding's (number, dim).

    Raises:
        RejectedError: The configuration's rank is none.
    """
    if len(weight) not in (2, 3, 4, 5) or 0 in weight:
        return ()
    if family == "lora":
        return tuple(_lora(config, rank_of(config, path), weight))
    ways = (weight, weight[::-1]) if len(weight) == 2 and family == "oft" else (weight,)
    if family == "loha":
        return (_loha(config, rank_of(config, path), weight),)
    if family == "lokr":
        return (_lokr(config, rank_of(config, path), weight),)
    if family == "oft":
        return tuple(shapes for way in ways for shapes in _oft(config, way))
    return tuple(_boft(config, weight))


def _lora(config: Config, r: int, weight: Shape) -> Iterator[Shapes]:
    if config.get("use_qalora") or config.get("use_bdlora"):
        return
    extra = [role for role, name in (("magnitude", "use_dora"), ("B_bias", "lora_bias")) if config.get(name)]
    o, i, *kernel = weight
    if kernel:  # of a grouped convolution the weight does not tell the number of inputs
        free: dict[str, Shape | None] = dict.fromkeys(["A", "B", *extra])
        yield free | ({"magnitude": (1, o, *(1 for _ in kernel))} if "magnitude" in extra else {})
        return
    yield {"A": (r, i), "B": (o, r)} | dict.fromkeys(extra, (o,))
    yield {"A": (r, o), "B": (i, r)} | dict.fromkeys(extra, (i,))
    yield {"A_embedding": (r, o), "B_embedding": (i, r)} | dict.fromkeys(extra)


def _loha(config: Config, r: int, weight: Shape) -> Shapes:
    o, i, *kernel = weight
    if kernel and config.get("use_effective_conv2d") and math.prod(kernel) > 1:
        core = (r, r, *kernel) if len(kernel) > 1 else (r, r, *kernel, 1)
        half = {"w{}_a": (r, o), "w{}_b": (r, i), "t{}": core}
    else:
        half = {"w{}_a": (o, r), "w{}_b": (r, i * math.prod(kernel))}
    return {role.format(number): shape for number in (1, 2) for role, shape in half.items()}


def _lokr(config: Config, r: int, weight: Shape) -> Shapes:
    o, i, *kernel = weight
    factor = config.get("decompose_factor", -1)
    factor = factor if isinstance(factor, int) else -1
    (i1, i2), (o1, o2) = factorise(i, factor), factorise(o, factor)
    shapes: dict[str, Shape] = {}
    if config.get("decompose_both") and r < max(o1, i1) / 2:
        shapes |= {"w1_a": (o1, r), "w1_b": (r, i1)}
    else:
        shapes["w1"] = (o1, i1)
    if r >= max(o2, i2) / 2:
        shapes["w2"] = (o2, i2, *kernel)
    elif kernel and config.get("use_effective_conv2d") and math.prod(kernel) > 1:
        core = (r, r, *kernel) if len(kernel) > 1 else (r, r, *kernel, 1)
        shapes |= {"t2": core, "w2_a": (r, o2), "w2_b": (r, i2)}
    else:
        shapes |= {"w2_a": (o2, r), "w2_b": (r, i2 * math.prod(kernel))}
    return shapes


def _inputs(weight: Shape) -> int:
    return weight[1] * weight[2] ** 2 if len(weight) > 2 else weight[1]  # PEFT squares the first side of a kernel


def _block_size(inputs: int, size: object, count: object) -> int | None:
    """Return the size of a block, from it or from how many there are; None where it is not known here.

    PEFT takes the nearest size that divides.
    """
    if not isinstance(size, int) or not isinstance(count, int):
        return None
    if count and inputs % count == 0:
        size = inputs // count
    return size if size >= 1 and inputs % size == 0 else None


def _oft(config: Config, weight: Shape) -> Iterator[Shapes]:
    inputs = _inputs(weight)
    size = _block_size(inputs, config.get("oft_block_size", 32), config.get("r", 0))
    if size is None:
        return
    blocks = 1 if config.get("block_share") else inputs // size
    for role in ("R", "R_embedding") if len(weight) == 2 else ("R",):
        yield {role: (blocks, size * (size - 1) // 2)}


def _boft(config: Config, weight: Shape) -> Iterator[Shapes]:
    inputs = _inputs(weight)
    size = _block_size(inputs, config.get("boft_block_size", 4), config.get("boft_block_num", 0))
    if size is None:
        return
    factor = config.get("boft_n_butterfly_factor", 1)
    scale = (1, weight[0]) if len(weight) > 2 else (weight[0], 1)
    rotations = {1, factor} if isinstance(factor, int) else {1}  # without its CUDA extension PEFT takes 1
    for number in sorted(rotations):
        yield {"R": (number, inputs // size, size, size), "s": scale}
