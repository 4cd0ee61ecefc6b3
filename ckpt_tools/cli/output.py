"""What every command prints: results on stdout, everything else on stderr; JSON when asked for."""

from __future__ import annotations

import json
import os
import shutil
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
        self.is_shown = shown and sys.stderr.isatty()
        self._is_open = False

    def show(self, text: str) -> None:
        """Write it anew."""
        if self.is_shown:
            sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()
            self._is_open = True

    def close(self) -> None:
        """Take it away."""
        if self._is_open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_open = False


@contextmanager
def waiting(output: OutputOptions, what: str) -> Iterator[Callable[[str], None]]:
    """Show for how long a command without a total has gone on: from its third second on a terminal, else every 30 s.

    Yields what changes the words before the time.
    """
    line, ended, start = ChangingLine(shown=not output.is_silent), threading.Event(), time.monotonic()

    def say_instead(text: str) -> None:
        nonlocal what
        what = text

    if output.is_silent:
        yield say_instead
        return

    def tell() -> None:
        pause = 2.0 if line.is_shown else PLAIN_INTERVAL_S
        while not ended.wait(pause):
            (line.show if line.is_shown else note)(f"{what}: {format_duration(time.monotonic() - start)}")
            pause = 1.0 if line.is_shown else PLAIN_INTERVAL_S

    teller = threading.Thread(target=tell, name="ckpt-waiting", daemon=True)
    teller.start()
    try:
        yield say_instead
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
        yield _Plain
        return
    from tqdm import tqdm

    bars: list[tqdm[NoReturn]] = []

    class TransferBar:
        def __init__(self, total: int) -> None:
            self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, leave=False)
            bars.append(self._bar)

        def __call__(self, nbytes: int) -> None:
            self._bar.update(nbytes)

        def count(self, what: str, number: int, total: int) -> None:
            self._bar.set_postfix_str(f"{what} {number:,} of {total:,}", refresh=False)

    try:
        yield TransferBar
    finally:
        for bar in bars:
            bar.close()


class _Plain:
    """Prints how far a command is, every 30 s: `12.4/48.0 GiB 26% 1.1 GiB/s ETA 0:00:32, tensor 120 of 291`."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._counted, self._lock = total, 0, "", threading.Lock()
        self._start = self._last = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._last < PLAIN_INTERVAL_S:
                return
            self._last = now
            rate, share = self._done / (now - self._start), 100 * self._done // max(self._total, 1)
            left = f" ETA {format_duration((self._total - self._done) / rate)}" if rate else ""
            held = f"{format_size(self._done)}/{format_size(self._total)} {share}% {format_size(rate)}/s"
            note(f"{held}{left}{self._counted}")

    def count(self, what: str, number: int, total: int) -> None:
        """Take how many of something are done."""
        self._counted = f", {what} {number:,} of {total:,}"


# `--html FILE`: the result of a command as a page, beside what it prints.


@contextmanager
def report_to(
    html: AnyPath | None, command: str, subject: str, output: OutputOptions
) -> Iterator[Callable[[Callable[[], Page]], None]]:
    """Yield what makes and writes the command's page; without `--html` it does nothing.

    From here on the file tells of this run: that it is not finished, what it came to, or why it failed.
    """
    if html is None or os.environ.get("RANK", "0") != "0":  # under torchrun, only rank 0 speaks
        yield lambda _: None
        return
    from ckpt_tools.cli.views.write import failed_page, unfinished_page, write_page

    path = os.fspath(html)
    is_written = False

    def write(make: Callable[[], Page]) -> None:
        nonlocal is_written
        write_page(make(), path)
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
