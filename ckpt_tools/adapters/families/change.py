"""What an adapter makes of a weight, for every family (float32).

A weight is looked at as a matrix: `rows` × `columns`. Rows are the dims that a factor has one row for (out of a linear
layer or a convolution, num_embeddings of an embedding, experts × out of a stack), columns all others.

Letters: r rank, out and in the dims of the weight, E experts, l and m the dims of LoKr's first factor.

Source: PEFT 0.21 `tuners/{lora,loha,lokr,oft,boft}/layer.py`, `tuners/lora/dora.py`; LyCORIS 4.1.3 `modules/*.py`,
their forward (its merge_to applies alpha/r twice for LoHa and for LoKr with a factored half).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ckpt_tools.adapters.adapter import AdapterModule, Convention, Sourced
from ckpt_tools.adapters.families import rotation
from ckpt_tools.adapters.families.changes import (
    Change,
    Decomposed,
    Difference,
    Experts,
    Hadamard,
    InputRotation,
    Kronecker,
    LowRank,
    OutputRotation,
    Replacement,
)
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.moving.arrays import Array
from ckpt_tools.text import escape_name

Module = AdapterModule[Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What must be known beside a module to compute its change."""

    scale: float = 1.0
    """Multiplies what is added to the weight."""
    transposed: bool = False
    """The weight is stored as (in, out): GPT-2's Conv1D, PEFT's fan_in_fan_out."""
    num_experts: int = 1
    """Experts whose factors are stacked (PEFT's target_parameters of a 3-d parameter)."""
    convention: Convention | None = None
    """Whose tensors these are: decides on the axis of a magnitude that fits both."""
    settings: Mapping[str, Sourced[object]] = field(default_factory=dict)
    """`Adapter.settings`."""

    def bool_of(self, name: str, default: bool | None = None) -> bool:
        """Return a setting that is true or false.

        Raises:
            UsageError: It is not known and there is no default.
        """
        value = self.settings[name].value if name in self.settings else default
        if not isinstance(value, bool):
            raise UsageError(
                f"{name} is not known, and the result depends on it",
                hint="put PEFT's adapter_config.json beside the adapter",
            )
        return value

    def number_of(self, name: str, default: float) -> float:
        """Return a setting that is a number."""
        value = self.settings[name].value if name in self.settings else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{name} is not a number: {value!s}")
        return float(value)


PLAIN = Setting()
"""Nothing special."""


def scale_of(module: Module, num_experts: int = 1) -> float:
    """Return what the product of the factors is multiplied by: alpha/r, or alpha/√r with rsLoRA.

    LoKr with two full factors has scale 1 unless its rank is known: LyCORIS stores one that is meant to be ignored.

    Raises:
        UsageError: alpha is not known.
    """
    rank = rank_of(module, num_experts)
    if rank is None:
        return 1.0
    if module.alpha is None:
        raise UsageError(
            f"alpha of {module.path} is not known, and the result depends on it",
            hint="--alpha says it; it is in the trainer's configuration",
        )
    return module.alpha.value / (math.sqrt(rank) if module.use_rslora else rank)


def rank_of(module: Module, num_experts: int = 1) -> int | None:
    """Return r, from the factors where they tell it; None for a family without one."""
    factors = module.factors
    if module.family == "lora":
        down = factors["A"] if "A" in factors else factors["A_embedding"]
        return int(down.shape[0]) // num_experts
    if module.family == "loha":
        return int(factors["w1_b"].shape[0])
    if module.family == "lokr":
        for name in ("w1_b", "w2_b"):
            if name in factors:
                return int(factors[name].shape[0])
        return None if module.rank is None else module.rank.value
    return None


def change_of(module: Module, shape: tuple[int, ...], setting: Setting = PLAIN, role: str = "weight") -> Change:
    """Return what `module` makes of a tensor of `shape`.

    Args:
        module: Its factors may have any floating dtype; they are taken as float32.
        shape: Of the tensor in the base.
        setting: What else must be known.
        role: "weight" for the adapted parameter, "bias" for the bias beside it; for whole tensors (saved) their role.

    Raises:
        UsageError: Something that the result depends on is not known, or cannot be done for this family.
        UnreadableError: The factors do not go together, or make another shape.
    """
    whose = escape_name(module.path)
    factors = module.factors
    try:
        with np.errstate(all="ignore"):  # whether numbers are finite is looked at in the result
            factors = {name: factor.astype(np.float32) for name, factor in factors.items()}
            change = _build(module, factors, shape, setting, role)
    except KeyError as error:
        raise UnreadableError(f"{whose} lacks the factor {error.args[0]}", where=whose) from error
    except (ValueError, IndexError, np.linalg.LinAlgError) as error:
        shapes = ", ".join(f"{name} {list(factor.shape)}" for name, factor in factors.items())
        raise UnreadableError(f"the factors of {whose} do not go together: {shapes}", where=whose) from error
    if (change.rows, change.columns) != geometry(shape, setting.num_experts):
        made = f"{change.rows} × {change.columns}"
        raise UnreadableError(f"{whose} makes {made} elements of a tensor of shape {list(shape)}", where=whose)
    if setting.scale != 1.0 and not change.is_additive and not isinstance(change, Replacement):
        what = "a magnitude (DoRA)" if isinstance(change, Decomposed) else "a rotation"
        raise UsageError(
            f"{whose} is {what}, of which a multiple is not defined", where=whose, hint="leave out --scale"
        )
    return change


def geometry(shape: tuple[int, ...], num_experts: int = 1) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix; a vector is one column."""
    lead = 2 if num_experts > 1 else 1
    return math.prod(shape[:lead]), math.prod(shape[lead:])


def delta(module: Module, shape: tuple[int, ...], setting: Setting = PLAIN) -> Array:
    """Return what `module` adds to a weight of `shape`, float32.

    Raises:
        UsageError: It does not add: DoRA, rotations, whole tensors.
    """
    change = change_of(module, shape, setting)
    if not change.is_additive:
        raise UsageError(f"{module.path} is not a sum of the weight and something else")
    return change.delta(0, change.rows).reshape(shape)


def new_weight(module: Module, weight: Array, setting: Setting = PLAIN) -> Array:
    """Return the adapted weight, float32, of `weight`'s shape. `weight` is not changed.

    Raises:
        UsageError, UnreadableError: As `change_of`.
    """
    change = change_of(module, weight.shape, setting)
    copy = weight.astype(np.float32).reshape(change.rows, change.columns)
    return change.apply(copy, 0).reshape(weight.shape)


def _build(module: Module, factors: dict[str, Array], shape: tuple[int, ...], setting: Setting, role: str) -> Change:
    rows, columns = geometry(shape, setting.num_experts)
    if module.family == "saved":
        return Replacement(_of_shape(factors[role], shape).reshape(rows, columns))
    if role == "bias":
        return _bias(module, factors, setting)
    if module.family == "full":
        return Difference(_of_shape(factors["diff"], shape).reshape(rows, columns), setting.scale)
    if module.family == "oft":
        return _oft(module, factors, rows, columns, setting)
    if module.family == "boft":
        return _boft(module, factors, rows, columns)
    if module.family == "lokr" and setting.convention == "peft" and rank_of(module) is None:
        raise UsageError(
            f"the rank of {module.path} is not known: PEFT scales full factors by alpha/r as well",
            hint="put PEFT's adapter_config.json beside the adapter",
        )
    scale = scale_of(module, setting.num_experts) * setting.scale
    inner: Change
    if module.family == "lora":
        inner = _lora(factors, shape, scale, setting)
    elif module.family == "loha":
        inner = Hadamard((hadamard_pair(factors, 1), hadamard_pair(factors, 2)), scale)
    else:
        inner = _lokr(factors, shape, scale, setting)
    if "magnitude" not in factors:
        return inner
    if setting.num_experts > 1:
        raise UsageError(f"{module.path}: DoRA of stacked experts is not defined")
    return _decomposed(module, inner, factors, shape, setting)


def _of_shape(tensor: Array, shape: tuple[int, ...]) -> Array:
    if tensor.shape != shape:
        raise ValueError(f"{tensor.shape} instead of {shape}")
    return tensor


def _bias(module: Module, factors: dict[str, Array], setting: Setting) -> Change:
    if module.family == "full":
        return Difference(factors["diff_b"].reshape(-1, 1), setting.scale)
    return Difference(factors["B_bias"].reshape(-1, 1), scale_of(module) * setting.scale)


def _lora(factors: dict[str, Array], shape: tuple[int, ...], scale: float, setting: Setting) -> Change:
    if setting.num_experts > 1:
        return _experts(factors, shape, scale, setting)
    left, right = low_rank_pair(factors)
    return LowRank(right.T, left.T, scale) if setting.transposed else LowRank(left, right, scale)


def _lokr(factors: dict[str, Array], shape: tuple[int, ...], scale: float, setting: Setting) -> Change:
    if setting.convention == "peft" and len(shape) == 3 and "w2" in factors and factors["w2"].ndim == 3:
        # PEFT leaves w1 as a matrix here, so that the Kronecker product takes its dims for the last two of the
        # convolution's. Its forward does the same: what was trained means this.
        w1 = factors["w1"] if "w1" in factors else factors["w1_a"] @ factors["w1_b"]
        product = np.kron(w1, factors["w2"])
        return Difference(product.reshape(geometry(shape)), scale)
    return Kronecker(*kronecker_pair(factors), scale)


def _experts(factors: dict[str, Array], shape: tuple[int, ...], scale: float, setting: Setting) -> Change:
    num = shape[0]
    down, up = factors["A"], factors["B"]
    right = down.reshape(num, -1, down.shape[-1])
    left = up.reshape(up.shape[0], -1, num).transpose(2, 0, 1)
    if setting.transposed:
        left, right = right.swapaxes(1, 2), left.swapaxes(1, 2)
    return Experts(left, right, scale)


def low_rank_pair(factors: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return (rows, r) and (r, columns) of a LoRA: linear, convolution, Tucker, embedding."""
    if "A_embedding" in factors:
        return factors["A_embedding"].T, factors["B_embedding"].T
    up, down = factors["B"], factors["A"]
    left = up.reshape(up.shape[0], up.shape[1])
    if "mid" in factors:
        flat = down.reshape(down.shape[0], -1)
        down = np.einsum("mn...,nj->mj...", factors["mid"], flat)
    return left, down.reshape(down.shape[0], -1)


def hadamard_pair(factors: Mapping[str, Array], number: int) -> tuple[Array, Array]:
    """Return (out, r) and (r, columns) of one half of a LoHa."""
    left, right = factors[f"w{number}_a"], factors[f"w{number}_b"]
    if f"t{number}" not in factors:
        return left, right.reshape(right.shape[0], -1)
    tucker = np.einsum("ij...,jr->ir...", factors[f"t{number}"], right)
    return left.T, tucker.reshape(tucker.shape[0], -1)


def kronecker_pair(factors: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return w1 (l, m) and w2 (out/l, columns/m) of a LoKr, its factored halves multiplied."""
    w1 = factors["w1"] if "w1" in factors else factors["w1_a"] @ factors["w1_b"]
    if "w2" in factors:
        w2 = factors["w2"]
    else:
        left, right = kronecker_second(factors)
        w2 = left @ right
    return w1, w2.reshape(w2.shape[0], -1)


def kronecker_second(factors: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return (out/l, r) and (r, columns/m) of a factored second half."""
    left, right = factors["w2_a"], factors["w2_b"]
    if "t2" in factors:
        tucker = np.einsum("ij...,jr->ir...", factors["t2"], right)
        return left.T, tucker.reshape(tucker.shape[0], -1)
    return left, right.reshape(right.shape[0], -1)


def _decomposed(
    module: Module, inner: Change, factors: dict[str, Array], shape: tuple[int, ...], setting: Setting
) -> Change:
    magnitude = factors["magnitude"]
    by_column = magnitude_is_by_column(module, magnitude.shape, shape, setting)
    num_spatial = math.prod(shape[2:]) if by_column else 1
    if magnitude.size != (shape[1] if by_column else shape[0]):
        raise ValueError("the magnitude has another length")
    return Decomposed(inner, magnitude, by_column=by_column, num_spatial=num_spatial)


def magnitude_is_by_column(
    module: AdapterModule[Array], magnitude: tuple[int, ...], shape: tuple[int, ...], setting: Setting = PLAIN
) -> bool:
    """Does a magnitude belong to the columns (dim 1 of the weight) instead of the rows?

    PEFT's, and diffusers', belong to the outputs: (out,), or (1, out, 1, 1) of a convolution. LyCORIS' are
    (out, 1, …), or (1, in, 1, …) without wd_on_out.

    Raises:
        UsageError: (1, n, 1, 1) of a square convolution, and nothing says whose it is.
    """
    if len(magnitude) == 1:
        return setting.transposed or "A_embedding" in module.factors
    if magnitude[0] != 1 or shape[0] == 1:
        return False
    if len(magnitude) == 2 or magnitude[1] != shape[0]:
        return True
    if magnitude[1] != shape[1] or setting.convention in ("peft", "diffusers"):
        return False
    if setting.convention is None:
        raise UsageError(f"the magnitude of {module.path} fits inputs and outputs alike, and nothing says which it is")
    return True


def _oft(module: Module, factors: dict[str, Array], rows: int, columns: int, setting: Setting) -> Change:
    if "blocks" in factors:
        blocks = factors["blocks"]
        rotations = rotation.lycoris_rotation(blocks, _constraint(module) * rows)
        if rotations.shape[0] * rotations.shape[1] != rows:
            raise ValueError("the blocks do not cover the outputs")
        return OutputRotation(rows, columns, rotations, _rescale(factors))
    name = "R" if "R" in factors else "R_embedding"
    coft = setting.bool_of("coft", default=False)
    rotations = rotation.peft_rotation(
        factors[name],
        use_cayley_neumann=setting.bool_of("use_cayley_neumann"),
        num_terms=int(setting.number_of("num_cayley_neumann_terms", 5)),
        coft_eps=setting.number_of("eps", 6e-5) if coft else None,
    )
    if setting.transposed:
        raise UsageError(f"{module.path}: OFT of a transposed weight is not defined")
    num, size, _ = rotations.shape
    if num * size != columns and not (num == 1 and columns % size == 0):
        raise ValueError("the blocks do not cover the inputs")
    if name == "R":  # PEFT multiplies an embedding by R, other weights by its transpose
        rotations = rotations.swapaxes(1, 2)
    return InputRotation(rows, columns, np.ascontiguousarray(rotations))


def _boft(module: Module, factors: dict[str, Array], rows: int, columns: int) -> Change:
    if "blocks" in factors:
        rotations = rotation.lycoris_rotation(factors["blocks"], _constraint(module) * rows)
        if rotations.shape[1] * rotations.shape[2] != rows:
            raise ValueError("the blocks do not cover the outputs")
        return OutputRotation(rows, columns, rotations, _rescale(factors))
    stored = factors["R"]
    if stored.shape[1] * stored.shape[2] != columns:
        raise ValueError("the blocks do not cover the inputs")
    row_scale = factors["s"].reshape(-1) if "s" in factors else None
    if row_scale is not None and len(row_scale) != rows:
        raise ValueError("boft_s has another length")
    return InputRotation(rows, columns, stored, row_scale)


def _constraint(module: Module) -> float:
    return 0.0 if module.alpha is None else module.alpha.value


def _rescale(factors: dict[str, Array]) -> Array | None:
    return factors["rescale"].reshape(-1) if "rescale" in factors else None
