"""The command line: parse, call one `api` function, render. The only place that knows typer."""

from __future__ import annotations

import gc
import os
import sys

from ckpt_tools.cli.streams import occupy_descriptors

__all__ = ["main", "run"]


def main(argv: list[str] | None = None) -> int:
    """Run one command, by default with the arguments of the process, and return its exit code."""
    try:
        from ckpt_tools.cli.app import run_command

        return run_command(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # while the program was still loading
        return 130


def run() -> None:
    """Entry point of the installed scripts."""
    # A checkpoint is millions of small objects that stay, none in a cycle; to look for cycles took a fifth of the time.
    gc.set_threshold(200_000, 20, 100)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # workers run side by side: numpy makes none of its own
    occupy_descriptors()
    code = main()
    gc.freeze()  # Python looks once more when it ends
    sys.exit(code)
