"""The oldest releases that the commands which need a library work with. Looked at before the library is imported.

Source: `bin/compat`, which runs every release of docs/dev/compatibility.md; pyproject.toml requires the same.
"""

from __future__ import annotations

import re

from ckpt_tools.errors import UsageError

FLOORS = {"torch": (2, 10), "transformers": (5, 18), "peft": (0, 21), "bitsandbytes": (0, 50), "diffusers": (0, 42)}
"""Library → oldest release."""
NF4_TORCH = (2, 12)  # Older ones cannot shard what holds no floating-point numbers
TESTED_TORCH = ("2.10", "2.15")  # Oldest and newest release that everything was run with


def refuse_older(library: str, what: str, oldest: tuple[int, ...] | None = None) -> None:
    """Refuse a release that is too old, before it fails in a way that would be blamed on the user's model.

    A library that is not installed, or whose release cannot be read, passes: its import has an error of its own.
    `oldest` is the release of `FLOORS` by default.
    """
    oldest = oldest or FLOORS[library]
    installed = installed_release(library)
    if installed is None or not is_older(installed, oldest):
        return
    needed = ".".join(map(str, oldest))
    raise UsageError(
        f"{library} {installed} is installed; {what} needs {needed} or newer", hint=f"pip install '{library}>={needed}'"
    )


def installed_release(library: str) -> str | None:
    """Return the version of an installed library, without importing it."""
    from importlib import metadata  # takes 10 ms

    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def is_older(version: str, oldest: tuple[int, ...]) -> bool:
    """Is a version older than a release? Pre-releases and nightly builds of that release are not."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return numbers is not None and tuple(int(part) for part in numbers[0].split(".")) < oldest
