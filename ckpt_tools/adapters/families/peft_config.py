"""What each family needs in PEFT's configuration beside ranks, alphas and targets. Pure.

Letters as in `adapter.py`.

Source: peft 0.21 `tuners/{lora,loha,lokr,oft,boft}/{config,layer}.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Sourced
from ckpt_tools.errors import UsageError

F = TypeVar("F")
Config = dict[str, Sourced[object]]
Shapes = Mapping[str, tuple[int, ...]]


class InexpressibleError(UsageError):
    """PEFT has no configuration for the adapter in its present form."""


_MAX_FACTOR = 1 << 16


def infer(
    adapter: Adapter[F],
    family: str,
    modules: Sequence[AdapterModule[F]],
    shape_of: Callable[[F], tuple[int, ...]],
    base: Shapes,
) -> Config:
    """Return the fields of one family.

    Args:
        adapter: The whole of it, for its settings.
        family: Of all `modules`.
        modules: To be described by one configuration.
        shape_of: The shape of a factor.
        base: Shapes of the base model's parameters; empty when it is not known.

    Raises:
        UsageError: One configuration of PEFT cannot express it, or something is not known that changes the result.
    """
    shapes = [{role: shape_of(factor) for role, factor in module.factors.items()} for module in modules]
    if family == "lora":
        return _lora(adapter, modules)
    if family in ("loha", "lokr"):
        refuse_roles(modules, ("magnitude",), "PEFT has DoRA for LoRA alone")
        effective = Sourced(
            _agree(adapter, "use_effective_conv2d", any({"t1", "t2"} & module.factors.keys() for module in modules)),
            "Tucker factors" if any({"t1", "t2"} & m.factors.keys() for m in modules) else "no Tucker factors",
        )
        rest = _lokr(adapter, modules, shapes, base) if family == "lokr" else {}
        return {"use_effective_conv2d": effective, **rest}
    refuse_roles(
        modules,
        ("blocks", "rescale"),
        "LyCORIS rotates the output of a layer, and PEFT its input: no settings make them the same",
    )
    return _oft(adapter, modules, shapes, base) if family == "oft" else _boft(shapes)


def refuse_roles(modules: Iterable[AdapterModule[F]], roles: Sequence[str], reason: str) -> None:
    """Raise UsageError when a module has one of `roles`."""
    for module in modules:
        for role in roles:
            if role in module.factors:
                raise InexpressibleError(
                    f"PEFT cannot express the factor {role} of {module.path!r}: {reason}",
                    hint="put the adapter into the base: ckpt merge-lora BASE ADAPTER DST",
                )


def _agree(adapter: Adapter[F], name: str, seen: bool) -> bool:
    """Return what the tensors say; a configuration may say more only where the tensors leave it open."""
    known = adapter.settings.get(name)
    return seen or bool(known and known.value is True)


def _lora(adapter: Adapter[F], modules: Sequence[AdapterModule[F]]) -> Config:
    refuse_roles(modules, ("mid",), "it has no Tucker decomposition")
    config: Config = {}
    for name, role, what in (("use_dora", "magnitude", "magnitudes"), ("lora_bias", "B_bias", "biases of B")):
        having = [module for module in modules if role in module.factors]
        if having and len(having) != len(modules):
            without = next(module for module in modules if role not in module.factors)
            raise UsageError(
                f"{len(having)} of {len(modules)} modules have {what}, and PEFT has one setting for all ({name})",
                where=without.path,
                hint="export those with and those without one by one, with --include and --exclude",
            )
        config[name] = Sourced(bool(having), f"{what} in every module" if having else f"no {what}")
    known = adapter.settings.get("init_lora_weights")
    config["init_lora_weights"] = known or Sourced(
        True, "nothing says that the base was changed to begin with (PiSSA, …)"
    )
    return config


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """Return the two factors (m ≤ n, unless `factor` divides) that PEFT and LyCORIS give a dimension.

    Source: peft 0.21 `tuners/lokr/layer.py`, `factorization`.
    """
    if factor > 0 and dimension % factor == 0:
        return factor, dimension // factor
    limit = dimension if factor == -1 else factor
    best = (1, dimension)
    for small in range(2, math.isqrt(dimension) + 1):
        if small > limit:
            break
        if dimension % small == 0:  # the sum of the two falls while they come closer
            best = (small, dimension // small)
    return best


def _lokr(
    adapter: Adapter[F],
    modules: Sequence[AdapterModule[F]],
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    base: Shapes,
) -> Config:
    outer, inner = [], []
    for module, shape in zip(modules, shapes, strict=True):
        outer.append(_w1(module, shape))
        inner.append(_w2(module, shape, outer[-1], base.get(f"{module.path}.weight")))
    known = adapter.settings.get("decompose_factor")
    if known is not None and "peft_type" in adapter.settings and not base and any(map(_may_be_conv, shapes)):
        # PEFT's own file: it has the shapes that PEFT gave it, which those of a convolution do not show.
        return {name: adapter.settings.get(name, Sourced(False, known.source)) for name in _LOKR} | {_LOKR[0]: known}
    first = [known.value] if known is not None and isinstance(known.value, int) else []
    candidates = dict.fromkeys([*first, -1, *(n for pair in outer for n in pair)])
    for factor in candidates:
        if 0 < abs(factor) <= _MAX_FACTOR and all(
            factorization(w1[i] * w2[i], factor) == (w1[i], w2[i])
            for w1, w2 in zip(outer, inner, strict=True)
            for i in (0, 1)
        ):
            break
    else:
        raise InexpressibleError(
            "no decompose_factor of PEFT gives these factors their shapes",
            where=modules[0].path,
            hint=("" if base else "for convolutions give --base DIR; else ")
            + "put the adapter into the base: ckpt merge-lora BASE ADAPTER DST",
        )
    source = known.source if known is not None and known.value == factor else "shapes of w1 and w2"
    both = any("w1_a" in shape for shape in shapes)
    for module, shape, w1, w2 in zip(modules, shapes, outer, inner, strict=True):
        _check_lokr(module, shape, w1, w2, both)
    return {
        "decompose_factor": Sourced(factor, source),
        "decompose_both": Sourced(both, "w1 has two factors" if both else "no w1 has two factors"),
    }


_LOKR = ("decompose_factor", "decompose_both")


def _may_be_conv(shape: Mapping[str, tuple[int, ...]]) -> bool:
    """Can the second half hide a kernel in its columns?"""
    return "w2_b" in shape and "t2" not in shape


def _w1(module: AdapterModule[F], shape: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    if "w1" in shape and len(shape["w1"]) == 2:
        return shape["w1"][0], shape["w1"][1]
    if {"w1_a", "w1_b"} <= shape.keys() and len(shape["w1_a"]) == len(shape["w1_b"]) == 2:
        return shape["w1_a"][0], shape["w1_b"][1]
    raise UsageError(f"{module.path!r} has no whole w1")


def _w2(
    module: AdapterModule[F],
    shape: Mapping[str, tuple[int, ...]],
    w1: tuple[int, int],
    weight: tuple[int, ...] | None,
) -> tuple[int, int]:
    """Return (out/l, in/m). A factored w2 of a convolution has its kernel in the second one: the base tells."""
    if "w2" in shape and len(shape["w2"]) >= 2:
        return shape["w2"][0], shape["w2"][1]
    if {"w2_a", "w2_b"} <= shape.keys() and len(shape["w2_a"]) == len(shape["w2_b"]) == 2:
        if "t2" in shape:
            return shape["w2_a"][1], shape["w2_b"][1]
        if weight is not None and len(weight) > 2 and w1[1]:
            return shape["w2_a"][0], weight[1] // w1[1]
        return shape["w2_a"][0], shape["w2_b"][1]
    raise UsageError(f"{module.path!r} has no whole w2")


def _check_lokr(
    module: AdapterModule[F],
    shape: Mapping[str, tuple[int, ...]],
    w1: tuple[int, int],
    w2: tuple[int, int],
    both: bool,
) -> None:
    """Hold against PEFT's own choice which of the factors are full, given the rank."""
    if module.rank is None:
        return
    rank = module.rank.value
    full1 = not (both and rank < max(w1) / 2)
    full2 = not rank < max(w2) / 2
    for full, role in ((full1, "w1"), (full2, "w2")):
        if full != (role in shape):
            raise InexpressibleError(
                f"PEFT would build {role} of {module.path!r} "
                f"{'whole' if full else 'out of two factors'} at rank {rank}, and here it is otherwise",
                hint="give the rank of the training run (--config r=VALUE), or merge: ckpt merge-lora",
            )


def _blocks_of(shape: tuple[int, ...], path: str) -> tuple[int, int]:
    """Return (n, b) of OFT's R (n, b(b-1)/2)."""
    if len(shape) == 2:
        size = (1 + math.isqrt(1 + 8 * shape[1])) // 2
        if size * (size - 1) // 2 == shape[1] and shape[0]:
            return shape[0], size
    raise UsageError(f"R of {path!r} has the shape {list(shape)}: no rotations of any block size")


def _adjusted(dimension: int, wanted: int) -> int:
    """Return the divisor of `dimension` nearest to `wanted`, the lower one when two are as near.

    Source: peft 0.21 `tuners/oft/layer.py`, `adjust_oft_parameters`.
    """
    higher = next((n for n in range(wanted, dimension + 1) if dimension % n == 0), dimension)
    lower = next((n for n in range(min(wanted, dimension), 0, -1) if dimension % n == 0), 1)
    return lower if wanted - lower <= higher - wanted else higher


def _oft(
    adapter: Adapter[F],
    modules: Sequence[AdapterModule[F]],
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    base: Shapes,
) -> Config:
    blocks = [
        _blocks_of(shape.get("R", shape.get("R_embedding", ())), module.path)
        for module, shape in zip(modules, shapes, strict=True)
    ]
    config: Config = {}
    shared = adapter.settings.get("block_share")
    asked: list[str] = []
    if any(count > 1 for count, _ in blocks):
        config["block_share"] = Sourced(False, "R has several blocks")
    elif shared is not None:
        config["block_share"] = shared
    else:
        widths = [_width(base.get(f"{module.path}.weight")) for module in modules]
        if all(width is not None for width in widths):
            alone = all(width == size for width, (_, size) in zip(widths, blocks, strict=True))
            config["block_share"] = Sourced(not alone, "one block, and the width of the base's weight")
        else:
            asked.append("block_share=true|false")
    for name, when in (
        ("use_cayley_neumann", None),
        ("num_cayley_neumann_terms", "use_cayley_neumann"),
        ("peft_version", "use_cayley_neumann"),  # before 0.18 PEFT computed another rotation
        ("coft", None),
        ("eps", "coft"),
    ):
        if name in adapter.settings:
            config[name] = adapter.settings[name]
        elif when is None:
            asked.append(f"{name}=true|false")
        elif name == "peft_version" and "peft_type" in adapter.settings:
            continue  # PEFT's own file without it is older than 0.18, and PEFT warns
        elif when in config and config[when].value is True:
            asked.append(f"{name}=VALUE")
    if asked:
        raise UsageError(
            "the tensors of OFT do not tell all settings that its rotations depend on: "
            + ", ".join(each.partition("=")[0] for each in asked),
            where=modules[0].path,
            hint="give those of the training run: " + " ".join(f"--config {each}" for each in asked),
        )
    return config | _oft_size(adapter, blocks, is_shared=config["block_share"].value is True)


def _width(shape: tuple[int, ...] | None) -> int | None:
    """Return how long a rotated input is: in × kernel."""
    return None if shape is None or len(shape) < 2 else math.prod(shape[1:])


def _oft_size(adapter: Adapter[F], blocks: Sequence[tuple[int, int]], *, is_shared: bool) -> Config:
    """One block size for all modules, or one number of blocks; PEFT moves either to a divisor of the width."""
    sizes, counts = {size for _, size in blocks}, {count for count, _ in blocks}
    known = {name: adapter.settings[name] for name in ("r", "oft_block_size") if name in adapter.settings}
    size = known.get("oft_block_size")
    by_number = {"oft_block_size": Sourced(0, "the number of blocks is set")}
    if len(sizes) == 1 or is_shared:
        if len(sizes) == 1:
            return _by_size(sizes.pop(), size)
    elif len(counts) == 1:
        return {"r": Sourced(counts.pop(), "rows of R"), **by_number}
    else:
        given = [size.value] if size is not None and isinstance(size.value, int) and size.value > 0 else []
        for wanted in (*given, *sorted(sizes, reverse=True)):
            if all(_adjusted(count * own, wanted) == own for count, own in blocks):
                return _by_size(wanted, size)
    raise UsageError(
        "neither one block size nor one number of blocks gives all modules the shapes that they have",
        hint="export them one by one, with --include and --exclude",
    )


def _by_size(wanted: int, known: Sourced[object] | None) -> Config:
    source = known.source if known is not None and known.value == wanted else "columns of R"
    return {"oft_block_size": Sourced(wanted, source), "r": Sourced(0, "the size of the blocks is set")}


def _boft(shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> Config:
    rotations = {shape.get("R", ()) for shape in shapes}
    if any(len(shape) != 4 or shape[2] != shape[3] for shape in rotations):
        raise UsageError("R of BOFT has four dims, the last two alike, and here it has not")
    factors, sizes, counts = ({shape[dim] for shape in rotations} for dim in (0, 2, 1))
    if len(factors) > 1 or (len(sizes) > 1 and len(counts) > 1):
        raise UsageError(
            "neither one block size nor one number of blocks gives all modules the shapes that they have",
            hint="export them one by one, with --include and --exclude",
        )
    by_size = len(sizes) == 1
    return {
        "boft_n_butterfly_factor": Sourced(factors.pop(), "first dim of R"),
        "boft_block_size": Sourced(sizes.pop() if by_size else 0, "last dim of R" if by_size else "the number is set"),
        "boft_block_num": Sourced(0 if by_size else counts.pop(), "the size is set" if by_size else "second dim of R"),
    }
