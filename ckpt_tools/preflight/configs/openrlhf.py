"""OpenRLHF's command lines: those of the FSDP2 plan and branch, and those of DeepSpeed with options old and new.

Source: OpenRLHF 0.5 to 0.11.2: `cli/train_*.py`, `utils/deepspeed/deepspeed.py` (mesh dp × sp × tp);
`utils/fsdp2/strategy.py` of its FSDP2 branch (mesh dp × cp × tp, dp and cp shard; gradients averaged in f32; the model
held in f32); the notes of the FSDP2 plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, Field

from ckpt_tools.description.checkpoint import Finding, Severity
from ckpt_tools.preflight.configs.config import Options, Reading
from ckpt_tools.preflight.configs.deepspeed_file import zero_strategy
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.launch import launched_ranks, lost_options, programs, several_commands
from ckpt_tools.preflight.configs.mesh import build_mesh, sharding_strategy
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.openrlhf_names import (
    LISTS,
    NAMES,
    SCRIPTS,
    SWITCHES,
    options_before_dots,
    options_of_others,
    options_with_dots,
)
from ckpt_tools.preflight.configs.options import is_variable
from ckpt_tools.preflight.configs.schema import (
    Count,
    Dtype,
    Names,
    Number,
    Positive,
    Section,
    Truth,
    Word,
    choice,
    validate,
)
from ckpt_tools.preflight.spec import AdapterSpec, Engine, ParallelSpec
from ckpt_tools.text import escape_name

_ENTRY = re.compile(rf"(.*[./])?train_(?P<script>{'|'.join(SCRIPTS)})(\.py)?")
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_FSDP2 = (
    "fsdp2_tp_size",
    "fsdp2_cp_size",
    "fsdp2_cpu_offload",
    "fsdp2_reshard_after_forward",
    "fsdp_tensor_parallel_size",
)


def _named(*names: str) -> Any:  # noqa: ANN401 - what pydantic's Field returns
    return Field(default=None, validation_alias=AliasChoices(*names))


class OpenRlhf(Section):
    """The options, each under its names of all versions."""

    known: ClassVar[frozenset[str]] = NAMES
    unknown: ClassVar[Severity | None] = "error"  # argparse stops at it

    backend: Annotated[str, choice("deepspeed", "fsdp2")] | None = None
    tp: Count | None = _named(
        "fsdp_tensor_parallel_size", "fsdp2_tp_size", "ds.tensor_parallel_size", "ds_tensor_parallel_size"
    )
    cp: Count | None = _named("fsdp2_cp_size")
    ring: Count | None = _named("ds.ring_attn_size", "ring_attn_size")
    zero_stage: Count | None = _named("ds.zero_stage", "zero_stage")
    param_dtype: Dtype | None = _named("ds.param_dtype", "param_dtype")
    adam_offload: Truth | None = _named("ds.adam_offload", "adam_offload")
    cpu_offload: Truth | None = _named("fsdp2_cpu_offload")
    reshard: Truth | None = _named("fsdp2_reshard_after_forward")
    checkpointing: Truth | None = _named(
        "model.gradient_checkpointing_enable", "actor.gradient_checkpointing_enable", "gradient_checkpointing"
    )
    load_in_4bit: Truth | None = _named("ds.load_in_4bit", "load_in_4bit")
    lora_rank: Count | None = _named("ds.lora.rank", "lora_rank")
    lora_alpha: Number | None = _named("ds.lora.alpha", "lora_alpha")
    lora_targets: Names | None = _named("ds.lora.target_modules", "target_modules")
    optim: Word | None = _named("optim", "actor.optim")
    max_len: Positive | None = _named("data.max_len", "max_len")
    prompt_max_len: Positive | None = None
    generate_max_len: Positive | None = None
    micro_batch_size: Positive | None = _named("train.micro_batch_size", "micro_train_batch_size")
    model: Word | None = _named(
        "model.model_name_or_path", "actor.model_name_or_path", "model_name_or_path", "pretrain"
    )
    load_checkpoint: Truth | None = _named("ckpt.load_enable", "load_checkpoint", "resume_training")
    ckpt_path: Word | None = _named("ckpt.path", "ckpt_path", "dcp_checkpoint_from_path", "ckpt_save_path")
    actor_num_nodes: Positive | None = _named("actor.num_nodes", "actor_num_nodes")
    actor_num_gpus: Positive | None = _named("actor.num_gpus_per_node", "actor_num_gpus_per_node")


_FIELDS = {
    "engine": ("backend",),
    "world_size": ("actor_num_gpus", "actor_num_nodes"),
    "axes.tp": ("tp",),
    "axes.cp": ("cp",),
    "axes.sp": ("ring",),
    "strategy": ("reshard", "zero_stage"),
    "reshard_after_forward": ("reshard",),
    "param_dtype": ("param_dtype",),
    "reduce_dtype": ("param_dtype",),
    "master_dtype": ("param_dtype",),
    "offload_params": ("cpu_offload",),
    "offload_optimizer": ("adam_offload",),
    "activation_checkpointing": ("checkpointing",),
    "adapter": ("lora_rank",),
    "quantize": ("load_in_4bit",),
    "optimizer": ("optim",),
    "seq_len": ("max_len", "prompt_max_len", "generate_max_len"),
    "batch_size": ("micro_batch_size",),
    "model": ("model",),
    "resume_from": ("load_checkpoint", "ckpt_path"),
}
"""Field of the spec → fields of `OpenRlhf` that say it."""


def looks_like(document: Document) -> bool:
    """Is this a command line of OpenRLHF?"""
    names = {
        word.partition("=")[0].lstrip("-") for command in document.commands for word in command if word[:2] == "--"
    }
    if _entry(document.commands) is not None:
        return any("openrlhf" in word for command in document.commands for word in command) or bool(names & NAMES)
    return bool(names & _TELLING)


_TELLING = frozenset(_FSDP2) | {"backend", "zero_stage", "micro_train_batch_size", "pretrain"} | options_with_dots("")
"""Options that others' command lines do not have."""


def read(document: Document, *, world_size: int | None) -> Reading:
    """Read a command line.

    Args:
        document: A script, or a list of options.
        world_size: Ranks; None for what the launcher or `--actor.num_…` says.
    """
    script, words, findings = _options_of(document)
    values, unread, more = _parse(words)
    if not script:  # options alone, or those of a program that trains nothing
        unread += tuple(chain.from_iterable(map(programs, document.commands)))
    findings += more + tuple(_wrong_options(values, script))
    variables = tuple(f"--{name}" for name, value in values.items() if is_variable(value))
    spelled = {field: _aliases(field) for field in OpenRlhf.model_fields}
    raw, wrong, counted = validate(OpenRlhf, values, spell=lambda path: f"--{path}", words=unread, what="option")
    findings += wrong
    if not raw.load_checkpoint:
        counted = _without_paths(counted, spelled["ckpt_path"])
    world = world_size or _world(raw, document.commands, script, variables)
    engine = _engine(raw, values)
    axes = {"dp_shard": -1, "cp": raw.cp or 1, "sp": raw.ring or 1, "tp": 1 if raw.tp is None else raw.tp}
    sized = {name for field in ("tp", "cp", "ring") for name in spelled[field]}
    is_known = not any(name.removeprefix("--") in sized for name in variables)
    # The ranks of a ring hold shards of their own, as those of cp do.
    mesh = build_mesh({**axes, "cp": axes["cp"] * axes["sp"]}, world) if is_known else None
    compute = raw.param_dtype or "bf16"
    spec = ParallelSpec(
        framework="openrlhf",
        engine=engine,
        world_size=world,
        axes={axis: size for axis, size in axes.items() if axis in ("dp_shard", "tp") or size != 1},
        mesh=mesh,
        strategy=sharding_strategy(axes, mesh, reshards=raw.reshard is not False)
        if engine == "fsdp2"
        else zero_strategy(2 if raw.zero_stage is None else raw.zero_stage),
        reshard_after_forward=raw.reshard is not False if engine == "fsdp2" else None,
        param_dtype=compute,
        reduce_dtype="f32" if engine == "fsdp2" else compute,
        master_dtype="f32",
        offload_params=engine == "fsdp2" and bool(raw.cpu_offload),
        offload_optimizer=bool(raw.adam_offload),
        activation_checkpointing=bool(raw.checkpointing),
        adapter=_adapter(raw),
        quantize="nf4" if raw.load_in_4bit else None,
        state_dict_type="SHARDED_STATE_DICT" if engine == "fsdp2" else None,
        optimizer=raw.optim or "adam",
        seq_len=_seq_len(raw, script, values),
        batch_size=_DEFAULT_BATCH.get(script) if raw.micro_batch_size is None else raw.micro_batch_size,
        model=raw.model,
        resume_from=raw.ckpt_path if raw.load_checkpoint else None,
        keys=_keys(values, spelled),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, world_keys=_WORLD_KEYS, findings=findings)


_WORLD_KEYS = tuple(
    f"--{name}" for name in ("actor.num_nodes", "actor_num_nodes", "actor.num_gpus_per_node", "actor_num_gpus_per_node")
)
_DEFAULT_BATCH = {"sft": 8, "dpo": 8, "kto": 8, "kd": 8, "rm": 1, "prm": 1}
"""Samples of a micro-batch; that of PPO differs between versions."""
_DEFAULT_LENGTH = {"sft": 2048, "dpo": 512, "rm": 512, "kto": 2048, "kd": 2048, "prm": 2048, "ppo_ray": 2048}


def _entry(commands: Iterable[Sequence[str]]) -> tuple[int, int, str] | None:
    """Return (command, word, script) of the trainer that is started."""
    for i, command in enumerate(commands):
        for j, word in enumerate(command):
            match = _ENTRY.fullmatch(word)
            if match is not None:
                return i, j, match["script"]
    return None


def _options_of(document: Document) -> tuple[str, tuple[str, ...], tuple[Finding, ...]]:
    """Return the script that is started and its words; without one, all words are options."""
    commands = document.commands
    found = _entry(commands)
    if found is None:
        return "", tuple(word for command in commands for word in command), ()
    index, at, script = found
    findings: list[Finding] = []
    rest = commands[index + 1 :]
    if _entry(rest) is not None:
        findings.append(several_commands(document.path))
    findings += lost_options(rest, lambda word: word.startswith("--"))
    return script, commands[index][at + 1 :], tuple(findings)


def _parse(words: Sequence[str]) -> tuple[dict[str, object], tuple[str, ...], tuple[Finding, ...]]:
    """Return option → its words, as argparse would split them, and the words that may be options themselves.

    What is no option's is passed over.
    """
    values: dict[str, object] = {}
    unread: list[str] = []
    findings: list[Finding] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if not word.startswith("--") or _OPTION.fullmatch(name) is None:
            unread += [word] if is_variable(word) else []
            continue
        name = name.removeprefix("--")
        taken = [value] if equals else []
        while not equals and at < len(words) and not _is_option(words[at]):
            taken.append(words[at])
            at += 1
        most = 0 if name in SWITCHES else len(taken) if name in LISTS else 1
        unread += [extra for extra in taken[most:] if is_variable(extra)]
        taken = taken[:most] + [extra for extra in taken[most:] if not is_variable(extra)]
        if name in SWITCHES:
            if taken:
                findings.append(_bad_words(name, "no value, it is a switch", taken))
            values[name] = True
        elif name in LISTS:
            values[name] = taken
        elif taken:
            if len(taken) > 1:
                findings.append(_bad_words(name, "one value", taken))
            values[name] = taken[0]
        elif name in OpenRlhf.known:
            findings.append(_bad_words(name, "a value", []))
        else:
            values[name] = True
    return values, tuple(unread), tuple(findings)


def _is_option(word: str) -> bool:
    return word.startswith("--") and _OPTION.fullmatch(word.partition("=")[0]) is not None


def _bad_words(name: str, expected: str, taken: Sequence[str]) -> Finding:
    found = " ".join(escape_name(word) for word in taken[:4]) or "none"
    return Finding.error(
        code="wrong-type",
        where=f"--{name}",
        what=f"expected {expected}, found {found}",
        hint=f"--{name} takes {expected}",
    )


def _wrong_options(values: Mapping[str, object], script: str) -> Iterable[Finding]:
    """Yield the findings on options that are known, and not to the script that is started."""
    old = sorted(options_before_dots(script).intersection(values))
    new = sorted(options_with_dots("").intersection(values))
    if old and new:
        yield Finding.error(
            code="mixed-options",
            where=f"--{old[0]}",
            what=f"--{old[0]} and --{new[0]} belong to different versions: argparse stops at one of them",
            hint="use the names of one version",
        )
    for name in sorted(options_of_others(script).intersection(values)):
        ending = name.rpartition(".")[2]
        same = next((other for other in sorted(known("openrlhf", script)) if other.endswith(f".{ending}")), None)
        yield Finding.error(
            code="unknown-key",
            where=f"--{name}",
            what=f"train_{script} has no such option, in no release: argparse stops at it",
            hint=f"write --{same}" if same is not None else "remove it",
        )


def _aliases(field: str) -> tuple[str, ...]:
    alias = OpenRlhf.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return tuple(str(name) for name in alias.choices)
    return (field,)


def _without_paths(counted: Options, names: Iterable[str]) -> Options:
    """Return the account without paths as unread from which nothing is loaded."""
    paths = {f"--{name}" for name in names}
    unread = tuple(path for path in counted.unread if path not in paths)
    return replace(counted, unread=unread, understood=counted.understood + len(counted.unread) - len(unread))


def _engine(raw: OpenRlhf, values: Mapping[str, object]) -> Engine:
    if raw.backend is not None:
        return "fsdp2" if raw.backend == "fsdp2" else "deepspeed"
    return "fsdp2" if any(option in values for option in _FSDP2) else "deepspeed"


def _world(raw: OpenRlhf, commands: Iterable[Sequence[str]], script: str, variables: tuple[str, ...]) -> int | None:
    if script != "ppo_ray":
        return launched_ranks(commands)
    if any("actor" in name and "num_" in name for name in variables):
        return None
    nodes = 1 if raw.actor_num_nodes is None else raw.actor_num_nodes
    gpus = 8 if raw.actor_num_gpus is None else raw.actor_num_gpus
    return nodes * gpus if nodes > 0 and gpus > 0 else None


def _adapter(raw: OpenRlhf) -> AdapterSpec | None:
    if not raw.lora_rank:
        return None
    return AdapterSpec(
        kind="lora",
        rank=raw.lora_rank,
        alpha=16.0 if raw.lora_alpha is None else raw.lora_alpha,
        targets=raw.lora_targets or ("all-linear",),
    )


def _seq_len(raw: OpenRlhf, script: str, values: Mapping[str, object]) -> int | None:
    if raw.max_len is not None:
        return raw.max_len
    if script == "ppo_ray" and values.keys() & options_before_dots(script):
        return (raw.prompt_max_len or 1024) + (raw.generate_max_len or 1024)
    return _DEFAULT_LENGTH.get(script)


def _keys(values: Mapping[str, object], spelled: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    keys = {}
    for field, sources in _FIELDS.items():
        found = next((name for source in sources for name in spelled[source] if name in values), None)
        if found is not None:
            keys[field] = f"--{found}"
    return keys
