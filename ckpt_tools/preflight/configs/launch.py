"""How many ranks a launcher's command line starts.

Source: `torchrun` (torch.distributed.run: `--nproc-per-node`, `--nnodes`), the `deepspeed` launcher (`--num_gpus`,
`--num_nodes`), `accelerate launch --num_processes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.configs.options import is_variable

_PER_NODE = ("--nproc-per-node", "--nproc_per_node")
_NODES = ("--nnodes",)


def launched_ranks(commands: Iterable[Sequence[str]]) -> int | None:
    """Return the ranks that the first launcher among `commands` starts; None where there is none or it does not say."""
    found = _launcher(commands)
    if found is None:
        return None
    command, per_node, nodes = found
    # A range of nodes, `1:4`, or a variable: nobody knows.
    has_nodes = any(word.partition("=")[0] in nodes for word in command)
    ranks, count = _number(command, per_node), _number(command, nodes) if has_nodes else 1
    return None if ranks is None or count is None else ranks * count


def unread_ranks(commands: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the options of the first launcher that say how many ranks there are in variables."""
    found = _launcher(commands)
    if found is None:
        return ()
    command, per_node, nodes = found
    return tuple(
        word.partition("=")[0]
        for word, after in pairwise((*command, ""))
        if word.partition("=")[0] in (*per_node, *nodes) and is_variable(word.partition("=")[2] or after)
    )


def _launcher(commands: Iterable[Sequence[str]]) -> tuple[Sequence[str], tuple[str, ...], tuple[str, ...]] | None:
    """Return the first launcher's command, and its options for the ranks of a node and for the nodes."""
    for command in commands:
        names = [os.path.basename(word) for word in command]
        if "torchrun" in names or "torch.distributed.run" in command:
            return command, _PER_NODE, _NODES
        if "deepspeed" in names:
            return command, ("--num_gpus",), ("--num_nodes",)
        if "accelerate" in names and "launch" in names:
            return command, ("--num_processes", "--num-processes"), ()
    return None


def programs(command: Sequence[str]) -> tuple[str, ...]:
    """Return the modules and scripts that a command starts with python or one of the launchers."""
    return tuple(
        word for before, word in pairwise(("", *command)) if before in ("-m", "--module") or word.endswith(".py")
    )


def several_commands(path: str) -> Finding:
    """Return the finding on a script that starts more than one trainer."""
    return Finding.warning(
        "several-commands",
        path,
        "the script starts more than one trainer; the first one is checked",
        "check each in a file of its own",
    )


def lost_options(commands: Iterable[Sequence[str]], is_option: Callable[[str], bool]) -> tuple[Finding, ...]:
    """Return the finding on options that the shell takes for a command of their own."""
    lost = [command[0] for command in commands if is_option(command[0])]
    if not lost:
        return ()
    return (
        Finding.error(
            "lost-option",
            lost[0],
            "the line before it ends the command (a comment, or no backslash): the shell runs it on its own",
            "move the comment above the command, and end each line with a backslash",
        ),
    )


def _number(command: Sequence[str], names: tuple[str, ...]) -> int | None:
    for i, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else command[i + 1] if i + 1 < len(command) else ""
            return int(text) if text.isdecimal() and 0 < int(text[:9]) == int(text[:12]) else None
    return None
