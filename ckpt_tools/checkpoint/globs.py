"""Patterns on FQNs.

`*` stays inside one dotted component, `**` crosses, `?` is one character but a dot, `{a,b}` alternates.
Everything else is literal, brackets and backslashes included: FQNs hold neither, and a pattern that a shell
would understand differently should not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from ckpt_tools.errors import UsageError

MAX_ALTERNATIVES = 4096  # Patterns that one pattern with braces may stand for

Names = Mapping[str, Collection[str]]  # Tensor → every name that it is shown under, on either side
_ANY_PATH = re.compile(r"\*{2,}")


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """Return the regular expression that `pattern` stands for; use its `fullmatch` on FQNs."""
    # Matching takes at most O(n²) steps per alternative for an FQN of n characters, however many stars the pattern has:
    # FQNs come from files that nobody vouches for.
    alternatives = dict.fromkeys(expand_braces(pattern))
    return re.compile("|".join(map(_translate, alternatives)), re.DOTALL)


_Node = dict[str | None, Any]  # Component → node; None → (name, key) of the names that end here


class NameIndex:
    """Names by their components: a pattern is looked up where it can match, not among all names."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._root: _Node = {}
        for key, own in names.items():
            for name in own:
                node = self._root
                for component in name.split("."):
                    node = node.setdefault(component, {})
                node.setdefault(None, []).append((name, key))

    @cached_property
    def own(self) -> NameIndex:
        """The keys alone, by their own names."""
        return NameIndex({key: (key,) for key in self.names})

    def find(self, pattern: str, *, modules: bool = False) -> set[str]:
        """Return the keys of what `pattern` matches, with `modules` also of what lies directly in a module of it."""
        found: set[str] = set()
        for alternative in dict.fromkeys(expand_braces(pattern)):
            head, crosses, _ = alternative.partition("**")
            nodes = [self._root]
            for component in head.split(".")[: -1 if crosses else None]:
                nodes = [child for node in nodes for child in _children(node, component)]
            if crosses:
                matches = re.compile(_translate(alternative), re.DOTALL).fullmatch
                ends = (end for node in nodes for end in _below(node))
                found |= {key for name, key in ends if matches(name) or (modules and matches(name.rpartition(".")[0]))}
            else:
                nodes += [child for node in nodes for part, child in node.items() if part is not None] * modules
                found |= {key for node in nodes for _, key in node.get(None, ())}
        return found


def _children(node: _Node, component: str) -> list[_Node]:
    if "*" not in component and "?" not in component:
        return [node[component]] if component in node else []
    matches = re.compile(_translate_component(component, open_end=False), re.DOTALL).fullmatch
    return [child for part, child in node.items() if part is not None and matches(part)]


def _below(node: _Node) -> Iterator[tuple[str, str]]:
    pending = [node]
    while pending:
        for part, child in pending.pop().items():
            if part is None:
                yield from child
            else:
                pending.append(child)


def find_named(
    what: str,
    pattern: str,
    names: Names | NameIndex,
    where: str | None = None,
    hint: str = "",
    kind: str = "tensor",
    *,
    modules: bool = False,
) -> set[str]:
    """Return the keys of what `pattern` matches by any name; `what` is the option, or the rule, that brought it."""
    index = names if isinstance(names, NameIndex) else NameIndex(names)
    if found := index.find(pattern, modules=modules):
        return found
    every = list(dict.fromkeys(name for own in index.names.values() for name in own))
    raise UsageError(f"{what} matches no {kind}", where=where, hint=hint or nearest_names(pattern, every))


def choose_names(names: Names, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    """Return the keys of what some `include` glob matches (all, without one), and no `exclude`: at least one."""
    index = NameIndex(names if include or exclude else {})
    kept = set().union(*(find_named(f"--include {glob}", glob, index) for glob in include)) if include else {*names}
    kept -= set().union(*(find_named(f"--exclude {glob}", glob, index) for glob in exclude))
    if (include or exclude) and not kept:
        given = " and ".join(["--include"] * bool(include) + ["--exclude"] * bool(exclude))
        what = f"{given} leave{'' if ' ' in given else 's'} nothing"
        raise UsageError(what, hint="* stays inside one dotted component, ** crosses dots")
    return kept


def nearest_names(pattern: str, fqns: Sequence[str]) -> str:
    """Return a hint with the FQNs that look most like `pattern`."""
    if not fqns:
        return "the checkpoint has no tensors"
    # Layers look alike: compare with one of each kind.
    kinds = {re.sub(r"\d+", "*", fqn): fqn for fqn in reversed(fqns)}
    # What `**` stands for says nothing: compare what the pattern spells out with as many components of the names.
    spelled = (pattern.rpartition("**")[2] or pattern.strip("*")).strip(".")
    count = len(spelled.split("."))
    tails: dict[str, str] = {}
    for kind, fqn in kinds.items():
        tails.setdefault(".".join(kind.split(".")[-count:]) if "**" in pattern else kind, fqn)
    near = difflib.get_close_matches(spelled if "**" in pattern else pattern, tails, n=3, cutoff=0.0)
    return f"the nearest names are {', '.join(tails[tail] for tail in near)}"


def expand_braces(pattern: str) -> list[str]:
    """Return the patterns without braces that `pattern` stands for; braces may nest."""
    # One frame per open brace: the finished alternatives, and what the running one stands for so far.
    frames: list[tuple[list[str], list[str]]] = [([], [""])]
    for char in pattern:
        done, running = frames[-1]
        if char == "{":
            frames.append(([], [""]))
        elif char == "," and len(frames) > 1:
            frames[-1] = (done + running, [""])
        elif char == "}":
            if len(frames) == 1:
                raise _unbalanced(pattern, "}")
            frames.pop()
            finished, prefixes = frames[-1]
            inner = done + running
            if len(prefixes) * len(inner) > MAX_ALTERNATIVES:
                what = f"the braces of {pattern!r} stand for more than {MAX_ALTERNATIVES} patterns"
                raise UsageError(what, hint="use * or several rules")
            frames[-1] = (finished, [prefix + part for prefix in prefixes for part in inner])
        else:
            frames[-1] = (done, [text + char for text in running])
    if len(frames) > 1:
        raise _unbalanced(pattern, "{")
    return frames[0][1]


def _unbalanced(pattern: str, brace: str) -> UsageError:
    what = f"the pattern {pattern!r} has a {brace!r} without its counterpart"
    return UsageError(what, hint="write {a,b} for alternatives, and quote the pattern in the shell")


def _translate(pattern: str) -> str:
    """Return the regular expression of a pattern without braces."""
    # Between two `**` only the earliest end of what stands there matters, since the second `**` takes anything that
    # follows. A lazy match finds it first, so the group can be atomic and is never tried again. Without that, k stars
    # take O(n^k) steps on a name that almost matches.
    *before, last = _ANY_PATH.split(pattern)
    if not before:
        return _translate_path(last, open_end=False)
    first = _translate_path(before[0], open_end=True)
    middle = "".join(f"(?>.*?{_translate_path(part, open_end=True)})" for part in before[1:] if part)
    return f"(?>{first}){middle}.*{_translate_path(last, open_end=False)}"


def _translate_path(pattern: str, *, open_end: bool) -> str:
    """Return the regular expression of a pattern without `**`; with `open_end`, anything may follow."""
    components = pattern.split(".")
    return r"\.".join(
        _translate_component(component, open_end=open_end and i == len(components) - 1)
        for i, component in enumerate(components)
    )


def _translate_component(pattern: str, *, open_end: bool) -> str:
    """As `_translate`, one level down: `*` inside one component is what `**` is among components."""
    first, *rest = ("".join("[^.]" if char == "?" else re.escape(char) for char in part) for part in pattern.split("*"))
    if not rest:
        return first
    if open_end:
        return first + "".join(f"(?>[^.]*?{part})" for part in rest if part)
    middle = "".join(f"(?>[^.]*?{part})" for part in rest[:-1] if part)
    return f"{first}{middle}[^.]*{rest[-1]}"
