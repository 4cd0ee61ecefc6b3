"""What must be known beside a module to compute its change, and the weight as a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_tools.adapters.adapter import Convention, Shape, Sourced
from ckpt_tools.errors import UsageError


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


def geometry(shape: Shape, num_experts: int = 1) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix; a vector is one column."""
    lead = 2 if num_experts > 1 else 1
    return math.prod(shape[:lead]), math.prod(shape[lead:])
