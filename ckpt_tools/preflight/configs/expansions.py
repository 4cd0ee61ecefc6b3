r"""What an expansion of a shell stands for, where its variables are known: `${X%/}`, `${A[@]:1}`, `$((N * 8))`.

Source: POSIX Shell Command Language, 2.6.2 and 2.6.4; bash for `${X//a/b}`, `${X^^}`, slices and items of arrays.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable

Value = str | tuple[str, ...] | None
"""Of a variable; a tuple is an array, None what nobody knows here."""
Look = Callable[[str], Value]
"""Name of a variable → its value."""

_NAME = r"(?P<name>[A-Za-z_]\w*)"
_SIMPLE = re.compile(rf"\$(?:(?P<bare>[A-Za-z_]\w*)|\{{{_NAME}\}})")
_ALL = re.compile(rf"\$\{{{_NAME}\[(?P<all>[@*])\](?::\s*(?P<start>\d+)(?::(?P<count>\d+))?)?\}}")
_ITEM = re.compile(rf"\$\{{{_NAME}\[(?P<index>\d+)\]\}}")
_PART = re.compile(rf"\$\{{{_NAME}:\s*(?P<start>\d+)(?::(?P<count>\d+))?\}}")
_COUNT = re.compile(rf"\$\{{#{_NAME}(?P<all>\[[@*]\])?\}}")
_CHANGE = re.compile(rf"\$\{{{_NAME}(?P<how>%%|%|##|#|//|/|,,|\^\^)(?P<rest>[^{{}}]*)\}}", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\((?P<text>.{1,200})\)\)", re.DOTALL)
_NUMBER_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_SPECIAL = re.compile(r"[\\'\"$`\[\]()&~]")
_MAX_CHANGED = 2000
"""Characters of a value whose begin or end is looked for."""
_ITSELF = r"(?:\$0|\$\{0\}|\$BASH_SOURCE|\$\{BASH_SOURCE(?:\[0\])?(?::-\$0)?\})"
_ITSELF = r"(?:\$0|\$\{0\}|\$BASH_SOURCE|\$\{BASH_SOURCE(?:\[0\])?(?::-\$0)?\})"
_SELF = rf"(?:{_ITSELF}|\$\((?:realpath|readlink-f){_ITSELF}\))"
_FOLDER = rf"\$\(dirname(?:--)?{_SELF}\)"
_HERE = re.compile(
    rf"{_SELF}|{_FOLDER}"
    rf"|\$\(cd(?:-P|--)?{_FOLDER}(?P<up>(?:/\.\.)*)/?(?:&?>/dev/null(?:2>&1)?)?(?:&&|;)pwd(?:-P)?\)"
)


def expanded(text: str, look: Look) -> Value:
    """Return what an expansion that is written as `text` stands for, or None where nobody knows."""
    if (found := _SIMPLE.fullmatch(text)) is not None:
        return _text(look(found["bare"] or found["name"]))
    if (found := _ALL.fullmatch(text)) is not None:
        return _items(look(found["name"]), found) if found["all"] == "@" else None
    if (found := _ITEM.fullmatch(text)) is not None:
        value = look(found["name"])
        index = int(found["index"][:6])
        return value[index] if isinstance(value, tuple) and index < len(value) else None
    if (found := _COUNT.fullmatch(text)) is not None:
        value = look(found["name"])
        is_known = isinstance(value, tuple) if found["all"] else isinstance(value, str) and "$" not in value
        return str(len(value)) if is_known and value is not None else None
    if (found := _ARITHMETIC.fullmatch(text)) is not None:
        return _arithmetic(found["text"], look)
    found = _PART.fullmatch(text) or _CHANGE.fullmatch(text)
    value = None if found is None else look(found["name"])
    if found is None or not isinstance(value, str) or "$" in value or "`" in value:
        return None
    if found.re is _PART:
        start = int(found["start"][:9])
        return value[start:][: int(found["count"][:9])] if found["count"] else value[start:]
    return _changed(value, found["how"], found["rest"])


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


def _text(value: Value) -> str | None:
    return value if isinstance(value, str) else None


def _items(value: Value, found: re.Match[str]) -> Value:
    if not isinstance(value, tuple) or found["start"] is None:
        return value if isinstance(value, tuple) else None
    start = int(found["start"][:9])
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


def _arithmetic(text: str, look: Look) -> str | None:
    def number(found: re.Match[str]) -> str:
        value = look(found[1])
        return value if isinstance(value, str) and value.isdecimal() and len(value) < 16 else "?"

    plain = _NUMBER_NAME.sub(number, text)
    try:
        result = _compute(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return None if result is None else str(result)


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
