"""Put a page where the user wants it: whole or not at all, in place of nothing but an earlier report."""

from __future__ import annotations

import contextlib
import os
import tempfile

from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError
from ckpt_tools.report.html import MARK, build_html
from ckpt_tools.report.page import Facts, Page, Section
from ckpt_tools.text import escape_name


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
    return Page(
        command=command,
        subject=subject,
        sections=(),
        mood="unknown",
        verdict="Not finished: the command was still running when this was written, or was killed. Nothing is known.",
    )


def failed_page(command: str, subject: str, error: BaseException) -> Page:
    """Return the report of a command that ended in an error."""
    rows = [("error", escape_name(type(error).__name__))]
    if isinstance(error, CkptError):
        rows = [("error", error.what), ("at", error.where or ""), ("fix", error.hint or "")]
    notes = [("note", str(text)) for text in getattr(error, "__notes__", ())]
    facts = Facts(rows=[(name, text) for name, text in (*rows, *notes) if text])
    section = Section(title="What happened", parts=(facts,))
    verdict = "The command failed: there is no result."
    return Page(command=command, subject=subject, sections=(section,), mood="bad", verdict=verdict)
