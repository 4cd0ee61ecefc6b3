"""A `Page` as one HTML file that needs nothing else: no network, no other file, no script but its own.

Text from files is escaped twice over: what would not print as itself becomes visible (`text.escape_message`), and what
markup is made of is escaped by the template. The content policy lets a browser run the page's one script and load
nothing. The same page is always the same bytes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt_tools._version import __version__
from ckpt_tools.report.page import Page
from ckpt_tools.text import escape_message
from ckpt_tools.units import format_size

if TYPE_CHECKING:
    from jinja2 import Template

MARK = "<!doctype html>\n<!-- ckpt report -->\n"
"""How every report begins; nothing else is replaced by one."""
_FILES = os.path.join(os.path.dirname(__file__), "page_files")
_IN_MARKUP = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
"""What would end a script element, or a line of it."""
_MAX_HEIGHT = 100.0


def build_html(page: Page) -> bytes:
    """Return the file's bytes."""
    text = _template().render(
        page=page,
        version=__version__,
        style=_read("report.css"),
        script=_read("report.js"),
        policy=_policy(_read("report.js")),
        data=_build_json(page.data),
        needs_script=page.data is not None,
    )
    return (MARK + text).encode()


def _build_json(data: object) -> str:
    return json.dumps(_shown(data), separators=(",", ":")).translate(_IN_MARKUP)


def _shown(data: object) -> object:
    """Return data whose texts are safe to show."""
    if isinstance(data, str):
        return escape_message(data)
    if isinstance(data, Mapping):
        return {escape_message(str(key)): _shown(value) for key, value in data.items()}
    return [_shown(each) for each in data] if isinstance(data, list | tuple) else data


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )


@functools.cache
def _read(name: str) -> str:
    with open(os.path.join(_FILES, name), encoding="utf-8") as file:
        return file.read()


@functools.cache
def _template() -> Template:
    import jinja2
    from markupsafe import Markup

    def show(value: object) -> object:
        return escape_message(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=show
    )
    # Only what this package wrote is put into a page as it is.
    environment.filters |= {"bundled": Markup, "size": format_size, "points": _points}
    return environment.from_string(_read("page.html.j2"))


def _points(numbers: Sequence[float], low: float, high: float) -> list[str]:
    """Return the polylines of a curve in a box of 100 × 100, one per unbroken run."""
    step = _MAX_HEIGHT / max(len(numbers) - 1, 1)
    lines: list[list[str]] = [[]]
    for place, number in enumerate(numbers):
        if not math.isfinite(number):
            lines.append([])
            continue
        height = (number - low) / (high - low) if high > low else 0.5
        lines[-1].append(f"{place * step:.2f},{_MAX_HEIGHT * (1 - height):.2f}")
    return [" ".join(line * 2 if len(line) == 1 else line) for line in lines if line]
