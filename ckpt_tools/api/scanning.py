"""`scan`."""

from __future__ import annotations

import os

from ckpt_tools.formats.scan import Scan, scan_place
from ckpt_tools.options import takes
from ckpt_tools.options.check import ScanOptions


@takes(ScanOptions)
def scan(options: ScanOptions) -> Scan:
    """List what the files of a checkpoint would run: names in pickles, code. Nothing of it is executed.

    Raises:
        UnreadableError: There is no such file or directory.
    """
    return scan_place(os.fspath(options.source))
