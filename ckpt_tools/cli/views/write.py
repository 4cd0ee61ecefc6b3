"""Put a page where the user wants it: whole or not at all, in place of nothing but an earlier report."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt_tools._version import __version__
from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.cli.views.page import Depth, FactList, Page, PageSection, tensors_of
from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError
from ckpt_tools.text import escape_message, escape_name
from ckpt_tools.units import format_size

if TYPE_CHECKING:
    from jinja2 import Template


def check_place(path: str) -> None:
    """Check that a report may be written at `path`: nothing is there, or a report of ckpt's."""
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise StorageError("there is no such directory for the report", where=directory, hint="create it first")
    if not os.path.lexists(path):
        return
    try:
        with open(path, "rb") as file:
            is_report = os.path.isfile(path) and file.read(len(MARK)) == MARK.encode()
    except OSError:
        is_report = False
    if not is_report:
        what = "--html only replaces reports that ckpt wrote; this file is not one"
        raise DestinationExistsError(what, where=path, hint="give another name, or remove it")


def write_page(page: Page, path: str) -> None:
    """Write a page, in place of an earlier report."""
    check_place(path)
    content = build_html(page)
    try:
        number, part = tempfile.mkstemp(prefix=".ckpt-report-", dir=os.path.dirname(path) or ".")
        try:
            with open(number, "wb") as file:
                file.write(content)
                umask = os.umask(0)
                os.umask(umask)
                os.fchmod(file.fileno(), 0o666 & ~umask)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
    except OSError as error:
        raise StorageError(f"the report could not be written: {error.strerror or error}", where=path) from error


def unfinished_page(command: str, subject: str) -> Page:
    """Return what stands in a report's place until it is there: a command that is killed leaves no earlier verdict."""
    verdict = "Not finished: the command was still running when this was written, or was killed. Nothing is known."
    return Page(command, subject, (), "unknown", verdict)


def failed_page(command: str, subject: str, error: BaseException) -> Page:
    """Return the report of a command that ended in an error."""
    rows = [("error", escape_name(type(error).__name__))]
    if isinstance(error, CkptError):
        rows = [("error", error.what), ("at", error.where or ""), ("fix", error.hint or "")]
    notes = [("note", str(text)) for text in getattr(error, "__notes__", ())]
    section = PageSection("What happened", [FactList([(name, text) for name, text in (*rows, *notes) if text])])
    return Page(command, subject, [section], "bad", "The command failed: there is no result.")


# A `Page` as one HTML file that needs nothing else: no network, no other file, no script but its own.

MARK = "<!doctype html>\n<!-- ckpt report -->\n"  # How every report begins; nothing else is replaced by one
_FILES = os.path.join(os.path.dirname(__file__), "page_files")
_IN_MARKUP = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
"""What would end a script element, or a line of it."""
_BRIEF = 160  # Characters of a text in a notebook


def build_html(page: Page) -> bytes:
    """Return the file's bytes."""
    links = _Links(page)
    depths = [part.to_json(links.numbers) for part in page.parts() if isinstance(part, Depth)]
    text = _template("page.html.j2").render(
        page=page,
        links=links,
        version=__version__,
        style=_read("report.css"),
        script=_read("report.js"),
        policy=_policy(_read("report.js")),
        data=json.dumps(_shown({**(page.data or {}), "depths": depths}), separators=(",", ":")).translate(_IN_MARKUP),
        needs_script=bool(page.data or depths),
    )
    return (MARK + text).encode()


def build_summary(page: Page) -> str:
    """Return what stands on top of a page, and its first table, for notebooks: no style sheet, script or request."""
    return _template("summary.html.j2").render(page=page)


class _Links:
    """Numbers the findings of a page, and knows the places of its pictures that they are about."""

    def __init__(self, page: Page) -> None:
        listed = (finding for _, found in page.groups for finding in found)
        self.numbers = {finding: number for number, finding in enumerate(dict.fromkeys(listed), 1)}
        self.ids, self._num_marks = self.numbers.copy(), 0
        self.places: dict[Finding, list[tuple[str, str]]] = {}
        for figure, part in enumerate(part for part in page.parts() if isinstance(part, Depth)):
            places = part.places()
            for finding, fqn in tensors_of(part.findings, places).items():
                place = f"depth-{figure}-{self.numbers.get(finding)}"
                self.places.setdefault(finding, []).append((place, f"layer {places[fqn][1]}, {places[fqn][0]}"))

    def mark(self, findings: Sequence[Finding], label: str) -> tuple[str, int | None, str]:
        """Note where findings are marked; return the place's id, the first one's number, and what they say."""
        self._num_marks += 1
        place = f"place-{self._num_marks}"
        for finding in findings:
            self.places.setdefault(finding, []).append((place, label))
        more = f" (and {len(findings) - 1} more)" * (len(findings) > 1)
        return place, self.numbers.get(findings[0]), findings[0].what + more


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
def _template(name: str) -> Template:
    import jinja2
    from markupsafe import Markup

    def show(value: object) -> object:
        return escape_message(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=show
    )
    # Only what this package wrote is put into a page as it is.
    environment.filters |= {
        "bundled": Markup,
        "size": format_size,
        "brief": lambda text: first if len(first := escape_message(text)) <= _BRIEF else first[:_BRIEF] + "…",
        "kind": lambda part: type(part).__name__.lower(),
    }
    return environment.from_string(_read(name))
