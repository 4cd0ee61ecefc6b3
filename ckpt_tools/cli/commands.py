"""The table of commands, in the order in which --help shows them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

COMMANDS: dict[str, str] = {
    "inspect": "inspect",
    "shard": "shard",
    "gather": "gather",
    "reshard": "shard",
    "verify": "verify",
    "diff": "diff",
    "smoke": "smoke",
    "estimate": "estimate",
    "preflight": "preflight",
    "export-lora": "export_lora",
    "merge-lora": "merge_lora",
    "check-lora": "check_lora",
    "push": "push",
    "env": "env",
}
"""Name → module of this package that holds the function of that name. Loaded on use: nobody waits for the others."""


def load(name: str) -> Callable[..., int]:
    """Return the function of a command."""
    module = import_module(f"ckpt_tools.cli.{COMMANDS[name]}")
    return cast("Callable[..., int]", getattr(module, name.replace("-", "_")))
