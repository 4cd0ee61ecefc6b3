"""OFT: the weight times rotations, PEFT's of the inputs or LyCORIS' of the outputs (diag-oft); and BOFT, their product.

Roles of OFT: R (n, b(b-1)/2) as PEFT has it, R_embedding for an embedding; blocks (n, b, b) and rescale (out, …) as
LyCORIS has it, whose alpha is a constraint. Of BOFT, butterfly rotations: R (m, n, b, b) and s (out, 1) as PEFT has it;
blocks (m, n, b, b) and rescale as LyCORIS has it. Letters: m butterfly factors, n blocks of size b, out the rows of the
weight.

Source: peft 0.21 `tuners/{oft,boft}/{config,layer}.py`; lycoris-lora 4.1 `modules/{diag_oft,boft}.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F, Fields, Shape, Shapes, Sourced
from ckpt_tools.adapters.families.family import (
    PEFT_COMMON,
    Factors,
    Family,
    Matrix,
    Module,
    Setting,
    Ways,
    geometry,
    refuse_roles,
)
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange
    from ckpt_tools.adapters.integrity import Values
    from ckpt_tools.transfer.arrays import Array


class RotatingFamily(Family):
    """A family whose change depends on the weight: it rotates it."""

    is_rotation = True
    why_not_a_sum = "it rotates the weight: its change depends on the base's weights"
    lycoris_names: ClassVar = {"blocks": "oft_blocks", "rescale": "rescale"}

    def is_idle(self, roles: Collection[str], seen: Mapping[str, Values]) -> bool:
        """The rotations are none, and nothing is scaled."""
        scale = seen.get("s")
        rotates = "rescale" in roles or not any(
            role in seen and seen[role].is_zero for role in ("R", "R_embedding", "blocks")
        )
        return not rotates and (scale is None or scale.is_one)

    def matrix(self, shapes: Shapes) -> Matrix | None:
        """Return the rows that LyCORIS' blocks cover."""
        return math.prod(shapes["blocks"][-3:-1]), None

    def change(self, module: Module, factors: Factors, shape: Shape, setting: Setting, role: str) -> WeightChange:
        """Return the rotation: of the outputs by LyCORIS' blocks, or PEFT's of the inputs."""
        rows, columns = geometry(shape, setting.num_experts)
        if "blocks" not in factors:
            return self.inputs_rotated(module, factors, rows, columns, setting)
        from ckpt_tools.adapters.families import changes

        constraint = 0.0 if module.alpha is None else module.alpha.value
        rotations = changes.lycoris_rotation(factors["blocks"], constraint * rows)
        if math.prod(rotations.shape[-3:-1]) != rows:
            raise ValueError("the blocks do not cover the outputs")
        rescale = factors["rescale"].reshape(-1) if "rescale" in factors else None

        def turn(weight: Array, _: int) -> Array:
            mix = changes.rotate_outputs if rotations.ndim == 3 else changes.rotate_outputs_by_butterfly
            new = mix(weight, rotations)
            if rescale is not None:
                new *= rescale[:, None]
            return new

        return changes.Turned(rows, columns, turn, is_rowwise=False)

    def inputs_rotated(
        self, module: Module, factors: Factors, rows: int, columns: int, setting: Setting
    ) -> WeightChange:
        """Return PEFT's rotation of the inputs."""
        raise NotImplementedError


class Oft(RotatingFamily):
    """A block-diagonal rotation."""

    name = "oft"
    title = "OFT"
    lycoris_algorithm = "diag-oft"
    marker = "oft_"
    peft_names: ClassVar = {"R": "oft_R.weight", "R_embedding": "oft_embedding_R.weight"}
    peft_type = "OFT"
    peft_fields = frozenset(
        f"{PEFT_COMMON} r oft_block_size module_dropout fan_in_fan_out bias init_weights coft eps block_share "
        "use_cayley_neumann num_cayley_neumann_terms".split()
    )
    peft_checks_bias = True
    peft_either = ("r", "oft_block_size", 32)

    def matrix(self, shapes: Shapes) -> Matrix | None:
        """PEFT's blocks may be shared: the maths refuses what does not fit."""
        return super().matrix(shapes) if "blocks" in shapes else (None, None)

    def missing(self, roles: Collection[str]) -> list[str]:
        """The rotations."""
        return [] if {"R", "R_embedding", "blocks"} & set(roles) else ["R"]

    def refuse_weight(self, module: AdapterModule[F], shape: Shape) -> None:
        """PEFT's of a convolution."""
        if "R" in module.factors and math.prod(shape[2:]) > 1:
            raise UsageError(
                f"{module.path} is a convolution: PEFT's OFT rotates patches of its input and takes the mean "
                "where they overlap, which no weights do (PEFT's own merge gives a different model than was trained)",
                where=module.path,
                hint="load it unmerged with PEFT; leave it out here with --exclude",
            )

    # PEFT

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return the settings that the rotations depend on, and the size or the number of the blocks."""
        refuse_roles(modules, LYCORIS_ROLES, WHY_NOT_PEFT)
        blocks = [_blocks_of(module) for module in modules]
        config: Fields = {}
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
            what = "the tensors of OFT do not show all settings that its rotations depend on: " + ", ".join(
                each.partition("=")[0] for each in asked
            )
            hint = "give those of the training run: " + " ".join(f"--config {each}" for each in asked)
            raise UsageError(what, where=modules[0].path, hint=hint)
        return config | _oft_size(adapter, blocks, is_shared=config["block_share"].value is True)

    def peft_shapes(self, config: Mapping[str, object], rank: int, weight: Shape) -> Ways:
        """Source: peft 0.21 `tuners/oft/layer.py`, `update_layer`."""
        ways = (weight, weight[::-1]) if len(weight) == 2 else (weight,)
        found: list[Mapping[str, Shape | None]] = []
        for inputs in map(peft_inputs, ways):
            size = peft_block_size(inputs, config.get("oft_block_size", 32), config.get("r", 0))
            if size is not None:
                shape = (1 if config.get("block_share") else inputs // size, size * (size - 1) // 2)
                found += [{role: shape} for role in (("R", "R_embedding") if len(weight) == 2 else ("R",))]
        return tuple(found)

    # Arithmetic

    def inputs_rotated(
        self, module: Module, factors: Factors, rows: int, columns: int, setting: Setting
    ) -> WeightChange:
        """Return the rotation by R."""
        import numpy as np

        from ckpt_tools.adapters.families.changes import Turned, peft_rotation, rotate_columns

        name = "R" if "R" in factors else "R_embedding"
        neumann, coft = setting.bool_of("use_cayley_neumann"), setting.bool_of("coft", default=False)
        rotations = peft_rotation(
            factors[name],
            use_cayley_neumann=neumann,
            num_terms=int(setting.number_of("num_cayley_neumann_terms", 5)) if neumann else 0,
            coft_eps=setting.number_of("eps", 6e-5) if coft else None,
        )
        if setting.transposed:
            raise UsageError(f"{module.path}: OFT of a transposed weight is not defined")
        num, size, _ = rotations.shape
        if num * size != columns and not (num == 1 and columns % size == 0):
            raise ValueError("the blocks do not cover the inputs")
        if name == "R":  # PEFT multiplies an embedding by R, other weights by its transpose
            rotations = rotations.swapaxes(1, 2)
        blocks = np.ascontiguousarray(rotations)
        return Turned(rows, columns, lambda weight, _: rotate_columns(weight, blocks))


LYCORIS_ROLES = ("blocks", "rescale")
WHY_NOT_PEFT = "LyCORIS rotates the output of a layer, and PEFT its input: no settings make them the same"


def peft_inputs(weight: Shape) -> int:
    """Return how long the inputs are that PEFT rotates."""
    return weight[1] * weight[2] ** 2 if len(weight) > 2 else weight[1]  # it squares the first side of a kernel


def peft_block_size(inputs: int, size: object, count: object) -> int | None:
    """Return the size of a block, from it or from how many there are; None where it is not known here.

    PEFT takes the nearest size that divides.
    """
    if not isinstance(size, int) or not isinstance(count, int):
        return None
    if count and inputs % count == 0:
        size = inputs // count
    return size if size >= 1 and inputs % size == 0 else None


def _blocks_of(module: AdapterModule[F]) -> tuple[int, int]:
    """Return (n, b) of R (n, b(b-1)/2)."""
    shape = module.shapes.get("R", module.shapes.get("R_embedding", ()))
    if len(shape) == 2:
        size = (1 + math.isqrt(1 + 8 * shape[1])) // 2
        if size * (size - 1) // 2 == shape[1] and shape[0]:
            return shape[0], size
    raise UsageError(f"R of {module.path!r} has the shape {list(shape)}, which fits no block size")


def adjusted(dimension: int, wanted: int) -> int:
    """Return the divisor of `dimension` nearest to `wanted`, the lower one when two are as near.

    Source: peft 0.21 `tuners/oft/layer.py`, `adjust_oft_parameters`.
    """
    higher = next((n for n in range(wanted, dimension + 1) if dimension % n == 0), dimension)
    lower = next((n for n in range(min(wanted, dimension), 0, -1) if dimension % n == 0), 1)
    return lower if wanted - lower <= higher - wanted else higher


def _width(shape: tuple[int, ...] | None) -> int | None:
    """Return how long a rotated input is: in × kernel."""
    return None if shape is None or len(shape) < 2 else math.prod(shape[1:])


def _oft_size(adapter: Adapter[F], blocks: Sequence[tuple[int, int]], *, is_shared: bool) -> Fields:
    """One block size for all modules, or one number of blocks; PEFT moves either to a divisor of the width."""
    sizes, counts = {size for _, size in blocks}, {count for count, _ in blocks}
    size = adapter.settings.get("oft_block_size")
    by_number = {"oft_block_size": Sourced(0, "the number of blocks is set")}
    if len(sizes) == 1 or is_shared:
        if len(sizes) == 1:
            return _by_size(sizes.pop(), size)
    elif len(counts) == 1:
        return {"r": Sourced(counts.pop(), "rows of R"), **by_number}
    else:
        given = [size.value] if size is not None and isinstance(size.value, int) and size.value > 0 else []
        for wanted in (*given, *sorted(sizes, reverse=True)):
            if all(adjusted(count * own, wanted) == own for count, own in blocks):
                return _by_size(wanted, size)
    raise no_common_blocks()


def no_common_blocks() -> UsageError:
    """Return the error that one configuration cannot say the blocks of all modules."""
    what = "neither one block size nor one number of blocks gives all modules the shapes that they have"
    return UsageError(what, hint="export them one by one, with --include and --exclude")


def _by_size(wanted: int, known: Sourced[object] | None) -> Fields:
    source = known.source if known is not None and known.value == wanted else "columns of R"
    return {"oft_block_size": Sourced(wanted, source), "r": Sourced(0, "the size of the blocks is set")}


class Boft(RotatingFamily):
    """A product of rotations."""

    name = "boft"
    title = "BOFT"
    lycoris_algorithm = "boft"
    marker = "boft_"
    peft_names: ClassVar = {"R": "boft_R", "s": "boft_s"}
    peft_type = "BOFT"
    peft_fields = frozenset(
        f"{PEFT_COMMON} boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout fan_in_fan_out bias "
        "init_weights".split()
    )
    peft_either = ("boft_block_num", "boft_block_size", 4)

    def matrix(self, shapes: Shapes) -> Matrix | None:
        """Return what the blocks cover."""
        if "blocks" in shapes:
            return super().matrix(shapes)
        if "R" not in shapes:
            return None
        return (math.prod(shapes["s"]) if "s" in shapes else None), math.prod(shapes["R"][1:3])

    def missing(self, roles: Collection[str]) -> list[str]:
        """The rotations, and PEFT's scale."""
        return [] if "blocks" in roles else [role for role in ("R", "s") if role not in roles]

    # PEFT

    def peft_config(self, adapter: Adapter[F], modules: Sequence[AdapterModule[F]], base: Shapes) -> Fields:
        """Return the number of factors, and the size or the number of the blocks."""
        refuse_roles(modules, LYCORIS_ROLES, WHY_NOT_PEFT)
        rotations = {module.shapes.get("R", ()) for module in modules}
        if any(len(shape) != 4 or shape[2] != shape[3] for shape in rotations):
            raise UsageError("R of BOFT must have four dims, the last two equal")
        factors, sizes, counts = ({shape[dim] for shape in rotations} for dim in (0, 2, 1))
        if len(factors) > 1 or (len(sizes) > 1 and len(counts) > 1):
            raise no_common_blocks()
        by_size = len(sizes) == 1
        return {
            "boft_n_butterfly_factor": Sourced(factors.pop(), "first dim of R"),
            "boft_block_size": Sourced(
                sizes.pop() if by_size else 0, "last dim of R" if by_size else "the number is set"
            ),
            "boft_block_num": Sourced(
                0 if by_size else counts.pop(), "the size is set" if by_size else "second dim of R"
            ),
        }

    def peft_shapes(self, config: Mapping[str, object], rank: int, weight: Shape) -> Ways:
        """Source: peft 0.21 `tuners/boft/layer.py`, `update_layer`."""
        inputs = peft_inputs(weight)
        size = peft_block_size(inputs, config.get("boft_block_size", 4), config.get("boft_block_num", 0))
        if size is None:
            return ()
        factor = config.get("boft_n_butterfly_factor", 1)
        scale = (1, weight[0]) if len(weight) > 2 else (weight[0], 1)
        numbers = {1, factor} if isinstance(factor, int) else {1}  # without its CUDA extension PEFT takes 1
        return tuple({"R": (number, inputs // size, size, size), "s": scale} for number in sorted(numbers))

    # Arithmetic

    def inputs_rotated(
        self, module: Module, factors: Factors, rows: int, columns: int, setting: Setting
    ) -> WeightChange:
        """Return the rotation, and PEFT's scale of the rows."""
        from ckpt_tools.adapters.families.changes import Turned, rotate_inputs_by_butterfly

        stored = factors["R"]
        if stored.shape[1] * stored.shape[2] != columns:
            raise ValueError("the blocks do not cover the inputs")
        row_scale = factors["s"].reshape(-1) if "s" in factors else None
        if row_scale is not None and len(row_scale) != rows:
            raise ValueError("boft_s has the wrong length")

        def turn(weight: Array, start: int) -> Array:
            new = rotate_inputs_by_butterfly(weight, stored)
            if row_scale is not None:
                new *= row_scale[start : start + len(new), None]
            return new

        return Turned(rows, columns, turn)
