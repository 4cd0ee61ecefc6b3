"""Which modules an exception went through, by which methods, and how they were entered."""

from __future__ import annotations

import ast
import linecache
import operator
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType, TracebackType
from typing import Any, cast

import torch
from torch import nn

from ckpt_tools.fsdp2.internals import is_wrapped_method

_TORCH = os.path.dirname(torch.__file__)
_OWN = os.path.dirname(__file__)
_PYTHON = os.path.dirname(os.__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLine:
    """One line of a traceback, outermost first."""

    frame: FrameType
    number: int  # Line that runs, or raised
    lasti: int  # Instruction that runs, in bytes of code

    @property
    def code(self) -> CodeType:
        """What runs."""
        return self.frame.f_code

    @property
    def file(self) -> str:
        """Its file."""
        return self.frame.f_code.co_filename

    @property
    def is_library(self) -> bool:
        """Is it PyTorch's, Python's, or ours?"""
        of_python = self.file.startswith(_PYTHON) and "-packages" not in self.file
        return of_python or self.file.startswith((_TORCH, _OWN))

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        return f"{os.path.basename(self.file)}:{self.number} in {self.code.co_name}{': ' if text else ''}{text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodCall:
    """A method of a module that was running."""

    module: nn.Module
    method: str
    line: StackLine
    caller: StackLine | None  # The nearest line outside of PyTorch that led to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What was running when an exception was raised."""

    lines: tuple[StackLine, ...]  # Outermost first
    calls: tuple[MethodCall, ...]  # Methods of modules among them
    entered: tuple[nn.Module, ...]  # Modules whose hooks ran: called as `module(...)` or through a registered method

    @property
    def site(self) -> str:
        """The innermost line outside of PyTorch, the one to look at; in a package, also the user's that led there."""
        outside = [line for line in reversed(self.lines) if not line.is_library]
        own = next((line for line in outside if "-packages" not in line.file), None)
        if not outside or own is None or own is outside[0]:
            return str(outside[0]) if outside else ""
        return f"{outside[0]}, from {own}"

    def passes(self, *functions: str) -> bool:
        """Is one of these functions running?"""
        return any(line.code.co_name in functions for line in self.lines)


def read_stack(error: BaseException) -> Stack:
    """Return the stack of an exception, from the caller of whoever caught it down to where it was raised."""
    lines = tuple(_lines(error.__traceback__))
    calls: list[MethodCall] = []
    entered: list[nn.Module] = []
    outside: StackLine | None = None
    for line in lines:
        subject = _first_argument(line.frame)
        if isinstance(subject, nn.Module):
            if _is_entry(line):
                entered.append(subject)
            elif (not line.is_library or line.code.co_name == "forward") and _is_method(subject, line.code):
                calls.append(MethodCall(module=subject, method=line.code.co_name, line=line, caller=outside))
        if not line.is_library:
            outside = line
    return Stack(lines=lines, calls=tuple(calls), entered=tuple(entered))


def _lines(trace: TracebackType | None) -> Iterator[StackLine]:
    if trace is None:
        return
    outer = []
    frame = trace.tb_frame.f_back
    while frame is not None:
        outer.append(StackLine(frame=frame, number=frame.f_lineno or 0, lasti=frame.f_lasti))
        frame = frame.f_back
    yield from reversed(outer)
    while trace is not None:
        yield StackLine(frame=trace.tb_frame, number=trace.tb_lineno or 0, lasti=trace.tb_lasti)
        trace = trace.tb_next


def _first_argument(frame: FrameType) -> object:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if frame.f_code.co_argcount and names else None


def _is_entry(line: StackLine) -> bool:
    """Is this code what runs a module's hooks?"""
    name = line.code.co_name
    if is_wrapped_method(name, line.file):
        return True
    return name == "_call_impl" and line.file.endswith(os.path.join("nn", "modules", "module.py"))


def _is_method(module: nn.Module, code: CodeType) -> bool:
    """Is `code` a method of the module, rather than a function or a decorator that was given it?"""
    name = code.co_name
    for holder in (module, *type(module).__mro__):
        value = vars(holder).get(name)
        while value is not None:
            value = getattr(value, "__func__", value)
            if getattr(value, "__code__", None) is code:
                return True
            value = getattr(value, "__wrapped__", None)
    return False


def named_tensors(line: StackLine) -> Iterator[torch.Tensor]:
    """Yield the tensors that the failing expression of a line names: `self.other.weight`, not what calls return."""
    expression = _expression(line)
    if expression is None:
        return
    for node in ast.walk(expression):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            value = _look_up(node, line.frame)
            if isinstance(value, torch.Tensor):
                yield value


def written_tensor(line: StackLine) -> torch.Tensor | None:
    """Return what a failing line writes in place: `average` in `average.mul_(d).add_(w)`, `w` in `w[0] = x`."""
    for node in ast.walk(_expression(line) or ast.Pass()):
        written: list[ast.AST] = [node.target] if isinstance(node, ast.AugAssign) else []
        if isinstance(node, ast.Assign):
            written = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
        for target in written:
            if isinstance(value := _look_up(target, line.frame), torch.Tensor):
                return value
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if not name.endswith("_") or name.endswith("__"):
            continue
        owner: ast.AST = node
        while isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute):
            owner = owner.func.value
        value = _look_up(owner, line.frame)
        if name.startswith("_foreach_") and isinstance(node, ast.Call) and node.args:
            value = _look_up(node.args[0], line.frame)
            value = value[0] if isinstance(value, list | tuple) and value else None
        if isinstance(value, torch.Tensor):
            return value
    return None


def _expression(line: StackLine) -> ast.AST | None:
    position = next(islice(line.code.co_positions(), line.lasti // 2, None), None)
    if position is None or None in position[:2]:
        return None
    first, last = position[0] or 0, position[1] or 0
    text = "".join(linecache.getline(line.file, number) for number in range(first, last + 1))
    for attempt in (textwrap.dedent(text), textwrap.dedent(text).rstrip().rstrip(":") + ": pass"):
        try:
            tree = ast.parse(attempt)
        except (SyntaxError, ValueError):
            continue
        return tree
    return None


def _look_up(node: ast.AST, frame: FrameType) -> object:
    """Return what names, attributes and constant subscripts stand for; None for any other expression."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    try:
        if isinstance(node, ast.Attribute):
            owner = _look_up(node.value, frame)
            return None if owner is None else getattr(owner, node.attr, None)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = _look_up(node.value, frame)
            # Containers only: another object's __getitem__ is a call.
            if isinstance(owner, list | tuple | dict | nn.ModuleList | nn.ModuleDict | nn.Sequential):
                return cast("object", operator.getitem(cast("Any", owner), node.slice.value))
    except (LookupError, TypeError, ValueError, RuntimeError):
        return None
    return None
