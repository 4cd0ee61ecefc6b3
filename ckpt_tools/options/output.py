"""Options of every command: how it shows its result."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckpt_tools.options import AnyPath, Argument, Option

Json = Annotated[bool, Option("Print one JSON document on stdout.", env=True)]
Html = Annotated[AnyPath | None, Option("HTML report to write as well: one self-contained file.", metavar="FILE")]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How a command shows its result."""

    progress: Annotated[Literal["auto", "bar", "plain", "none"], Option("Progress on stderr.", env=True)] = "auto"
    """Only where the library tells of it."""
    json: Json = False
    quiet: Annotated[bool, Option("Print errors only.", short="-q", env=True)] = False
    verbose: Annotated[bool, Option("Print more detail, and tracebacks of failures.", short="-v", env=True)] = False

    storage: Annotated[
        Sequence[str],
        Option("Setting of object stores by obstore's name, e.g. region=eu-west-1 (repeatable).", metavar="KEY=VALUE"),
    ] = ()
    patience: Annotated[
        str, Option("Longest outage of a store, the hub or a server that is waited out.", metavar="DURATION", env=True)
    ] = "170s"

    @property
    def is_silent(self) -> bool:
        """Nothing is told on the way."""
        return self.quiet or self.json

    @property
    def has_bars(self) -> bool:
        """Progress is drawn, and not told line by line."""
        wanted = self.progress == "bar" or (self.progress == "auto" and sys.stderr.isatty())
        return wanted and not self.is_silent


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """The options of `ckpt env`."""

    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpOptions:
    """What `ckpt help` is asked about."""

    topic: Annotated[str | None, Argument("Command or topic (default: the list of topics).", "TOPIC")] = field(
        default=None, kw_only=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlOptions:
    """A command that shows nothing else of its own."""

    html: Html = None
