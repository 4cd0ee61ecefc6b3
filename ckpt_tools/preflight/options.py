"""What `ckpt preflight` is asked. Importing this imports no pydantic."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.options import Doc
from ckpt_tools.options.preflight import PreflightFields
from ckpt_tools.preflight.places import Place
from ckpt_tools.units import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions(PreflightFields):
    """The options of `preflight`, who is told of its progress, and what follows from them."""

    on_check: Annotated[
        Callable[[str, str], None] | None,
        Doc('Called when a check begins and ends, with its name and "begun", "done" or "failed".'),
    ] = None
    on_findings: Annotated[
        Callable[[tuple[Finding, ...]], None] | None,
        Doc("Called with new findings as soon as they are known, before the slow checks begin; each finding once."),
    ] = None
    on_places: Annotated[
        Callable[[Mapping[Finding, Place]], None] | None,
        Doc("Called once, at the beginning, with a mapping that fills: finding → the line that it points at."),
    ] = None

    @property
    def configs(self) -> tuple[str, ...]:
        """The files."""
        given = (self.config,) if isinstance(self.config, str | os.PathLike) else self.config
        return tuple(os.fspath(path) for path in given)

    def why_skipped(self, check: str) -> str:
        """Return the option that leaves a check out; "" where it is to be made."""
        if self.only and check not in self.only:
            return " ".join(f"--only {name}" for name in self.only)
        if self.host and check in ("memory", "checkpoint", "smoke"):
            return "--host"
        left_out = {"smoke": not self.smoke, "memory": not self.memory}.get(check, False)
        return f"--no-{check}" if left_out else ""

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of a device."""
        return None if self.gpu_memory is None else parse_size(self.gpu_memory)
