"""What reading a config gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.places import ConfigLocation
from ckpt_tools.preflight.plain_values import find_value
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.results import as_json
from ckpt_tools.text import escape_name, first_few

_MAX_SHOWN = 6
_ALWAYS_KNOWN = frozenset({"framework", "keys"})


_ARGUMENTS = re.compile(r"\$([@*0-9]|\{[@*0-9][^}]*\})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much of a config is understood."""

    read: int = 0
    understood: int = 0
    """Those that are used, and those of which it is known that nothing here depends on them."""
    passed_over: int = 0
    """Those in parts of the config that are not looked at: a critic, a rollout, a plugin."""
    unknown: tuple[str, ...] = ()
    deciding: tuple[str, ...] = ()
    """Those of them that by their name decide memory or sharding."""
    num_foreign: int = 0
    """Values below unknown names that resemble none of the framework's: these make it somebody else's config."""
    unread: tuple[str, ...] = ()
    """Key paths whose values are not in the file, on which something depends."""
    words: tuple[str, ...] = ()
    """Words of a command line that stand for nobody knows which options: `$@`, `$EXTRA`, `"${ARGS[@]}"`."""
    variables: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Is enough known that this is the framework's config at all?"""
        return (
            self.understood + len(self.unread) > 0
            and self.num_foreign * 2 <= self.read - self.passed_over - self.num_foreign
        )

    def without_unread(self, paths: Container[str | None]) -> Options:
        """Return the account with some options as understood whose values are not in the file."""
        unread = tuple(path for path in self.unread if path not in paths)
        return replace(self, unread=unread, understood=self.understood + len(self.unread) - len(unread))

    def added_to(self, other: Options) -> Options:
        """Return the account of two configs of one run."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        return Options(**sums)

    def to_json(self) -> dict[str, object]:
        """Return the part of the report."""
        return as_json(self, "read understood passed_over unknown") | {"unread": [*self.unread, *self.words]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A trainer's config that was read: what it asks for, how much of it is understood, and what is wrong with it."""

    framework: Framework
    path: str
    values: Mapping[str, object]
    """The file as nested plain values, in the user's own spelling. Options of a command line: name → text, True for a
    switch, a list for several words."""
    spec: ParallelSpec
    options: Options
    world_keys: tuple[str, ...] = ()
    contents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    files: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()  # Scripts that would say a part of it, and are not here
    place: Callable[[str], ConfigLocation | None] = lambda _: None
    companions: tuple[Config, ...] = ()
    """Other configs of the same run, which all say together what `spec` has: the arguments below a launcher's."""

    @property
    def unread(self) -> frozenset[str]:
        """Key paths whose values are not in the file, on which something depends."""
        return frozenset(path.removeprefix("--") for path in self.options.unread)

    @property
    def hides_options(self) -> bool:
        """May an option that is not in `values` be set all the same? Arguments of the script itself do not count."""
        return any(_ARGUMENTS.fullmatch(word) is None for word in self.options.words)

    @property
    def unread_fields(self) -> frozenset[str]:
        """Fields of the spec that depend on those; all, where it is not known which."""
        unread = set(self.options.unread)
        found = {name for name, path in self.spec.keys.items() if path in unread}
        found |= {"world_size"} if unread.intersection(self.world_keys) else set()
        if self.hides_options or unread - {*self.world_keys, *(self.spec.keys.get(name, "") for name in found)}:
            return frozenset(ParallelSpec.__slots__) - _ALWAYS_KNOWN
        fields = {name.partition(".")[0] for name in found}
        return frozenset(fields | ({"mesh", "strategy"} if fields & {"axes", "world_size"} else set()))

    @property
    def why_not(self) -> str:
        """Why nothing can be proven of it: too little of it is read. Empty where it is."""
        options = self.options
        if not options.is_known:
            known, named = options.understood, options.read - options.passed_over
            if named == 0:
                return f"it contains no option of {self.framework}"
            return f"{self.framework} knows {known} of its {named} options: it may be another trainer's config"
        reasons = []
        if self.spec.engine == "other":
            reasons.append(f"{self._engine()} is an engine that preflight does not support")
        if options.unread:
            reasons.append(f"values that are not in the file: {_list(options.unread)}")
        if options.deciding:
            reasons.append(f"unknown options that may affect memory or sharding: {_list(options.deciding)}")
        if options.words:
            reasons.append(f"words that may expand to any option: {_list(options.words)}")
        if any(finding.code == "several-commands" for finding in self.findings):
            reasons.append("more than one trainer is started, but only the first one was read")
        return "; ".join(reasons)

    def _engine(self) -> str:
        """Return the key that names the engine, and its value."""
        key = self.spec.keys.get("engine")
        node = None if key is None else find_value(self.values, key)
        return f"{key} is {escape_name(node)}, which" if key is not None and isinstance(node, str) else "what it starts"


def _list(names: tuple[str, ...]) -> str:
    return first_few(dict.fromkeys(names), _MAX_SHOWN)
