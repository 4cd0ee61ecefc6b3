"""Functions of a shell script: their bodies as tokens, to be taken when they are called."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from ckpt_tools.preflight.configs.shell import Token

ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<rest>\[[^]]*\])?(?P<plus>\+?)=")
PREFIXES = frozenset({"then", "else", "elif", "do", "!", "time"})
"""Words before a command."""


@dataclass(slots=True)
class Function:
    """One that is defined."""

    tokens: list[Token] = field(default_factory=list)
    is_certain: bool = True
    """Is it defined on every way through the script?"""
    was_called: bool = False


@dataclass(slots=True)
class Recording:
    """The body of a function, while it is read."""

    name: str
    tokens: list[Token] = field(default_factory=list)
    opening: str = ""
    depth: int = 0
    is_start: bool = True
    """Does a command begin here?"""

    def take(self, token: Token) -> bool:
        """Take a token; True at the end of the body."""
        word = literal(token) if token.kind == "word" else token.text if token.kind == "operator" else None
        if not self.opening:
            if token.kind == "newline" or word == ")":
                return False
            if word not in ("{", "("):
                raise ValueError(f"the function {self.name} has no braces")
            self.opening = word
        if self.opening == "(" and word == "case":
            raise ValueError(f"a case in the subshell {self.name}")
        counts = self.is_start or self.opening == "("
        closing = "}" if self.opening == "{" else ")"
        self.depth += (counts and word == self.opening) - (counts and word == closing)
        self.is_start = token.kind != "word" or word in PREFIXES or word in ("{", "}", "if", "while", "until")
        self.tokens.append(token)
        return self.depth == 0


def assigned_in(functions: Iterable[Function]) -> set[str]:
    """Return the variables that functions assign, whenever they are called."""
    names: set[str] = set()
    for token in chain.from_iterable(one.tokens for one in functions):
        if token.kind == "array":
            names.add(token.text)
        elif is_assignment(token) and (found := ASSIGNMENT.match(token.word[0].text)) is not None:
            names.add(found["name"])
    return names


def literal(token: Token) -> str | None:
    """Return a word that is written without quotes and expansions."""
    if token.kind != "word" or any(piece.is_quoted or piece.is_expansion for piece in token.word):
        return None
    return "".join(piece.text for piece in token.word)


def is_assignment(token: Token) -> bool:
    """Does a token assign something: `name=…`, `name=( … )`?"""
    if token.kind == "array":
        return True
    first = token.word[0] if token.word else None
    return (
        first is not None
        and not first.is_quoted
        and not first.is_expansion
        and ASSIGNMENT.match(first.text) is not None
    )
