"""`--html FILE`: the result of a command as a page, beside what it prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ckpt_tools.cli.output import note
from ckpt_tools.errors import CkptError
from ckpt_tools.options import AnyPath
from ckpt_tools.options.output import Output
from ckpt_tools.text import escape_name

if TYPE_CHECKING:
    from ckpt_tools.report.page import Page


@contextmanager
def report_to(
    html: AnyPath | None, command: str, subject: str, output: Output
) -> Iterator[Callable[[Page], None] | None]:
    """Yield what writes the command's page; None without `--html`.

    From here on the file tells of this run: that it is not finished, what it came to, or why it failed.
    """
    if html is None or os.environ.get("RANK", "0") != "0":  # under torchrun, only rank 0 speaks
        yield None
        return
    from ckpt_tools.report.write import failed_page, unfinished_page, write_page

    path = os.fspath(html)
    is_written = False

    def write(page: Page) -> None:
        nonlocal is_written
        write_page(page, path)
        is_written = True
        if not output.is_silent:
            note(f"report: {escape_name(path)}")

    write_page(unfinished_page(command, subject), path)
    try:
        yield write
    except BaseException as error:
        if not is_written:  # afterwards, only printing can fail
            with suppress(CkptError):
                write_page(failed_page(command, subject, error), path)
        raise
