"""`ckpt env`."""

from __future__ import annotations

import platform
from importlib import metadata

from ckpt_tools._version import __version__
from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_json, say

_PACKAGES = (
    "torch", "safetensors", "huggingface-hub", "typer", "tqdm", "rich", "pyyaml", "numpy", "isal", "xxhash",
    "transformers", "accelerate", "peft",
)  # fmt: skip


def env(json: options.Json = False) -> int:
    """Print versions, for a bug report."""
    facts: dict[str, str | None] = {
        "ckpt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = None
    if json:
        print_json({"env": facts})
    else:
        for name, version in facts.items():
            say(f"{name:<16} {version or 'not installed'}")
    return 0
