"""The variables and arguments of a shell script, and the words that they make."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from ckpt_tools.preflight.configs.shell import ASSIGNMENT, Token, Word, literal, pieces_of
from ckpt_tools.preflight.places import ConfigLocation, PlacedText

_NAME = re.compile(r"[A-Za-z_]\w*")
_DEFAULT = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*|[1-9])(?P<how>:?[-=+])(?P<default>.*)\}", re.DOTALL)
_ARGUMENT = re.compile(r"\$(?:\{?(?P<number>[1-9])\}?|\{?(?P<all>[@*])\}?|\{?(?P<count>#)\}?)")
_MAX_EXPANDED = 4 << 20
"""Characters of all words and values once variables are known: ten lines can double one twenty times."""


@dataclass(slots=True)
class Variables:
    """What is known of them at one point of the script."""

    is_certain: Callable[[], bool]
    path: str | None = None
    values: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    assumed: dict[str, None] = field(default_factory=dict)
    is_sourced: bool = False
    arguments: tuple[str, ...] | None = None
    takes_arguments: bool = False
    has_other_arguments: bool = False  # `$@` is not what the script was called with: in a function, after `set -- …`
    is_uncalled: bool = False
    num_chars: int = 0
    shadowed: list[dict[str, Value]] = field(default_factory=list)
    """For each function that is being called, what its `local` variables were before."""

    def assign(self, token: Token, *, declared_by: str = "") -> None:
        """Take an assignment, or an argument of `export`, `local` and their like."""
        value: Value
        if token.kind == "array":
            name, appends, index = token.text, token.appends, None
            has_keys = any(item and item[0].text.startswith("[") and not item[0].is_quoted for item in token.items)
            value = None if has_keys else tuple(chain.from_iterable(self.expand(item) for item in token.items))
        else:
            found = None if not token.word else ASSIGNMENT.match(token.word[0].text)
            if found is None:
                self.exported |= {text} if declared_by == "export" and (text := literal(token)) else set()
                return  # `export X`, an option of declare
            name, appends, index = found["name"], bool(found["plus"]), found["rest"]
            first = token.word[0]
            value = self.text((replace(first, text=first.text[found.end() :]), *token.word[1:]))
        if appends:
            value = joined(self.values.get(name), value)
        self.spend(sum(map(len, value)) if isinstance(value, tuple) else len(value or ""))
        if not self.is_certain() or index is not None:
            value = None
        if self.is_uncalled:
            return  # nobody calls it
        if self.shadowed and declared_by in ("local", "declare", "typeset"):
            self.shadowed[-1].setdefault(name, self.values.get(name))
        self.exported |= {name} if declared_by == "export" else set()
        self.values[name] = value

    def forget(self, names: Iterable[str | None]) -> None:
        """Let nobody know the values of some variables."""
        for name in names:
            if name is not None and _NAME.fullmatch(name):
                self.values[name] = None

    def forget_all(self) -> None:
        """Let nobody know the value of any."""
        self.values.clear()
        self.is_sourced = True

    def text(self, word: Word) -> str | None:
        """Return the text of a word, its unknown parts as written; None for an array, or where blanks would cut it."""
        parts: list[str] = []
        for piece in word:
            value = self._value(piece.text) if piece.is_expansion else piece.text
            if value is None:
                value = self._as_written(piece.text)
                if len(value.split()) != 1:
                    return None
            if not isinstance(value, str):
                return None
            self.spend(len(value))
            parts.append(value)
        return "".join(parts)

    def spend(self, num_chars: int) -> None:
        """Count what the script comes to, and stop where no script comes to as much."""
        self.num_chars += num_chars
        if self.num_chars > _MAX_EXPANDED:
            raise ValueError(f"more than {_MAX_EXPANDED} characters after its variables are expanded")

    def expand(self, word: Word) -> list[str]:
        """Return the words that a word becomes: none, one or several; each knows where it is written."""
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
            self.spend(sum(map(len, parts)) + len(parts))
            if not parts:
                continue
            if is_open:
                fields[-1] += parts[0]
                parts = parts[1:]
            fields += parts
            is_open = True
        line = word[0].line if word else 0
        place = ConfigLocation(self.path, line) if self.path is not None and line else None
        return [one if isinstance(one, PlacedText) else PlacedText(one, place) for one in fields]

    def _as_written(self, text: str) -> str:
        """Return an expansion that is not known; arguments are told from those of the script."""
        if text[1:2] in ("@", "*") or text[1:2].isdigit() or text.startswith(("${@", "${*")):
            owner = " of a function" if self.is_uncalled else " of set" if self.has_other_arguments else ""
            return text + owner
        return text

    def _value(self, text: str) -> Value:
        """Return what an expansion stands for, or None where nobody knows."""
        if self.is_uncalled:
            return None
        if (found := _ARGUMENT.fullmatch(text)) is not None:
            return self._argument(found)
        if (found := _DEFAULT.fullmatch(text)) is not None:
            return self._or_default(found["name"], found["how"], found["default"])
        place = place_of_script(text, self.path)
        return expanded(text, self.values.get) if place is None else place

    def _argument(self, found: re.Match[str]) -> Value:
        self.takes_arguments |= not self.has_other_arguments
        if self.arguments is None:
            if self.has_other_arguments or found["all"] is None:
                return None
            self.assumed["$@"] = None
            return () if found["all"] == "@" else ""
        if found["all"]:
            return self.arguments if found["all"] == "@" else None
        number = int(found["number"]) if found["number"] else len(self.arguments) + 1
        rest = self.shifted(number - 1)
        if rest is None:
            return None
        return str(len(self.arguments)) if found["count"] else rest[0] if rest else ""

    def shifted(self, number: int) -> tuple[str, ...] | None:
        """Return `$@` without the first arguments; None where one of them may be several, or none."""
        if self.arguments is None or any("$" in one or "`" in one for one in self.arguments[:number]):
            return None
        return self.arguments[number:]

    def _or_default(self, name: str, how: str, default: str) -> str | None:
        takes_empty = not how.startswith(":")
        has_value = False
        if name.isdigit() and self.arguments is not None:
            has_value = int(name) <= len(self.arguments)
            value: Value = self.arguments[int(name) - 1] if has_value else None
        elif name in self.values or self.is_sourced or (name.isdigit() and self.has_other_arguments):
            has_value, value = True, self.values.get(name)
        else:
            self.assumed[name] = None
        if has_value:
            if not isinstance(value, str) or "$" in value or "`" in value:
                return None  # it may be empty
            has_value = bool(value) or takes_empty
        if how.endswith("+"):
            if not has_value:
                return ""
        elif has_value and isinstance(value, str):
            return value
        if default[:1] in ("'", '"') and default[-1:] == default[0] and len(default) > 1:
            default = default[1:-1]
        if any(char in default for char in "'\"\\`"):
            return None  # quotes inside the braces of an expansion have rules of their own
        result = self.text(pieces_of(default))
        if how.endswith("=") and not name.isdigit():
            self.values[name] = result if self.is_certain() else None
        return result


def joined(before: Value, value: Value) -> Value:
    """Return what `name+=…` makes of a variable."""
    if isinstance(before, tuple):
        return before + value if isinstance(value, tuple) else None
    return before + value if isinstance(before, str) and isinstance(value, str) else None


def _split(value: str | tuple[str, ...]) -> list[str]:
    """Return the fields of a value that is not quoted."""
    if isinstance(value, str):
        return value.split()
    return [one if one.split() == [one] else part for one in value for part in one.split()]


def _splits_oddly(value: str, written: str, num_pieces: int) -> bool:
    """Do blanks at the ends of a value cut its neighbours off, or do quotes in `${X:-"a b"}` keep it whole?"""
    has_blank = len(value.split()) > 1
    return (num_pieces > 1 and value != value.strip()) or (has_blank and any(quote in written for quote in "'\""))


# What an expansion of a shell stands for, where its variables are known: `${X%/}`, `${A[@]:1}`, `$((N * 8))`.
# Source: POSIX Shell Command Language, 2.6.2 and 2.6.4; bash for `${X//a/b}`, `${X^^}`, slices and items of arrays.

Value = str | tuple[str, ...] | None  # Of a variable; a tuple is an array, None what nobody knows here
ValueOf = Callable[[str], Value]  # Name of a variable → its value

_GROUP_NAME = r"(?P<name>[A-Za-z_]\w*)"
_SIMPLE = re.compile(rf"\$(?:(?P<bare>[A-Za-z_]\w*)|\{{{_GROUP_NAME}\}})")
_ALL = re.compile(rf"\$\{{{_GROUP_NAME}\[(?P<all>[@*])\](?::\s*(?P<start>\d+)(?::(?P<count>\d+))?)?\}}")
_ITEM = re.compile(rf"\$\{{{_GROUP_NAME}\[(?P<index>\d+)\]\}}")
_PART = re.compile(rf"\$\{{{_GROUP_NAME}:\s*(?P<start>\d+)(?::(?P<count>\d+))?\}}")
_COUNT = re.compile(rf"\$\{{#{_GROUP_NAME}(?P<all>\[[@*]\])?\}}")
_CHANGE = re.compile(rf"\$\{{{_GROUP_NAME}(?P<how>%%|%|##|#|//|/|,,|\^\^)(?P<rest>[^{{}}]*)\}}", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\((?P<text>.{1,200})\)\)", re.DOTALL)
_NUMBER_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_SPECIAL = re.compile(r"[\\'\"$`\[\]()&~]")
_MAX_CHANGED = 2000  # characters of a value whose begin or end is looked for
_ITSELF = r"(?:\$0|\$\{0\}|\$BASH_SOURCE|\$\{BASH_SOURCE(?:\[0\])?(?::-\$0)?\})"
_SELF = rf"(?:{_ITSELF}|\$\((?:realpath|readlink-f){_ITSELF}\))"
_FOLDER = rf"\$\(dirname(?:--)?{_SELF}\)"
_HERE = re.compile(
    rf"{_SELF}|{_FOLDER}"
    rf"|\$\(cd(?:-P|--)?{_FOLDER}(?P<up>(?:/\.\.)*)/?(?:&?>/dev/null(?:2>&1)?)?(?:&&|;)pwd(?:-P)?\)"
)


def expanded(text: str, value_of: ValueOf) -> Value:
    """Return what an expansion that is written as `text` stands for, or None where nobody knows."""
    if (found := _SIMPLE.fullmatch(text)) is not None:
        value = value_of(found["bare"] or found["name"])
        return value if isinstance(value, str) else None
    if (found := _ALL.fullmatch(text)) is not None:
        value = value_of(found["name"])
        return _part(value, found) if found["all"] == "@" and isinstance(value, tuple) else None
    if (found := _ITEM.fullmatch(text)) is not None:
        value = value_of(found["name"])
        index = int(found["index"][:6])
        return value[index] if isinstance(value, tuple) and index < len(value) else None
    if (found := _COUNT.fullmatch(text)) is not None:
        value = value_of(found["name"])
        is_known = isinstance(value, tuple) if found["all"] else isinstance(value, str) and "$" not in value
        return str(len(value)) if is_known and value is not None else None
    if (found := _ARITHMETIC.fullmatch(text)) is not None:
        return _arithmetic(found["text"], value_of)
    found = _PART.fullmatch(text) or _CHANGE.fullmatch(text)
    value = None if found is None else value_of(found["name"])
    if found is None or not isinstance(value, str) or "$" in value or "`" in value:
        return None
    return _part(value, found) if found.re is _PART else _changed(value, found["how"], found["rest"])


def place_of_script(text: str, path: str | None) -> str | None:
    """Return what a script says of where it lies: itself (`$0`), its folder (`$(dirname "$0")`)."""
    if path is None or not ("$0" in text or "BASH_SOURCE" in text or "${0}" in text):
        return None
    found = _HERE.fullmatch(re.sub(r"[\s\"']", "", text))
    if found is None:
        return None
    if found["up"] is not None:
        return os.path.normpath(os.path.dirname(os.path.abspath(path)) + found["up"])
    return (os.path.dirname(path) or ".") if "dirname" in text else path


def _part(value: str | tuple[str, ...], found: re.Match[str]) -> Value:
    """Return a part of a value, or some items of an array."""
    start = int((found["start"] or "0")[:9])
    return value[start:][: int(found["count"][:9])] if found["count"] else value[start:]


def _changed(value: str, how: str, rest: str) -> str | None:
    """Return a value without what fits a pattern at its begin or end, with a part replaced, or in other letters."""
    if _SPECIAL.search(rest) or len(value) > _MAX_CHANGED:
        return None
    if how in (",,", "^^"):
        return None if rest or not value.isascii() else value.lower() if how == ",," else value.upper()
    if how.startswith("/"):
        old, _, new = rest.partition("/")
        if not old or old[0] in "#%" or set("*?") & set(old):
            return None
        return value.replace(old, new, -1 if how == "//" else 1)
    pattern = re.compile("".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in rest), re.DOTALL)
    cuts = range(len(value) + 1)
    if how.startswith("%"):
        longest = cuts if how == "%%" else reversed(cuts)
        return next((value[:at] for at in longest if pattern.fullmatch(value[at:])), value)
    longest = reversed(cuts) if how == "##" else cuts
    return next((value[at:] for at in longest if pattern.fullmatch(value[:at])), value)


def _arithmetic(text: str, value_of: ValueOf) -> str | None:
    def number(found: re.Match[str]) -> str:
        value = value_of(found[1])
        return value if isinstance(value, str) and value.isdecimal() and len(value) < 16 else "?"

    plain = _NUMBER_NAME.sub(number, text)
    try:
        result = _compute(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return None if result is None else str(result)


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _compute(node: ast.expr) -> int | None:
    """Return the value of whole numbers with + - * / and %, which round to zero as in a shell."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _compute(node.left), _compute(node.right)
    if left is None or right is None or max(left, right) >= 10**18 or min(left, right) < 0:
        return None
    compute = _OPERATORS.get(type(node.op))
    is_division = isinstance(node.op, (ast.Div, ast.Mod))
    return None if compute is None or (is_division and not right) else compute(left, right)
