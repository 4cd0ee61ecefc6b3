"""Every error that ckpt raises on purpose.

    CkptError                      exit 1   I/O, faults, anything that failed
    ├── StorageError               exit 1   the system could not read or write
    │   └── UnreachableError       exit 1   another machine refused, or could not be reached
    ├── HubError                   exit 1   the hub refused, could not be reached, or answered nonsense
    ├── UsageError                 exit 2   options, impossible meshes or rules
    │   └── RefusedConfigError     exit 2   a config.json that ckpt does not build a model of
    ├── UnreadableError            exit 4   not a complete, readable checkpoint
    │   ├── MissingError           exit 4   there is nothing; also a FileNotFoundError
    │   ├── LimitError             exit 4   readable perhaps, but beyond a safety limit
    │   ├── UnsupportedError       exit 4   sound as far as is known, and of a kind that ckpt does not read
    │   ├── PartError              exit 4   a part of a model, where a whole one is wanted
    │   └── ForeignLayoutError     exit 4   a trainer's own layout, which ckpt does not read
    └── DestinationExistsError     exit 5   the destination is already there; also a FileExistsError

Findings (exit 3) are values, not errors: see `checkpoint.Finding`.
"""

from __future__ import annotations

from typing import ClassVar

from ckpt_tools.text import escape_message


class CkptError(Exception):
    """An error in three parts. Names from files are escaped here, and nowhere before.

    Args:
        what: What happened, with the expected and the found value.
        where: The file, span, tensor or option concerned.
        hint: What to do about it, in the user's own terms.
        file: The file of tensors that is damaged, as it is called; never shown.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "failed"
    finding: ClassVar[str] = ""
    """Code of the finding that it becomes in a check that goes on; "" leaves it to the check."""

    def __init__(
        self, what: str, *, where: str | None = None, hint: str | None = None, file: str | None = None
    ) -> None:
        self.what = escape_message(what)
        self.where = None if where is None else escape_message(where)
        self.hint = None if hint is None else escape_message(hint)
        self.file = file
        super().__init__(self.what)

    def __str__(self) -> str:
        """All three parts on one line, for logs and tracebacks."""
        parts = [self.what]
        if self.where is not None:
            parts.append(f"at: {self.where}")
        if self.hint is not None:
            parts.append(f"hint: {self.hint}")
        return "; ".join(parts)


class StorageError(CkptError):
    """The system could not read or write: disk full, I/O error, no permission."""

    code = "io"


class UnreachableError(StorageError):
    """Another machine refused, or could not be reached: this tells nothing of what it holds."""

    code = "unreachable"


class HubError(CkptError):
    """The hub refused a request, could not be reached, or gave an unexpected response."""

    code = "hub"


class UsageError(CkptError):
    """Invalid arguments: bad option, impossible mesh, rule that matches nothing."""

    exit_code = 2
    code = "usage"


class RefusedConfigError(UsageError):
    """A config.json reaches for files, code or hosts, or asks for absurd sizes."""

    code = "refused-config"


class UnclearLossError(UsageError):
    """Forward returns several things that might be the loss, or none where the user says."""

    code = "unclear-loss"


class UnreadableError(CkptError):
    """The source is not a complete, readable checkpoint."""

    exit_code = 4
    code = "unreadable"


class MissingError(UnreadableError, FileNotFoundError):
    """There is nothing at a path that a source was expected at."""


class LimitError(UnreadableError):
    """The source asks for more than a documented safety limit allows."""

    code = "limit"


class UnsupportedError(UnreadableError):
    """The source holds something that ckpt does not read: that tells nothing of its health."""

    code = finding = "unsupported"


class PartError(UnreadableError):
    """The source is a known part of a model, and nobody asked for a part."""

    code = "part"
    by_names = False
    """As of `Identity`."""


class ForeignLayoutError(UnreadableError):
    """The source is in a layout that some trainer reads, and ckpt does not."""


class DestinationExistsError(CkptError, FileExistsError):
    """The destination exists and `--overwrite` was not given."""

    exit_code = 5
    code = "destination-exists"
