"""What a rule is: a pure function from a config and the facts of its model to what is wrong with them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast, get_args

from ckpt_tools.checkpoint.entries import Finding, Severity
from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.model_facts import ModelFacts
from ckpt_tools.preflight.plain_values import as_truth, find_value, is_variable
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.text import escape_name

if TYPE_CHECKING:
    from ckpt_tools.preflight.configs.config import Config

ALL: tuple[Framework, ...] = get_args(Framework)
AI_PROCESS = "config.process[0]"  # ai-toolkit's first process, the one that is checked


class NotKnownError(Exception):
    """A check asks for an option whose value is not in the file: nobody knows whether the config breaks the rule."""


class _Known:
    """A spec that stops the check which asks for a field that is not known."""

    def __init__(self, spec: ParallelSpec, unread: frozenset[str]) -> None:
        self._spec = spec
        self._unread = unread

    def __getattr__(self, name: str) -> object:
        if name in self._unread:
            raise NotKnownError(name)
        return getattr(self._spec, name)


_MAX_DIGITS = 18  # digits of a number that is written as text


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """One option as the file says it, under its key path in the user's spelling."""

    key: str
    value: object

    @property
    def is_on(self) -> bool:
        """Does it switch something on? Text counts as the trainers count it: true, yes, on, 1."""
        if isinstance(self.value, str):
            return as_truth(self.value) is True
        return self.value is True or (type(self.value) is int and self.value != 0)

    @property
    def is_off(self) -> bool:
        """Does it switch something off in so many words? None and unknown text are neither."""
        if isinstance(self.value, str):
            return as_truth(self.value) is False
        return self.value is False or (type(self.value) is int and self.value == 0)

    @property
    def count(self) -> int | None:
        """The value as a whole number, which may be written as text; None for anything else."""
        if type(self.value) is int:
            return self.value
        digits = self.value.strip() if isinstance(self.value, str) else ""
        return int(digits) if len(digits) <= _MAX_DIGITS and digits.removeprefix("-").isdecimal() else None

    @property
    def number(self) -> float | None:
        """The value as a finite number, which may be written as text; None for anything else."""
        if isinstance(self.value, (int, float, str)) and not isinstance(self.value, bool):
            with suppress(ValueError, OverflowError):
                number = float(self.value)
                return number if math.isfinite(number) else None
        return None

    @property
    def text(self) -> str:
        """The value as text, for comparisons."""
        return str(self.value).strip()

    def __str__(self) -> str:
        """`key: value`, as it can be shown."""
        return f"{self.key}: {shown(self.value)}"


@dataclass(frozen=True, slots=True)
class Violation:
    """One place where a config breaks a rule: its key path, what is wrong there, and what to write instead."""

    key: str
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a check looks at: a config, and what is known of the model."""

    config: Config
    facts: ModelFacts

    @property
    def spec(self) -> ParallelSpec:
        """What the config asks for."""
        unread = self.config.unread_fields
        return cast("ParallelSpec", _Known(self.config.spec, unread)) if unread else self.config.spec

    @property
    def framework(self) -> Framework:
        """Whose options it has: LLaMA-Factory's are Trainer's and more."""
        return _options_of(self.config)

    @property
    def is_fsdp2(self) -> bool:
        """Is the model wrapped by `fully_shard`?"""
        return self.spec.engine == "fsdp2"

    @property
    def is_fsdp(self) -> bool:
        """Is it wrapped by FSDP of either version?"""
        return self.spec.engine in ("fsdp1", "fsdp2")

    def key(self, field: str, default: str | None = None) -> str:
        """Return the key path that set `field` of the spec; without one `default`, or the field's own name."""
        return self.spec.keys.get(field) or default or field

    def axis_key(self, axis: str) -> str:
        """Return the key path that set an axis."""
        return self.spec.keys.get(f"axes.{axis}") or self.spec.keys.get(axis) or axis

    def on_axis(self, axis: str, what: str, size: str) -> Violation:
        """Return what is wrong with an axis, and the size that it should have."""
        key = self.axis_key(axis)
        return Violation(key, what, f"{key}: {size}")

    def axis(self, name: str) -> int:
        """Return the size of a mesh axis, 1 where the config has none; -1 only where the rest is not known."""
        size = self.spec.axes.get(name, 1)
        if size == -1 and self.spec.mesh is not None:
            return dict(self.spec.mesh.axes).get(name, 1)
        return size

    def count(self, path: str, default: int = 1) -> int:
        """Return the whole number at a dotted path, or `default` where there is none."""
        found = self.get(path)
        return default if found is None or found.count is None else found.count

    @property
    def shard_ranks(self) -> int:
        """Ranks that FSDP shards over: dp_shard, and cp where its ranks shard too. 1 where it is not known."""
        shard = self.axis("dp_shard")
        return max(shard, 1) * max(self.axis("cp"), 1)

    def get(self, path: str) -> Stated | None:
        """Return the option at a dotted path, or None (absent, null); raise NotKnownError if its value is elsewhere."""
        found = look_up(self.config.values, path) or self._in_named_file(path)
        is_hidden = self.config.hides_options if found is None else is_variable(found.value)
        if path in self.config.unread or is_hidden:
            raise NotKnownError(path)
        return found

    def _in_named_file(self, path: str) -> Stated | None:
        """Return an option of a file that the config names: of `deepspeed.x` the x in the file of `deepspeed`."""
        for option, content in self.config.contents.items():
            inner = look_up(content, path.removeprefix(f"{option}.")) if path.startswith(f"{option}.") else None
            if inner is not None:
                return Stated(key=path, value=inner.value)
        return None

    def first(self, *paths: str) -> Stated | None:
        """Return the first of `paths` that the file has."""
        return next((found for path in paths if (found := self.get(path)) is not None), None)

    def option(self, *names: str) -> Stated | None:
        """Return an option by its names of all releases, under the key that the user sees."""
        found = self.first(*names)
        dashes = "--" if self.framework == "openrlhf" else ""
        return None if found is None else Stated(key=dashes + found.key, value=found.value)

    def written(self, key: str, value: object) -> str:
        """Return an option as it is to be written, with a value."""
        return f"{key}{' ' if self.framework == 'openrlhf' else ': '}{value}"

    def whole(self, *names: str) -> int | None:
        """Return the whole number that an option says; None where it says none."""
        found = self.option(*names)
        return None if found is None else found.count

    def is_on(self, *names: str) -> bool:
        """Does the file switch an option on?"""
        return enabled(self.first(*names)) is not None

    def fsdp_option(self, name: str) -> Stated | None:
        """Return an option of `fsdp_config`, whose keys are taken with and without `fsdp_`."""
        return self.first(f"fsdp_config.fsdp_{name}", f"fsdp_config.{name}")

    def fsdp_key(self, name: str) -> str:
        """Return an option's key in the way the file spells its others."""
        section = self.get("fsdp_config")
        names = list(section.value) if section is not None and isinstance(section.value, Mapping) else []
        prefixed = any(str(one).startswith("fsdp_") for one in names) or (self.framework == "accelerate" and not names)
        return f"fsdp_config.{'fsdp_' if prefixed else ''}{name}"

    def ai_option(self, path: str) -> Stated | None:
        """Return an option of ai-toolkit's first process (`train.dist_mode`)."""
        return self.get(f"{AI_PROCESS}.{path}")


def enabled(found: Stated | None) -> Stated | None:
    """Return an option if it switches something on."""
    return found if found is not None and found.is_on else None


def _options_of(config: Config) -> Framework:
    """Return whose options a config has; those of LLaMA-Factory's v1, which names the `model`, are its own."""
    is_trainers = config.framework == "llamafactory" and "model" not in config.values
    return "trainer" if is_trainers else config.framework


Check = Callable[[Subject], Iterator[Violation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRule:
    """One thing that can be wrong with configs of some frameworks, what would happen, and what to change."""

    id: str  # CKPT0xx; never changed, never given to another rule
    severity: Severity
    title: str
    why: str
    fix: str
    frameworks: tuple[Framework, ...]
    check: Check

    def is_for(self, config: Config) -> bool:
        """Is it about configs of this framework?"""
        return config.framework in self.frameworks or _options_of(config) in self.frameworks


_HEADING = re.compile(r"(?P<id>CKPT\d{3})(?: \((?P<frameworks>.+?)\))?: (?P<title>.+)")


def _rule(
    severity: Severity, heading: str, *, why: str, fix: str, frameworks: tuple[Framework, ...] = ALL
) -> Callable[[Check], ConfigRule]:
    """Make a rule of the check below it; its heading is `ID (trainers): title`, or `ID: title` of a rule for all."""
    match = _HEADING.fullmatch(heading)
    if match is None:
        raise ValueError(f"not a heading: {heading}")  # the rules are our own, and importing them reads all
    if match["frameworks"]:
        frameworks = cast("tuple[Framework, ...]", tuple(match["frameworks"].split(", ")))
    made = partial(ConfigRule, id=match["id"], severity=severity, title=match["title"], why=why, fix=fix)
    return lambda check: made(frameworks=frameworks, check=check)


error_rule = partial(_rule, "error")  # Decorator: the run fails, or trains something else
warning_rule = partial(_rule, "warning")  # Decorator: it runs, but differently from what one may think


def apply(rules: tuple[ConfigRule, ...], case: Subject) -> tuple[Finding, ...]:
    """Return what `case` breaks, in the order of the rules, each place once; what is not known breaks none."""
    findings: dict[tuple[str, str, str], Finding] = {}
    for one in rules:
        with suppress(NotKnownError):
            for found in one.check(case) if one.is_for(case.config) else ():
                finding = Finding(code=one.id, severity=one.severity, where=found.key, what=found.what, hint=found.fix)
                findings.setdefault((one.id, finding.where, finding.what), finding)
    return tuple(findings.values())


def look_up(values: Mapping[str, object], path: str) -> Stated | None:
    """Return the option at a key path, or None where there is none or null."""
    found = find_value(values, path)
    return None if found is None else Stated(key=path, value=found)


def shown(value: object) -> str:
    """Return a value of a config as it can be shown."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return escape_name(value) if value else '""'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(item) for item in value[:8]) + ("…" if len(value) > 8 else "") + "]"
    return escape_name(str(value))
