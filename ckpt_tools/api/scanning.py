"""`scan`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated

from ckpt_tools.formats.scan import Scan, scan_place
from ckpt_tools.options import AnyPath, Argument, takes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """The options of `scan`."""

    source: Annotated[AnyPath, Argument("Any file or directory, or a repository of the hub.", "SRC")] = field(
        kw_only=False
    )


@takes(ScanOptions)
def scan(options: ScanOptions) -> Scan:
    """List what the files of a checkpoint would run: names in pickles, code. Nothing of it is executed.

    Raises:
        UnreadableError: There is no such file or directory.
    """
    return scan_place(os.fspath(options.source))
