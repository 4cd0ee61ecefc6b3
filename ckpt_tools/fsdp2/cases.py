"""What is known about one exception: its stack, the model, what a watch saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.fsdp2.catalogue import CATALOGUE
from ckpt_tools.fsdp2.internals import Group, read_groups, shown
from ckpt_tools.fsdp2.stacks import Stack, read_stack
from ckpt_tools.fsdp2.watch import Watch, last_watch

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why something failed."""

    id: str
    """Row of the catalogue; "unknown" when it is none of them."""
    cause: str
    """What happened, with the names concerned."""
    fix: str
    module: str
    """FQN of the module or parameter concerned; "" when no one knows."""
    call: str
    """File, line and code of the call to look at; "" when no one knows."""

    def to_finding(self) -> Finding:
        """Return it as an error for a report."""
        where = self.module or self.call or "?"
        at = f" (at {self.call})" if self.call and self.module else ""
        return Finding.error(code=self.id, where=where, what=f"{self.cause}{at}", hint=self.fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that is known about one exception."""

    error: BaseException
    text: str
    phase: str
    model: nn.Module | None
    stack: Stack
    seen: Watch | None

    def name(self, module: nn.Module) -> str:
        """FQN of a module, or its class when it is in no known model."""
        if self.model is not None:
            for fqn, each in self.model.named_modules():
                if each is module:
                    return shown(fqn)
        return type(module).__name__.removeprefix("FSDP").removeprefix("Replicate")

    def groups(self) -> tuple[Group, ...]:
        """Return the model's parameter groups."""
        return () if self.model is None else read_groups(self.model)

    def build(self, code: str, module: str = "", cause: str = "", call: str | None = None) -> Diagnosis:
        """Return a diagnosis; cause and call are the catalogue's and the stack's unless given."""
        entry = CATALOGUE[code]
        return Diagnosis(
            id=code,
            cause=cause or entry.cause,
            fix=entry.fix,
            module=module,
            call=self.stack.site if call is None else call,
        )

    def audited(self, *codes: str) -> Diagnosis | None:
        """Return the first finding with one of these codes that an audit of the model has now."""
        if self.model is None:
            return None
        optimizer = next(locals_of(self.stack, torch.optim.Optimizer), None)
        for finding in audit(self.model, phase="loaded", optimizer=optimizer):
            if finding.code in codes:
                return self.build(finding.code, finding.where, finding.what)
        return None

    def watched(self, code: str, where: str | None = None) -> Diagnosis | None:
        """Return the first finding with this code (there) that the watch has."""
        for finding in () if self.seen is None else self.seen.findings:
            if finding.code == code and where in (None, finding.where):
                return self.build(code, finding.where, finding.what)
        return None


def open_case(error: BaseException, model: nn.Module | None, phase: str) -> Case:
    """Gather it; without a model, the outermost one in the traceback, or one with FSDP units among local variables."""
    stack = read_stack(error)
    if model is None:
        modules = [call.module for call in stack.calls]
        model = next(iter([*stack.entered[:1], *modules[:1]]), None)
        if model is not None and modules and any(module is model for module in modules[0].modules()):
            model = modules[0]
        if model is None:
            models = locals_of(stack, nn.Module)
            model = next((each for each in models if any(isinstance(m, FSDPModule) for m in each.modules())), None)
    seen = last_watch(model)
    return Case(error=error, text=str(error), phase=phase, model=model, stack=stack, seen=seen)


def locals_of(stack: Stack, kind: type[_T]) -> Iterator[_T]:
    """Yield the local variables of one type, innermost first."""
    for line in reversed(stack.lines):
        for value in line.frame.f_locals.values():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, kind):
                    yield each
