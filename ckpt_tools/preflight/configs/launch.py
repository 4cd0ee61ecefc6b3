"""How many ranks a launcher's command line starts.

Source: `torchrun` (torch.distributed.run: `--nproc-per-node`, `--nnodes`), the `deepspeed` launcher (`--num_gpus`,
`--num_nodes`), `accelerate launch --num_processes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ckpt_tools.checkpoint import Finding
from ckpt_tools.text import escape_name

_PER_NODE = ("--nproc-per-node", "--nproc_per_node")
_NODES = ("--nnodes",)


def launched_ranks(commands: Iterable[Sequence[str]]) -> int | None:
    """Return the ranks that the first launcher among `commands` starts; None where there is none or it does not say."""
    for command in commands:
        names = [os.path.basename(word) for word in command]
        if "torchrun" in names or "torch.distributed.run" in command:
            return _product(command, _PER_NODE, _NODES)
        if "deepspeed" in names:
            return _product(command, ("--num_gpus",), ("--num_nodes",))
        if "accelerate" in names and "launch" in names:
            return _product(command, ("--num_processes", "--num-processes"), ())
    return None


def several_commands(path: str) -> Finding:
    """Return the finding on a script that starts more than one trainer."""
    return Finding(
        code="several-commands",
        severity="warning",
        where=escape_name(path),
        what="the script starts more than one trainer; the first one is checked",
        hint="check each in a file of its own",
    )


def _product(command: Sequence[str], per_node: tuple[str, ...], nodes: tuple[str, ...]) -> int | None:
    ranks = _number(command, per_node)
    if ranks is None:
        return None
    # A range of nodes, `1:4`, or a variable: nobody knows.
    count = _number(command, nodes) if _has(command, nodes) else 1
    return None if count is None else ranks * count


def _has(command: Sequence[str], names: tuple[str, ...]) -> bool:
    return any(word.partition("=")[0] in names for word in command)


def _number(command: Sequence[str], names: tuple[str, ...]) -> int | None:
    for i, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else command[i + 1] if i + 1 < len(command) else ""
            return int(text) if text.isdecimal() and 0 < int(text[:9]) == int(text[:12]) else None
    return None
