"""`python -m ckpt_tools`: as `ckpt`, which takes no module from the current directory."""

from __future__ import annotations

import os
import sys

_HOME = os.path.dirname(os.path.dirname(__file__))

if __name__ == "__main__":
    here = sys.path[0]  # of -m the current directory, which may be a checkpoint
    if not sys.flags.safe_path and os.path.isdir(here) and os.path.samefile(here, os.curdir):
        del sys.path[0]
        if os.path.samefile(here, _HOME):  # a checkout, where children look for ckpt as well
            sys.path.append(here)
    from ckpt_tools.cli import run

    run()
