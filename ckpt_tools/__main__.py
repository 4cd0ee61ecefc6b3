"""`python -m ckpt_tools`."""

from __future__ import annotations

from ckpt_tools.cli import run

if __name__ == "__main__":
    run()
