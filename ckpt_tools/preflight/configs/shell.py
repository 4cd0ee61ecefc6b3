"""A shell script → tokens: words in pieces, operators, arrays, here-documents. Nothing is expanded or executed.

Source: POSIX Shell Command Language, 2.2 (quoting), 2.3 (tokens), 2.6 (expansions as they are written) and 2.7.4
(here-documents); bash for `$'…'`, `<<<` and `name=( … )`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

MAX_WORDS = 100_000  # Words of one script
_OPERATORS = re.compile(r"\d*(<<<|<<-|<<|<>|<&|>&|>>|>\||<|>)|&>>|&>|;;&|;;|;&|&&|\|\||\|&|[;&|()]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ARRAY = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<plus>\+?)=")
_PLAIN = re.compile(r"[^\s\\'\"$`;&|()<>#]+")
_BLANK = re.compile(r"[ \t\r\f\v]+|\\\n|#[^\n]*")
"""Blanks, a continued line, a comment."""
_IN_QUOTES = re.compile(r"(?:[^\\$`\"]+|\\(?:.|\Z))+", re.DOTALL)
_OUTSIDE = re.compile(r"(?:[^\\$`]+|\\(?:.|\Z))+", re.DOTALL)
_ESCAPED = re.compile(r"\\(.?)", re.DOTALL)
_ANSI_QUOTED = re.compile(r"\$'((?:[^'\\]++|\\.)*+)'", re.DOTALL)
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True, slots=True, kw_only=True)
class WordPiece:
    """A part of a word."""

    text: str  # The text, or the expansion as it is written: `$X`, `${X:-a}`, `$(date)`
    is_expansion: bool = False
    is_quoted: bool = False
    line: int = 0


Word = tuple[WordPiece, ...]  # One word; empty quotes are one empty piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token."""

    kind: Literal["word", "operator", "newline", "array", "redirection", "heredoc"]
    text: str = ""  # Of an operator or a redirection; the name of an array
    word: Word = ()  # A word, the target of a redirection, or the body of a here-document
    items: tuple[Word, ...] = ()
    appends: bool = False


def tokenize(text: str, line: int = 1) -> Iterator[Token]:
    """Yield a script's tokens, without comments; `line` is its first line's number. Raise ValueError if malformed."""
    try:
        yield from _Lexer(text, line).tokens()
    except RecursionError:
        raise ValueError("expansions nested too deep") from None


def pieces_of(text: str) -> Word:
    """Return the pieces of text as if it stood between double quotes."""
    return _Lexer(text).quoted()


class _Lexer:
    def __init__(self, text: str, line: int = 1) -> None:
        self._text = text
        self._at = 0
        self._first = line
        self._ends = [found.start() for found in re.finditer("\n", text)]
        self._num_words = 0
        self._waiting: list[tuple[str, bool, bool]] = []
        """Here-documents that begin after this line: delimiter, is it quoted, are tabs stripped."""

    def tokens(self) -> Iterator[Token]:
        while self._at < len(self._text):
            if self._skip_blank():
                continue
            if self._text[self._at] == "\n":
                self._at += 1
                yield from self._heredocs()
                yield Token(kind="newline")
                continue
            found = _OPERATORS.match(self._text, self._at)
            if found is None:
                yield self._word_or_array()
            elif found[0] in ("<", ">") and self._text[found.end() : found.end() + 1] == "(":
                yield self._word_or_array()  # <(…) is a word
            elif found[1] is not None or found[0].startswith("&>"):
                self._at = found.end()
                yield Token(kind="redirection", text=found[0], word=self._redirection(found[1] or ""))
            else:
                self._at = found.end()
                yield Token(kind="operator", text=found[0])
        yield from self._heredocs()
        yield Token(kind="newline")

    def _skip_blank(self) -> bool:
        found = _BLANK.match(self._text, self._at)
        self._at = self._at if found is None else found.end()
        return found is not None

    @property
    def _line(self) -> int:
        return self._first + bisect_left(self._ends, self._at)

    def _redirection(self, operator: str) -> Word:
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        word = self._word() if self._at < len(self._text) and self._text[self._at] != "\n" else ()
        if operator in ("<<", "<<-"):
            delimiter = "".join(piece.text for piece in word)
            self._waiting.append((delimiter, any(piece.is_quoted for piece in word), operator == "<<-"))
        return word

    def _heredocs(self) -> Iterator[Token]:
        for delimiter, is_literal, strips in self._waiting:
            tabs, first = "\t*" if strips else "", self._line
            found = re.compile(f"^{tabs}{re.escape(delimiter)}$", re.MULTILINE).search(self._text, self._at)
            if found is None or found.start() == len(self._text):
                raise ValueError(f"the here-document {delimiter!r} has no end")
            body = self._text[self._at : max(found.start() - 1, self._at)]
            body = re.sub(r"^\t+", "", body, flags=re.MULTILINE) if strips else body
            self._at = found.end() + 1
            word = (WordPiece(text=body, line=first),) if is_literal else _Lexer(body, first).quoted()
            yield Token(kind="heredoc", word=word)
        self._waiting = []

    def _word_or_array(self) -> Token:
        found = _ARRAY.match(self._text, self._at)
        if found is None or self._text[found.end() : found.end() + 1] != "(":
            return Token(kind="word", word=self._word())
        self._at = found.end() + 1
        items: list[Word] = []
        while True:
            if self._at >= len(self._text):
                raise ValueError(f"the array {found['name']} is never closed")
            if self._skip_blank():
                continue
            if self._text[self._at] == "\n":
                self._at += 1
            elif self._text[self._at] == ")":
                self._at += 1
                return Token(kind="array", text=found["name"], items=tuple(items), appends=bool(found["plus"]))
            elif self._text[self._at] in ";&|(<>":
                raise ValueError(f"an operator in the array {found['name']}")
            else:
                items.append(self._word())

    def _word(self) -> Word:
        self._num_words += 1
        if self._num_words > MAX_WORDS:
            raise ValueError(f"more than {MAX_WORDS} words")
        text, pieces, line = self._text, [], self._line
        while self._at < len(text):
            char = text[self._at]
            plain = _PLAIN.match(text, self._at)
            if plain is not None:
                pieces.append(WordPiece(text=plain[0]))
                self._at = plain.end()
            elif char == "\\":
                if text[self._at + 1 : self._at + 2] != "\n":
                    pieces.append(WordPiece(text=text[self._at + 1 : self._at + 2], is_quoted=True))
                self._at += 2
            elif char == "'":
                end = self._find("'", self._at + 1)
                pieces.append(WordPiece(text=text[self._at + 1 : end], is_quoted=True))
                self._at = end + 1
            elif char == '"' or text.startswith('$"', self._at):
                self._at += 1 if char == '"' else 2
                pieces += self.quoted(stops_at='"') or (WordPiece(text="", is_quoted=True),)
            elif text.startswith("$'", self._at):
                pieces.append(self._ansi())
            elif char in "$`" or text.startswith(("<(", ">("), self._at):
                pieces.append(self._expansion(is_quoted=False))
            elif char == "#":
                pieces.append(WordPiece(text=char))
                self._at += 1
            else:
                break  # a blank or an operator
        return (replace(pieces[0], line=line), *pieces[1:]) if pieces else ()

    def quoted(self, stops_at: str = "") -> Word:
        """Return the pieces up to the end, or up to and with the closing quote, as double quotes treat them."""
        pieces: list[WordPiece] = []
        while self._at < len(self._text):
            if self._text[self._at] == stops_at:
                self._at += 1
                return tuple(pieces)
            found = (_IN_QUOTES if stops_at else _OUTSIDE).match(self._text, self._at)
            if found is None:
                pieces.append(self._expansion(is_quoted=True))
            else:
                pieces.append(WordPiece(text=_ESCAPED.sub(_unescaped, found[0]), is_quoted=True))
                self._at = found.end()
        if stops_at:
            raise ValueError("no closing quotation")
        return tuple(pieces)

    def _ansi(self) -> WordPiece:
        found = _ANSI_QUOTED.match(self._text, self._at)
        if found is None:
            raise ValueError("no closing quotation")
        self._at = found.end()
        return WordPiece(text=_ESCAPED.sub(lambda one: _ANSI.get(one[1], one[0]), found[1]), is_quoted=True)

    def _expansion(self, *, is_quoted: bool) -> WordPiece:
        begin = self._at
        self._at = self._end_of_expansion(begin)
        text = self._text[begin : self._at]
        return WordPiece(text=text, is_expansion=len(text) > 1, is_quoted=is_quoted)

    def _end_of_expansion(self, at: int) -> int:
        if self._text[at] == "`":
            return self._find("`", at + 1) + 1
        after = self._text[at + 1 : at + 2]
        if after == "(":
            return self._closed(at + 2, ")", "(")
        if after == "{":
            return self._closed(at + 2, "}", "{")
        name = _NAME.match(self._text, at + 1)
        if name is not None:
            return name.end()
        return at + 2 if after and after in "@*#?$!-0123456789" else at + 1

    def _closed(self, at: int, closing: str, opening: str = "") -> int:
        """Return where what was opened before `at` is closed: braces, brackets, double quotes."""
        depth = 1
        while at < len(self._text):
            char = self._text[at]
            if char == "\\":
                at += 2
            elif char == "'" and closing == ")":
                at = self._find("'", at + 1) + 1
            elif char == '"' and closing != '"':
                at = self._closed(at + 1, '"')
            elif char in "$`":
                at = self._end_of_expansion(at)
            else:
                depth += (char == opening) - (char == closing)
                at += 1
                if depth == 0:
                    return at
        raise ValueError("no closing quotation" if closing == '"' else f"no closing {closing!r}")

    def _find(self, char: str, at: int) -> int:
        found = self._text.find(char, at)
        if found < 0:
            raise ValueError("no closing quotation")
        return found


def _unescaped(found: re.Match[str]) -> str:
    """Return what a backslash and the character after it are between double quotes."""
    return "" if found[1] == "\n" else found[1] if found[1] in '$`"\\' else found[0]


# Functions of a shell script: their bodies as tokens, to be taken when they are called.

ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<rest>\[[^]]*\])?(?P<plus>\+?)=")
PREFIXES = frozenset({"then", "else", "elif", "do", "!", "time"})  # Words before a command


@dataclass(slots=True)
class Function:
    """One that is defined."""

    tokens: list[Token] = field(default_factory=list)
    is_certain: bool = True
    was_called: bool = False


@dataclass(slots=True)
class Recording:
    """The body of a function, while it is read."""

    name: str
    tokens: list[Token] = field(default_factory=list)
    opening: str = ""
    depth: int = 0
    is_start: bool = True

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
            raise ValueError(f"an unsupported case in the subshell {self.name}")
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
        elif (found := _assignment(token)) is not None:
            names.add(found["name"])
    return names


def literal(token: Token) -> str | None:
    """Return a word that is written without quotes and expansions."""
    if token.kind != "word" or any(piece.is_quoted or piece.is_expansion for piece in token.word):
        return None
    return "".join(piece.text for piece in token.word)


def is_assignment(token: Token) -> bool:
    """Does a token assign something: `name=…`, `name=( … )`?"""
    return token.kind == "array" or _assignment(token) is not None


def _assignment(token: Token) -> re.Match[str] | None:
    first = token.word[0] if token.word else None
    is_plain = first is not None and not first.is_quoted and not first.is_expansion
    return ASSIGNMENT.match(first.text) if first is not None and is_plain else None
