r"""The commands of a shell script as lists of words, with what the script itself says of its variables.

Nothing is executed, and nothing is looked up outside of the script. A variable becomes its value where that is
certain: it was assigned unconditionally before (`X=a`, `export X=a`, `A=(a b)`, `A+=(c)`, `read -r X <<EOF`), or a
default stands beside it (`${X:-a}`) and the script does not assign it. Anything else stays what is written: `$X`,
`$(date)`, `$@`.

Source: POSIX Shell Command Language, 2.6 (word expansions) and 2.9 (commands); bash for arrays and `$(( … ))`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from ckpt_tools.preflight.configs.shell import Token, Word, pieces_of, tokenize

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<rest>\[[^]]*\])?(?P<plus>\+?)=")
_SIMPLE = re.compile(r"\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})")
_ALL = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)\[(?P<all>[@*])\]\}")
_DEFAULT = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)(?P<colon>:?)[-=](?P<default>.*)\}", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\((?P<text>.{1,200})\)\)", re.DOTALL)
_NUMBER_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_OPENING = frozenset({"if", "while", "until", "for", "select", "case", "{"})
_CLOSING = frozenset({"fi", "done", "esac", "}"})
_PREFIXES = frozenset({"then", "else", "elif", "do", "!", "time"})
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ASSIGNING = frozenset({"read", "mapfile", "readarray", "getopts", "printf", "unset", "let"})
_SETS_NO_OPTIONS = ("activate", ".bashrc", ".bash_profile", ".profile", "conda.sh")
"""Files that set up a shell: they are taken to leave the script's own variables alone."""
_MAX_EXPANDED = 4 << 20
"""Characters of all words and values once variables are known: ten lines can double one twenty times."""
_MAX_DEPTH = 200
"""Compounds and functions inside one another."""

Value = str | tuple[str, ...] | None
"""Of a variable; a tuple is an array, None what nobody knows here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script as far as it can be read without running it."""

    commands: tuple[tuple[str, ...], ...]
    assumed: tuple[str, ...] = ()
    """Variables whose default was taken: the environment is assumed not to set them."""


def read_script(text: str) -> Script:
    """Return the commands of a script.

    Raises:
        ValueError: Something is never closed, or there is more than any script has.
    """
    shell = _Shell()
    try:
        for token in tokenize(text):
            shell.take(token)
    except RecursionError:
        raise ValueError("expansions nested too deep") from None
    return Script(commands=tuple(shell.commands), assumed=tuple(shell.assumed))


@dataclass(slots=True)
class _Shell:
    """What is known after each token."""

    commands: list[tuple[str, ...]] = field(default_factory=list)
    assumed: dict[str, None] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    tainted: set[str] = field(default_factory=set)
    """Variables that a function assigns: whenever it is called."""
    stack: list[str] = field(default_factory=list)
    """Compounds that are open: if, for, {, (, function."""
    pending: list[Token] = field(default_factory=list)
    is_conditional: bool = False
    """After && or ||, or in a pipe: it may not run, or not in this shell."""
    is_sourced: bool = False
    """Another file was read in before, which may have set anything."""
    sets_arguments: bool = False
    """`set -- …` was seen: `$@` is no longer what the script was called with."""
    last: tuple[str, ...] = ()
    """The words of the last command: a here-document is its input."""
    num_chars: int = 0

    def take(self, token: Token) -> None:
        """Take the next token."""
        if len(self.stack) > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} compound commands inside one another")
        if token.kind in ("word", "array"):
            self.pending.append(token)
        elif token.kind == "heredoc":
            if self.pending:
                self._end_command()
            self._read_into(self.last, self._text(token.word))
        elif token.text == "(":
            if len(self.pending) == 1:
                self.stack.append("function")  # its name; the body follows
                self.pending = []
            else:
                self._end_command()
                self.stack.append("(")
        elif token.text == ")":
            if self.stack[-1:] == ["case"]:
                self.pending = []  # a pattern
                return
            self._end_command()
            if self.stack and self.stack[-1] == "(":
                self.stack.pop()
        elif token.kind == "newline" and not self.pending:
            return  # && and | go on in the next line
        else:
            self.is_conditional |= token.text in ("|", "|&")
            self._end_command()
            self.is_conditional = token.text in ("&&", "||", "|", "|&")

    def _end_command(self) -> None:
        pending, self.pending = self.pending, []
        while pending and (word := _literal(pending[0])) is not None:
            if word == "function":
                self.stack.append("function")
                pending = pending[2:]
            elif word in _OPENING:
                if word == "{" and self.stack[-1:] == ["function"]:
                    self.stack[-1] = "function {"
                else:
                    self.stack.append(word)
                pending = pending[1:]
                if word in ("for", "select"):
                    self._forget(_literal(item) for item in pending[:1])
                    return
                if word == "case":
                    return
            elif word in _CLOSING:
                if self.stack:
                    self.stack.pop()
                pending = pending[1:]
            elif word in _PREFIXES:
                pending = pending[1:]
            else:
                break
        if self.stack[-1:] == ["function"] and pending:
            self.stack.pop()  # what stood between ( and ) was no definition
        if pending:
            self._run(pending)

    def _run(self, pending: list[Token]) -> None:
        name = _literal(pending[0])
        if name in _DECLARING or all(_is_assignment(token) for token in pending):
            for token in pending:
                self._assign(token)
            return
        while pending and _is_assignment(pending[0]):
            pending = pending[1:]  # they count for this command alone
        words = tuple(chain.from_iterable(self._expand(token.word) for token in pending))
        self.last = words
        if not words:
            return
        self.commands.append(words)
        if words[0] in _ASSIGNING:
            self._forget(words[1:])
        elif words[0] == "eval" or (words[0] in ("source", ".") and not words[-1].endswith(_SETS_NO_OPTIONS)):
            self.values.clear()
            self.is_sourced = True
        elif words[0] == "set" and "--" in words:
            self.sets_arguments = True
        elif self.stack[-2:] == ["(", "("]:
            self._forget(_NAME.findall(" ".join(words)))  # (( i++ ))

    def _assign(self, token: Token) -> None:
        value: Value
        if token.kind == "array":
            name, appends, index = token.text, token.appends, None
            has_keys = any(item and item[0].text.startswith("[") and not item[0].is_quoted for item in token.items)
            value = None if has_keys else tuple(chain.from_iterable(self._expand(item) for item in token.items))
        else:
            found = None if not token.word else _ASSIGNMENT.match(token.word[0].text)
            if found is None:
                return  # `export X`, an option of declare
            name, appends, index = found["name"], bool(found["plus"]), found["rest"]
            first = token.word[0]
            value = self._text((replace(first, text=first.text[found.end() :]), *token.word[1:]))
        if appends:
            value = _joined(self.values.get(name), value)
        self._spend(sum(map(len, value)) if isinstance(value, tuple) else len(value or ""))
        if self.stack or self.is_conditional or index is not None:
            value = None
        if self._in_function:
            self.tainted.add(name)
        self.values[name] = value

    def _forget(self, names: Iterable[str | None]) -> None:
        for name in names:
            if name is not None and _NAME.fullmatch(name):
                self.values[name] = None

    def _read_into(self, words: tuple[str, ...], text: str | None) -> None:
        """Give the last name after `read` a here-document, of which it reads everything with `-r` and `-d ''`."""
        if words[:1] != ("read",) or not _NAME.fullmatch(words[-1]) or self.stack or self.is_conditional:
            return
        reads_all = any(one.startswith("-") and one.endswith("d") and not value for one, value in pairwise(words))
        is_raw = any(one.startswith("-") and "r" in one for one in words)
        if text is not None and reads_all and (is_raw or "\\" not in text):
            self.values[words[-1]] = text.strip()

    def _text(self, word: Word) -> str | None:
        """Return what a word says as one text, as in an assignment; what is not known in it stays what is written.

        None where nothing can be said: an array, or an expansion with blanks, at which it would fall apart later.
        """
        parts: list[str] = []
        for piece in word:
            value = self._value(piece.text) if piece.is_expansion else piece.text
            if value is None:
                value = self._as_written(piece.text)
                if len(value.split()) != 1:
                    return None
            if not isinstance(value, str):
                return None
            self._spend(len(value))
            parts.append(value)
        return "".join(parts)

    def _spend(self, num_chars: int) -> None:
        self.num_chars += num_chars
        if self.num_chars > _MAX_EXPANDED:
            raise ValueError(f"more than {_MAX_EXPANDED} characters once its variables are known")

    def _expand(self, word: Word) -> list[str]:
        """Return the words that a word becomes: none, one or several."""
        fields: list[str] = []
        is_open = False
        for piece in word:
            value = self._value(piece.text) if piece.is_expansion else piece.text
            if isinstance(value, str) and (piece.is_quoted or not piece.is_expansion):
                parts = [value]
            elif value is None or (isinstance(value, str) and _splits_oddly(value, piece.text, len(word))):
                parts = [self._as_written(piece.text)]
            else:
                parts = list(value) if piece.is_quoted else _split(value)
            self._spend(sum(map(len, parts)) + len(parts))
            if not parts:
                continue
            if is_open:
                fields[-1] += parts[0]
                parts = parts[1:]
            fields += parts
            is_open = True
        return fields

    def _as_written(self, text: str) -> str:
        """Return an expansion that is not known; arguments are told from those of the script."""
        if text[1:2] in ("@", "*") or text[1:2].isdigit() or text.startswith(("${@", "${*")):
            return f"{text} of a function" if self._in_function else f"{text} of set" if self.sets_arguments else text
        return text

    @property
    def _in_function(self) -> bool:
        return any(one.startswith("function") for one in self.stack)

    def _value(self, text: str) -> Value:
        """Return what an expansion stands for, or None where nobody knows."""
        if self._in_function:
            return None  # known once it is called
        if (found := _SIMPLE.fullmatch(text)) is not None:
            value = self._variable(found["bare"] or found["braced"])
            return value if isinstance(value, str) else None
        if (found := _ALL.fullmatch(text)) is not None:
            value = self._variable(found["name"])
            return value if isinstance(value, tuple) and found["all"] == "@" else None
        if (found := _DEFAULT.fullmatch(text)) is not None:
            return self._or_default(found["name"], found["default"], takes_empty=not found["colon"])
        if (found := _ARITHMETIC.fullmatch(text)) is not None:
            return self._arithmetic(found["text"])
        return None

    def _variable(self, name: str) -> Value:
        return None if name in self.tainted else self.values.get(name)

    def _or_default(self, name: str, default: str, *, takes_empty: bool) -> str | None:
        if name in self.values or name in self.tainted or self.is_sourced:
            value = self._variable(name)
            if not isinstance(value, str) or "$" in value or "`" in value:
                return None  # it may be empty
            if value or takes_empty:
                return value
        else:
            self.assumed[name] = None
        if default[:1] in ("'", '"') and default[-1:] == default[0] and len(default) > 1:
            default = default[1:-1]
        if any(char in default for char in "'\"\\`"):
            return None  # quotes inside the braces of an expansion have rules of their own
        return self._text(pieces_of(default))

    def _arithmetic(self, text: str) -> str | None:
        def number(found: re.Match[str]) -> str:
            value = self._variable(found[1])
            return value if isinstance(value, str) and value.isdecimal() and len(value) < 16 else "?"

        plain = _NUMBER_NAME.sub(number, text)
        try:
            result = _compute(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return None if result is None else str(result)


def _joined(before: Value, value: Value) -> Value:
    """Return what `name+=…` makes of a variable."""
    if isinstance(before, tuple):
        return before + value if isinstance(value, tuple) else None
    return before + value if isinstance(before, str) and isinstance(value, str) else None


def _compute(node: ast.expr) -> int | None:
    """Return the value of whole numbers with + - * / and %, which round to zero as in a shell."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _compute(node.left), _compute(node.right)
    if left is None or right is None or max(left, right) >= 10**18 or min(left, right) < 0:
        return None
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, (ast.Div, ast.Mod)) and right > 0:
        return left // right if isinstance(node.op, ast.Div) else left % right
    return None


def _split(value: str | tuple[str, ...]) -> list[str]:
    """Return the fields of a value that is not quoted."""
    return [part for one in ((value,) if isinstance(value, str) else value) for part in one.split()]


def _splits_oddly(value: str, written: str, num_pieces: int) -> bool:
    """Do blanks at the ends of a value cut its neighbours off, or do quotes in `${X:-"a b"}` keep it whole?"""
    has_blank = len(value.split()) > 1
    return (num_pieces > 1 and value != value.strip()) or (has_blank and any(quote in written for quote in "'\""))


def _literal(token: Token) -> str | None:
    """Return a word that is written without quotes and expansions."""
    if token.kind != "word" or any(piece.is_quoted or piece.is_expansion for piece in token.word):
        return None
    return "".join(piece.text for piece in token.word)


def _is_assignment(token: Token) -> bool:
    if token.kind == "array":
        return True
    first = token.word[0] if token.word else None
    return (
        first is not None
        and not first.is_quoted
        and not first.is_expansion
        and _ASSIGNMENT.match(first.text) is not None
    )
