"""What every command prints: results on stdout, everything else on stderr; JSON when asked for."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from ckpt_tools.errors import CkptError
from ckpt_tools.options import AnyPath, ProgressFactory
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.results import SCHEMA_VERSION
from ckpt_tools.text import counted, escape_name, first_few
from ckpt_tools.units import format_duration, format_size

if TYPE_CHECKING:
    from ckpt_tools.checkpoint.entries import Finding
    from ckpt_tools.checkpoint.identity import Identity
    from ckpt_tools.cli.views.page import Page


PLAIN_INTERVAL_S = 30.0  # Seconds between progress lines when stderr is not a terminal


def print_json(document: Mapping[str, object]) -> None:
    """Print the one JSON document of a command."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **document}))  # noqa: T201


def say(text: str = "") -> None:
    """Print a line of the result."""
    print(text)  # noqa: T201


def note(text: str) -> None:
    """Print a line that is not the result."""
    print(text, file=sys.stderr)  # noqa: T201


def note_identities(identities: Sequence[Identity], output: OutputOptions) -> None:
    """Print what was opened, and how it is known to be whole or a part."""
    for number, identity in enumerate(identities):
        if not output.quiet:
            side = f"{'AB'[number]}: " if len(identities) > 1 else ""
            note(side + identity.title + (f" ({first_few(identity.evidence, 2)})" if identity.evidence else ""))


def error_json(error: CkptError) -> dict[str, object]:
    """Return what a JSON document says of an error."""
    parts = {"code": error.code, "what": error.what, "where": error.where, "hint": error.hint}
    return {"error": parts, "exit_code": error.exit_code}


def print_error(error: CkptError, *, as_json: bool) -> None:
    """Print an error in its three parts."""
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, **error_json(error)}
        note(json.dumps(document))
        return
    note(f"error: {error.what}")
    if error.where is not None:
        note(f"   at: {error.where}")
    if error.hint is not None:
        note(f" hint: {error.hint}")
    print_notes(error)


def say_findings(findings: Sequence[Finding], *, most: int | None = None, indent: str = "") -> None:
    """Print findings as part of the result, `most` of them at most."""
    shown = findings[:most]
    for finding in shown:
        say(f"{indent}{finding.severity}: {finding.code}: {finding.what}")
        say(f"{indent}   at: {finding.where}")
        if finding.hint is not None:
            say(f"{indent} hint: {finding.hint}")
    if len(shown) < len(findings):
        say(f"{indent}… and {counted(len(findings) - len(shown), 'finding')} more (-v shows all)")


def print_notes(error: BaseException) -> None:
    """Print what was added to an error on its way up."""
    for text in getattr(error, "__notes__", ()):
        note(f" note: {text}")


class ChangingLine:
    """One line of stderr that changes; only on a terminal."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._is_open = False

    def show(self, text: str) -> None:
        """Write it anew."""
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._is_open = True

    def close(self) -> None:
        """Take it away."""
        if self._is_open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_open = False


@contextmanager
def waiting(output: OutputOptions, what: str) -> Iterator[None]:
    """Show for how long a command without a total has gone on: from its third second on a terminal, else every 30 s."""
    if output.is_silent:
        yield
        return
    is_live = sys.stderr.isatty()
    line, ended, start = ChangingLine(shown=is_live), threading.Event(), time.monotonic()

    def tell() -> None:
        pause = 2.0 if is_live else PLAIN_INTERVAL_S
        while not ended.wait(pause):
            text = f"{what}: {format_duration(time.monotonic() - start)}"
            if is_live:
                line.show(text)
            else:
                note(text)
            pause = 1.0 if is_live else PLAIN_INTERVAL_S

    teller = threading.Thread(target=tell, name="ckpt-waiting", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        line.close()


@contextmanager
def progress_of(output: OutputOptions) -> Iterator[ProgressFactory | None]:
    """Yield what makes progress receivers for `--progress MODE`."""
    if output.is_silent or output.progress == "none":
        yield None
        return
    if not output.has_bars:
        yield _plain
        return
    from tqdm import tqdm

    bars: list[tqdm[NoReturn]] = []

    def start(total: int) -> Callable[[int], None]:
        bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, leave=False)
        bars.append(bar)

        def advance(nbytes: int) -> None:
            bar.update(nbytes)

        return advance

    try:
        yield start
    finally:
        for bar in bars:
            bar.close()


def _plain(total: int) -> Callable[[int], None]:
    """A line every 30 s: `12.4/48.0 GiB 26% 1.1 GiB/s ETA 0:00:32`."""
    lock = threading.Lock()
    start = last = time.monotonic()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done, last
        with lock:
            done += nbytes
            now = time.monotonic()
            if now - last < PLAIN_INTERVAL_S:
                return
            last = now
            rate = done / (now - start)
            left = format_duration((total - done) / rate)
            share = 100 * done // max(total, 1)
            note(f"{format_size(done)}/{format_size(total)} {share}% {format_size(rate)}/s ETA {left}")

    return advance


# `--html FILE`: the result of a command as a page, beside what it prints.


@contextmanager
def report_to(
    html: AnyPath | None, command: str, subject: str, output: OutputOptions
) -> Iterator[Callable[[Page], None] | None]:
    """Yield what writes the command's page; None without `--html`.

    From here on the file tells of this run: that it is not finished, what it came to, or why it failed.
    """
    if html is None or os.environ.get("RANK", "0") != "0":  # under torchrun, only rank 0 speaks
        yield None
        return
    from ckpt_tools.cli.views.write import failed_page, unfinished_page, write_page

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
