"""Plain text on a terminal: aligned tables, headings and heat, at any width and in any encoding.

Colour only repeats what the text says. Names from files must be escaped (`text.escape_name`) before they come
here; nothing is read as markup.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from ckpt_tools.cli.views.page import PageTable, read_columns
from ckpt_tools.text import display_width, escape_message

Style = Literal["heading", "warning", "dim"]

_STYLES: dict[Style, str] = {"heading": "\x1b[1m", "warning": "\x1b[33m", "dim": "\x1b[2m"}
_RESET = "\x1b[0m"
_HEAT = " ░▒▓█"
_HEAT_ASCII = " .:*#"
_INDENT = 2  # Of tables
_MIN_TEXT = 30  # Columns that a sentence at the end of a row has at least
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` filled up to `width` terminal columns; `right` puts the text at the right end."""
    fill = " " * (width - display_width(text))
    return fill + text if right else text + fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Where text goes."""

    stream: TextIO
    width: int = 100  # Terminal columns; lines of names may be longer, drawings are not
    colour: bool = False
    folds: bool = False  # What is wider goes on in a second line: for eyes, not for `grep`

    def line(self, text: str = "", style: Style | None = None) -> None:
        """Write one line; what the stream cannot encode becomes a visible escape."""
        text = text.rstrip()
        if not _can_encode(self.stream, text):
            encoding = self.stream.encoding or "utf-8"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        if style is not None and self.colour and text:
            text = f"{_STYLES[style]}{text}{_RESET}"
        self.stream.write(text + "\n")

    def section(self, title: str) -> None:
        """Begin a part, after a blank line."""
        self.line()
        self.line(title, "heading")

    def table(self, columns: str, rows: Iterable[Sequence[str]]) -> None:
        """Write a table, indented by two; `columns` are as `read_columns` takes them."""
        headers, align = read_columns(columns)
        cells = [tuple(row) for row in rows]
        widths = [max(map(display_width, column)) for column in zip(headers, *cells, strict=True)]
        lines = self._fold(widths, align)
        for number, row in enumerate((tuple(headers), *cells)):
            padded = [pad(cell, width, right=side == "r") for cell, width, side in zip(row, widths, align, strict=True)]
            for indent, shown in lines:
                if any(row[column] for column in shown):
                    text = " " * indent + "  ".join(padded[column] for column in shown)
                    last = indent + sum(widths[column] + 2 for column in shown[:-1])
                    self._write_folded(text, last, None if number else "dim")

    def _fold(self, widths: Sequence[int], align: str) -> list[tuple[int, list[int]]]:
        """Return (indent, columns) of the lines that a row takes; the last column, of text, may have less room."""
        lines, used = [(_INDENT, [0])], _INDENT + widths[0]
        for column, width in enumerate(widths[1:], 1):
            least = min(width, _MIN_TEXT) if column == len(widths) - 1 and align[column] == "l" else width
            if self.folds and used + 2 + least > self.width:
                lines.append((3 * _INDENT, []))
                used = 3 * _INDENT - 2
            lines[-1][1].append(column)
            used += 2 + width
        return lines

    def _write_folded(self, text: str, indent: int, style: Style | None) -> None:
        if not self.folds or display_width(text.rstrip()) <= self.width:
            self.line(text, style)
            return
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        for part in textwrap.wrap(text, self.width, subsequent_indent=" " * min(indent, self.width // 2), **options):
            self.line(part, style)

    def show(self, table: PageTable) -> None:
        """Write a table whose cells are not escaped; how many rows it leaves out is for the caller to say."""
        named = (f"{'>' * (side == 'r')}{name}" for name, side in zip(table.headers, table.align, strict=True))
        self.table(", ".join(named), (tuple(map(escape_message, row)) for row in table.rows))

    def heat(self, value: float, most: float) -> str:
        """Return one character for `value` on a scale from nothing (a space) to `most`."""
        glyphs = _HEAT if _can_encode(self.stream, _HEAT) else _HEAT_ASCII
        if value <= 0 or most <= 0:
            return glyphs[0]
        return glyphs[min(4, max(1, round(4 * value / most)))]

    def bar(self, value: float, most: float, width: int) -> str:
        """Return a bar of at most `width` characters for `value` on a scale from nothing to `most`.

        Whatever is more than nothing is seen.
        """
        if value <= 0 or most <= 0:
            return ""
        if not _can_encode(self.stream, _EIGHTHS):
            return "#" * max(1, round(width * value / most))
        full, part = divmod(max(1, round(8 * width * value / most)), 8)
        return _EIGHTHS[8] * full + (_EIGHTHS[part] if part else "")


def terminal() -> Screen:
    """Return stdout, with colour where that is wanted, and the width of its terminal; 100 columns without one."""
    is_live = sys.stdout.isatty()
    colour = is_live and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(shutil.get_terminal_size((100, 24)).columns, 40)
    return Screen(stream=sys.stdout, width=width, colour=colour, folds=is_live or "COLUMNS" in os.environ)
