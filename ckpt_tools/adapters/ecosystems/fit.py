"""Families that a target does not have, said in one that it has: exactly, or, when asked for, by SVD."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ckpt_tools.adapters.adapter import Convention, Shape, Sourced
from ckpt_tools.adapters.ecosystems.output import Written
from ckpt_tools.adapters.ecosystems.placing import Placed
from ckpt_tools.adapters.families import columns_of, dora, equivalents, family_of, rows_of, shape_of
from ckpt_tools.adapters.families.family import InexpressibleError, Module, Setting, refuse
from ckpt_tools.adapters.families.lokr import first_role
from ckpt_tools.transfer.arrays import Array, is_finite

_FLOAT32 = 2.0**-20
"""Relative error that is not reported."""
_KERNELS = (
    (r"(?:.*\.)?(?:conv_in|conv_out|conv1|conv2|(?:down|up)samplers\.\d+\.conv)", 3),
    (r"(?:.*\.)?conv_shortcut", 1),
    (r"input_blocks\.0\.0|out\.2|.*\.in_layers\.2|.*\.out_layers\.3|.*\.op|output_blocks\.\d+\.\d+\.conv", 3),
    (r".*\.skip_connection", 1),
)
"""Convolutions of the U-Nets by diffusers' names and the authors' → size of the kernel.
Source: diffusers 0.42 `models/resnet.py`, `models/unets/unet_2d_condition.py`; generative-models `openaimodel.py`."""


@dataclass(slots=True)
class Fitting:
    """Brings modules into the target's families, and remembers what that cost."""

    svd_rank: int | None = None
    """Rank of an approximation, where nothing exact exists; None to refuse."""
    convention: Convention | None = None
    """Whose tensors they were: decides on the axis of a magnitude that fits both."""
    may_fuse: bool = True
    """May modules be named that a model has only once its projections are fused?"""
    errors: dict[str, float] = field(default_factory=dict)
    """Module → error relative to the largest element of the change."""
    notes: list[str] = field(default_factory=list)
    _conversions: dict[str, int] = field(default_factory=dict)

    def as_lora(self, module: Module) -> Module:
        """Return a lora that changes the weight as `module` does, or approximates it where a rank for that is given."""
        family = family_of(module)
        if family.is_low_rank_pair(module.factors):
            return module
        if (why := family.why_no_lora(module.shapes)) is not None:
            raise refuse(module, why)
        found = equivalents.as_lora(module, _conv_shape(module), svd_rank=self.svd_rank)
        self.count(found.how)
        self._add_error(module.path, found.error)
        return found.module

    def baked(self, module: Module) -> Module:
        """Return a lora with its scale multiplied into B, so that alpha is its rank.

        Ecosystems without an alpha take it for the rank. A scale that is no power of two would be rounded in 16 bits:
        such a B becomes float32.
        """
        scale, rank = family_of(module).scale(module), module.factors["A"].shape[0]
        factors = dict(module.factors)
        if scale != 1.0:
            for role in ("B", "B_bias"):
                if role in factors:
                    factors[role] = self._times(module, role, scale)
            self.count("alpha/r multiplied into B")
        return replace(
            module,
            factors=factors,
            rank=Sourced(rank, f"A has {rank} rows"),
            alpha=Sourced(float(rank), "alpha/r is in B"),
            use_rslora=False,
        )

    def baked_lokr(self, module: Module) -> Module:
        """Return a LoKr with its scale multiplied into the first factor."""
        scale = family_of(module).scale(module)
        if scale == 1.0:
            return module
        role = first_role(module.factors)
        self.count("alpha/r multiplied into w1")
        return replace(module, factors={**module.factors, role: self._times(module, role, scale)})

    def _times(self, module: Module, role: str, scale: float) -> Array:
        factor = module.factors[role]
        with np.errstate(over="ignore", invalid="ignore"):  # too large for one type: the next one
            exact = factor.astype(np.float64) * scale
            for dtype in (factor.dtype, np.dtype(np.float32)):
                rounded = exact.astype(dtype)
                if bool((rounded.astype(np.float64) == exact).all()) and is_finite(rounded):
                    return rounded
        if not is_finite(rounded):
            raise refuse(module, f"{role} times alpha/r is too large for 32 bits")
        largest = float(np.abs(exact).max())
        self._add_error(
            module.path, float(np.abs(exact - rounded.astype(np.float64)).max()) / largest if largest else 0.0
        )
        return rounded

    def with_plain_alpha(self, module: Module) -> Module:
        """Return the module with the alpha that says its scale as alpha/r, for readers that know no rsLoRA."""
        family = family_of(module)
        if not family.is_scaled:
            return module
        rank = family.rank(module)
        if rank is None:  # LoKr of two full factors: nothing scales it
            return module
        source = module.alpha.source if module.alpha is not None else ""
        if module.use_rslora:
            self.count("rsLoRA's scale alpha/√r was written as a larger alpha")
            source = f"{source}, times √r"
        scaled = replace(
            module,
            rank=Sourced(rank, "factors"),
            alpha=Sourced(family_of(module).scale(module) * rank, source),
            use_rslora=False,
        )
        if family.is_unranked(module.factors):
            # LyCORIS and ComfyUI scale no LoKr of two full factors, whatever its alpha.
            factor = self._times(module, "w1", family_of(module).scale(module))
            scaled = replace(scaled, factors={**module.factors, "w1": factor}, alpha=None, rank=None)
        return scaled

    def magnitude_by_row(self, module: Module) -> Array:
        """Return a DoRA's magnitude as (out,); raise InexpressibleError if it is one per column of the weight."""
        magnitude = module.factors["magnitude"]
        if self.has_columns(module) or magnitude.size != rows_of(module):
            raise refuse(module, "its magnitude is one per column of the weight, PEFT's and diffusers' is one per row")
        return magnitude.reshape(-1)

    def has_columns(self, module: Module) -> bool:
        """Is a DoRA's magnitude one per column of the weight?"""
        rows, columns = rows_of(module), columns_of(module)
        if rows is None or columns is None:
            raise refuse(module, "its shape does not tell the axis of its magnitude")
        setting = Setting(convention=self.convention)
        return dora.is_by_column(module, tuple(module.factors["magnitude"].shape), (rows, columns), setting)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def written(self, file: str, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> Written:
        """Return the file, with what was done for it."""
        return Written(file=file, tensors=tensors, metadata=metadata, notes=self.finish(), errors=self.errors)

    def finish(self) -> tuple[str, ...]:
        """Return the notes, one per kind of conversion."""
        counted = [f"{text} ({count} module{'s' if count > 1 else ''})" for text, count in self._conversions.items()]
        if self.errors:
            path = max(self.errors, key=lambda each: self.errors[each])
            counted.append(f"largest relative error {self.errors[path]:.1e}, in {path}")
        return (*self.notes, *counted)

    def _add_error(self, path: str, error: float) -> None:
        # Rounding to the last bits of 32 is what every computation with the factors does anyway.
        if error > _FLOAT32:
            self.errors[path] = max(error, self.errors.get(path, 0.0))

    def count(self, text: str) -> None:
        """Note that something was done to a module."""
        self._conversions[text] = self._conversions.get(text, 0) + 1


def require(placed: Placed, suffixes: Mapping[str, str], where: str) -> None:
    """Raise InexpressibleError unless the target has a name for every factor."""
    module = placed.module
    lacking = sorted(module.factors.keys() - suffixes.keys())
    if lacking or not suffixes:
        raise InexpressibleError(
            f"{where} has no name for {', '.join(lacking)} of {module.path!r} ({module.family})",
            where=module.path,
            hint="ckpt merge-lora applies every family to the base itself",
        )


def _conv_shape(module: Module) -> Shape | None:
    """Return (out, in, k, k) of a convolution's weight where its factors are flat and do not show it, else None."""
    size = next((size for pattern, size in _KERNELS if re.fullmatch(pattern, module.path)), None)
    shape = shape_of(module)
    is_flat = all(len(each) <= 2 for each in module.shapes.values())
    if size is None or shape is None or len(shape) != 2 or not is_flat or shape[1] % (size * size):
        return None
    return shape[0], shape[1] // (size * size), size, size
