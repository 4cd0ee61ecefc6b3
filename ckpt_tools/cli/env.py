"""`ckpt env`."""

from __future__ import annotations

import platform

from ckpt_tools._version import __version__
from ckpt_tools.cli.output import print_json, say
from ckpt_tools.floors import FLOORS, TESTED_TORCH, installed_release, is_older
from ckpt_tools.options.output import EnvOptions

_PACKAGES = (
    "torch", "safetensors", "huggingface-hub", "typer", "tqdm", "rich", "pyyaml", "numpy", "isal", "xxhash",
    "transformers", "accelerate", "peft", "diffusers", "bitsandbytes",
)  # fmt: skip


def run(options: EnvOptions) -> int:
    """Print the versions of what ckpt works with."""
    facts: dict[str, str | None] = {
        "ckpt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _PACKAGES:
        facts[name] = installed_release(name)
    too_old = {
        name: ".".join(map(str, oldest))
        for name, oldest in FLOORS.items()
        if (version := facts[name]) is not None and is_older(version, oldest)
    }
    if options.json:
        print_json({"env": facts, "too_old": too_old, "tested_torch": list(TESTED_TORCH)})
    else:
        for name, version in facts.items():
            why = f"  (too old: ckpt needs {too_old[name]})" if name in too_old else ""
            say(f"{name:<16} {version or 'not installed'}{why}")
        say(f"{'tested with':<16} torch {TESTED_TORCH[0]} to {TESTED_TORCH[1]}")
    return 0
