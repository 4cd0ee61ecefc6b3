"""What a launcher's command line starts: with how many ranks, which program, which config and which options.

Source: `torchrun` (torch.distributed.run: `--nproc-per-node`, `--nnodes`), the `deepspeed` launcher (`--num_gpus`,
`--num_nodes`), accelerate 1.15 `commands/launch.py:launch_command_parser`, srun(1) (`--ntasks`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.configs.document import Document, find_file, folders_of, parse_document, read_document
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.overrides import overridden, read_flags
from ckpt_tools.preflight.places import PlacedText
from ckpt_tools.preflight.plain_values import is_variable

_PER_NODE = ("--nproc-per-node", "--nproc_per_node")
_NODES = ("--nnodes",)
_TASKS = ("--ntasks", "-n")
_LAUNCHERS: Mapping[str, str] = {
    **dict.fromkeys(("torchrun", "torch.distributed.run"), "torchrun"),
    "deepspeed": "deepspeed",
    **dict.fromkeys(("accelerate", "accelerate.commands.launch", "accelerate-launch"), "accelerate"),
    "srun": "srun",
}
_CLIS: Mapping[str, tuple[str, ...]] = {
    "trl": ("sft", "dpo", "grpo", "kto", "reward", "rloo"),
    "axolotl": ("train", "preprocess"),
    "llamafactory-cli": ("train",),
    "lmf": ("train",),
}
"""Program → what it is asked to do, where it trains."""
_OWN_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_CONFIG_OPTIONS = ("config", "config_file", "job.config_file", "cfg", "config_path")
_ENDINGS = (".yaml", ".yml", ".json", ".toml")
_SECTIONS = {"fsdp_": "fsdp_config", "parallelism_config_": "parallelism_config"}
_OF_DEEPSPEED = ("zero_", "offload_", "deepspeed_", "gradient_accumulation_steps", "gradient_clipping")
_KINDS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
"""Switch of `accelerate launch` → the `distributed_type` that it means."""


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A command that starts a program, with a launcher or without."""

    command: tuple[str, ...]
    launcher: str
    options: tuple[str, ...]
    arguments: tuple[str, ...]


def find_launches(commands: Iterable[Sequence[str]]) -> tuple[LaunchLine, ...]:
    """Return the commands that start a program which may train."""
    found = []
    for command in commands:
        names = [os.path.basename(word) for word in command]
        at = next((at for at in range(len(command)) if _is_program(command, names, at)), None)
        if at is None:
            continue
        launcher = next((_LAUNCHERS[name] for name in _LAUNCHERS if name in names[:at]), "")
        begin = next((at + 1 for at, name in enumerate(names[:at]) if _LAUNCHERS.get(name) == launcher), 0)
        first = at + (2 if names[at] in _CLIS else 1)
        found.append(LaunchLine(tuple(command), launcher, tuple(command[begin:at]), tuple(command[first:])))
    return tuple(found)


def _is_program(command: Sequence[str], names: Sequence[str], at: int) -> bool:
    word, before, after = command[at], command[at - 1] if at else "", command[at + 1 : at + 2]
    if before in ("-m", "--module"):
        return word not in _OWN_MODULES
    if names[at] in _CLIS:
        return bool(after) and after[0] in _CLIS[names[at]]
    return word.endswith(".py")


def launched_documents(document: Document) -> tuple[Document, ...]:
    """Return the configs of the run that a script starts, accelerate's before the trainer's; () if none may train."""
    launches = [one for one in find_launches(document.commands) if one.launcher or _config_of(one.arguments)]
    if not launches:
        return ()
    launch = launches[0]
    base = replace(document, commands=(launch.command,))
    found = [_trainer(base, launch)]
    if launch.launcher == "accelerate":
        found.insert(0, _accelerate(base, launch))
    if len(launches) > 1:
        found[-1] = replace(found[-1], starts_more=document.path)
    return tuple(found)


def _trainer(base: Document, launch: LaunchLine) -> Document:
    """Return the config of the program: a file with what overrides it, or options alone."""
    found = _config_of(launch.arguments)
    if found is None:
        values, unread = read_flags(launch.arguments)
        return replace(base, values=values, words_unread=unread)
    name, rest = found
    of_script = {field: getattr(base, field) for field in ("commands", "assumed", "absent", "num_tasks")}
    return overridden(replace(_named(base, name), **of_script), rest)


def _accelerate(base: Document, launch: LaunchLine) -> Document:
    """Return the config of `accelerate launch`: its file, with what its options override."""
    options, _ = read_flags([word for word in launch.options if word not in ("-m", "--module")])
    options = {name: True if name in _KINDS else value for name, value in options.items()}
    name = options.pop("config_file", None)
    document = replace(base, values={}, commands=(), assumed=(), absent=())
    if isinstance(name, str):
        document = _named(base, name)
    words: list[str] = []
    for option, value in options.items():
        kind = _KINDS.get(option)
        section = next((section for prefix, section in _SECTIONS.items() if option.startswith(prefix)), None)
        if section is None and option.startswith(_OF_DEEPSPEED):
            section = "deepspeed_config"
        if not (kind or section or option in known("accelerate", "config")):
            continue  # of the launcher alone
        key = "distributed_type" if kind else f"{section}.{option}" if section else option
        place = next((one for one in launch.options if one.lstrip("-").replace("-", "_").startswith(option)), "")
        words.append(PlacedText(f"--{key}={kind or value}", getattr(place, "place", None)))
    if name is None and not set(_KINDS) & options.keys():
        # What `accelerate config` may have written on that machine is not known.
        words.append("--distributed_type=" + ("NO" if options.get("num_processes") == "1" else "MULTI_GPU"))
        document = replace(document, assumed=("ACCELERATE_CONFIG_FILE",))
    return overridden(document, words)


def _named(base: Document, name: str) -> Document:
    """Return a file that a command names: one that the script writes, or that lies beside it."""
    where = str(getattr(name, "place", None) or base.path)
    hint = "write the path itself, or pass the configs: ckpt preflight accelerate.yaml args.yaml"
    if is_variable(name):
        raise UsageError(f"the script does not contain the config {name}", where=where, hint=hint)
    plain = name.removeprefix("./")
    written = {key.removeprefix("./"): text for key, text in base.written.items()}
    if plain in written:
        text = written[plain]
        if text is None:
            raise UsageError(f"the script modifies its config {name} while it runs", where=where, hint=hint)
        return replace(parse_document(text, name), path=f"{base.path} ({name})")
    place = find_file(name, folders_of(base.path))
    if place is None:
        raise UsageError(f"the config {name} does not exist here", where=where, hint=hint)
    return replace(read_document(place), files=(*base.files, base.path))


def _config_of(arguments: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the config that a program is given, and its other arguments."""
    for at, (before, word) in enumerate(pairwise(("", *arguments))):
        name, equals, value = word.partition("=")
        option = (before if not equals else name).lstrip("-").replace("-", "_")
        text = value if equals else word
        is_file = text.endswith(_ENDINGS) or is_variable(text)
        if is_file and (before if not equals else name).startswith("-") and option in _CONFIG_OPTIONS:
            return text, (*arguments[: at - (not equals)], *arguments[at + 1 :])
        if text.endswith(_ENDINGS) and not before.startswith("--") and not equals:
            return text, (*arguments[:at], *arguments[at + 1 :])
    return None


def launched_ranks(commands: Iterable[Sequence[str]], tasks: int | None = None) -> int | None:
    """Return the ranks that the first launcher starts, None where it does not say; srun's default is `tasks`."""
    found = _launcher(commands)
    if found is None:
        return None
    command, per_node, nodes = found
    if per_node == _TASKS and not any(word.partition("=")[0] in _TASKS for word in command):
        return tasks
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
        if "srun" in names:
            return command, _TASKS, ()
    return None


_MEETING = ("--rdzv-endpoint", "--rdzv_endpoint", "--master-addr", "--master_addr")
_RANKS = ("--node-rank", "--node_rank")
_STATIC = ("--master-addr", "--master_addr")
_WHERE = "--rdzv-backend c10d --rdzv-endpoint HOST:29500, or PET_RDZV_ENDPOINT and PET_RDZV_BACKEND in the environment"


def check_meeting(commands: Iterable[Sequence[str]]) -> tuple[Finding, ...]:
    """Return what is wrong with where the machines of a torchrun meet.

    Source: `torch.distributed.run` (`get_args_parser`: `env` reads PET_…; `config_from_args`: with the static
    rendezvous each machine needs its rank; `run`: standalone is of this machine alone).
    """
    found = _launcher(commands)
    if found is None or found[1] != _PER_NODE:
        return ()
    command = found[0]
    nodes, given = _number(command, _NODES), {word.partition("=")[0] for word in command}
    if nodes is None or nodes < 2:
        return ()
    where = next(word for word in command if word.partition("=")[0] in _NODES)
    if "--standalone" in given:
        what = f"{nodes} machines with --standalone: each starts a separate run"
        return (Finding.error("meeting", where, what, f"replace --standalone by {_WHERE}"),)
    if given.isdisjoint(_MEETING):
        what = f"{nodes} machines without a rendezvous address: each waits for the others on itself"
        return (Finding.warning("meeting", where, what, _WHERE),)
    is_static = not given.isdisjoint(_STATIC) and given.isdisjoint(("--rdzv-endpoint", "--rdzv_endpoint"))
    if is_static and given.isdisjoint((*_RANKS, "--rdzv-backend", "--rdzv_backend")):
        what = f"{nodes} machines without --node-rank: each acts as the first"
        return (Finding.warning("meeting", where, what, "add --node-rank, or set PET_NODE_RANK in the environment"),)
    return ()


def programs(command: Sequence[str]) -> tuple[str, ...]:
    """Return the modules and scripts that a command starts with python or one of the launchers."""
    return tuple(
        word for before, word in pairwise(("", *command)) if before in ("-m", "--module") or word.endswith(".py")
    )


def several_commands(path: str) -> Finding:
    """Return the finding on a script that starts more than one trainer."""
    what = "the script starts more than one trainer; the first one is checked"
    return Finding.warning("several-commands", path, what, "put each into a separate file and check it")


def lost_options(commands: Iterable[Sequence[str]], is_option: Callable[[str], bool]) -> tuple[Finding, ...]:
    """Return the finding on options that the shell takes for a command of their own."""
    lost = [command[0] for command in commands if is_option(command[0])]
    if not lost:
        return ()
    what = "the line before it ends the command (a comment, or no backslash): the shell runs it on its own"
    hint = "move the comment above the command, and end each line with a backslash"
    return (Finding.error("lost-option", lost[0], what, hint),)


def _number(command: Sequence[str], names: tuple[str, ...]) -> int | None:
    for i, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else command[i + 1] if i + 1 < len(command) else ""
            return int(text) if text.isdecimal() and 0 < int(text[:9]) == int(text[:12]) else None
    return None
