"""The scripts behind bin/, for tests: they import one another by bare names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

LIB = Path(__file__).resolve().parents[1] / "bin" / "lib"


def bin_modules(*names: str, directory: Path = LIB) -> list[Any]:
    """Import modules of a directory of scripts, without leaving it on the path."""
    sys.path.insert(0, str(directory))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(directory))
