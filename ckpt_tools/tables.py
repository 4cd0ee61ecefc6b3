"""Tables of the package: text files beside the modules that read them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache


def read_packaged(package: str, name: str) -> str:
    """Return the text of a file of a package."""
    path = os.path.join(os.path.dirname(__file__), *package.split(".")[1:], name)  # importlib.resources costs 10 ms
    with open(path, encoding="utf-8") as file:
        return file.read()


@cache
def read_rows(package: str, name: str) -> tuple[Mapping[str, str], ...]:
    """Return the rows of a table of a package; its first line names the columns."""
    lines = read_packaged(package, name).splitlines()
    head, *rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return tuple(dict(zip(head, row, strict=True)) for row in rows)
