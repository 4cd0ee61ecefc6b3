"""Standard streams that may be closed, full or abandoned: what is lost is said, and nothing else breaks.

What goes to stderr (progress, notes, errors) is not what a command was run for: losing it changes nothing. What goes to
stdout is, so losing it is an error; one that says whether the work itself is done (`complete`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from ckpt_tools.errors import CkptError


class OutputError(CkptError):
    """stdout did not take what was printed."""

    code = "output"


class _Stream:
    """A text stream that acts on failure; in everything else the stream below it."""

    def __init__(self, stream: TextIO | None) -> None:
        self.below: Any = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream below has
        return getattr(self.below, name)

    def write(self, text: str) -> int:
        """Write as `TextIO.write` does."""
        if text == "":  # click's way to find out what kind of stream this is; it swallows what that raises
            return 0
        try:
            return int(self.below.write(text))
        except (OSError, ValueError) as error:  # ValueError: closed by somebody
            if isinstance(error, UnicodeError):
                raise
            self._give_up()
            self._fail(error)
            return len(text)

    def flush(self) -> None:
        """Flush as `TextIO.flush` does."""
        try:
            self.below.flush()
        except (OSError, ValueError) as error:
            self._give_up()
            self._fail(error)

    def _fail(self, error: OSError | ValueError) -> None:
        """Act on a failure; what is lost on stderr is lost."""

    def _give_up(self) -> None:
        """Let what is still buffered go nowhere: Python would meet the same error once more when it exits."""
        with contextlib.suppress(OSError, ValueError):
            number = self.below.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


class _ResultStream(_Stream):
    """stdout."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream)
        self._is_closed = stream is None

    def write(self, text: str) -> int:
        if self._is_closed and text != "":
            raise OutputError("the output could not be written: stdout is closed", where="stdout")
        return super().write(text)

    def _fail(self, error: OSError | ValueError) -> None:
        text = error.strerror if isinstance(error, OSError) else None
        raise OutputError(f"the output could not be written: {text or error}", where="stdout") from error


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Print through streams that may fail, as this module says."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _ResultStream(sys.stdout), _Stream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def complete(what: str) -> Iterator[None]:
    """Print the result of work that is done: when that fails, the error says that `what` is complete."""
    try:
        yield
        sys.stdout.flush()
    except OutputError as error:
        error.hint = f"{what} is complete; only the output could not be written"
        raise


def occupy_descriptors() -> None:
    """Open what is closed of stdin, stdout and stderr: a data file must not get such a number, and be printed into."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
