"""OpenRLHF's command lines: those of the FSDP2 plan and branch, and those of DeepSpeed with options old and new.

Source: OpenRLHF 0.5 to 0.11.2: `cli/train_*.py`, `utils/deepspeed/deepspeed.py` (mesh dp × sp × tp);
`utils/fsdp2/strategy.py` of its FSDP2 branch (mesh dp × cp × tp, dp and cp shard; gradients averaged in f32; the model
held in f32); the notes of the FSDP2 plan. Options got dots between 0.10.1 and 0.10.2 (April 2026): a command line with
names of both sides stops every release.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.configs.deepspeed import zero_strategy
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.field_rows import Given, ReaderInput, Table, TrainerReader, read_table
from ckpt_tools.preflight.configs.launch import launched_ranks, lost_options, programs, several_commands
from ckpt_tools.preflight.configs.names import known, newest_release
from ckpt_tools.preflight.configs.schema import section
from ckpt_tools.preflight.plain_values import find_value, is_variable
from ckpt_tools.preflight.spec import AdapterSpec, Engine, build_mesh

_SCRIPTS = ("sft", "dpo", "rm", "ppo_ray", "ppo", "kto", "kd", "prm")  # what `train_….py` there is, or was
_SWITCHES = known("openrlhf", "switches", "plan_switches")
_LISTS = known("openrlhf", "lists")
_PLAN = known("openrlhf", "plan_switches", "plan_values")
"""Options that the notes of the FSDP2 plan add; no release has them."""
_NAMES = _SWITCHES | known("openrlhf", "values", "plan_values", *_SCRIPTS)
_ENTRY = re.compile(rf"(.*[./])?train_(?P<script>{'|'.join(_SCRIPTS)})(\.py)?")
_OPTION = re.compile(r"--[A-Za-z][\w.-]*")
_FSDP2 = (
    *("fsdp2_tp_size", "fsdp2_cp_size", "fsdp2_cpu_offload"),
    *("fsdp2_reshard_after_forward", "fsdp_tensor_parallel_size"),
)


@cache
def _age(script: str) -> dict[str, str]:
    """Return option → the newest release in which a script has it; of any script for ''."""
    found = dict(newest_release("openrlhf", "switches")) | dict(newest_release("openrlhf", "values"))
    for name in _SCRIPTS:
        if script in ("", name):
            found |= newest_release("openrlhf", name)
    return found


@cache
def _options_with_dots(script: str) -> frozenset[str]:
    """Return the options that only releases with dots have."""
    return frozenset(name for name in _age(script) if "." in name)


@cache
def _options_before_dots(script: str) -> frozenset[str]:
    """Return the options that no release with dots has any more, for one script."""
    age = _age(script)
    dotted = {age[name] for name in _options_with_dots(script)}
    return frozenset(name for name, release in age.items() if "." not in name and release not in dotted)


@cache
def _options_of_others(script: str) -> frozenset[str]:
    """Return the options that other scripts have in some release, and this one in none."""
    if not script:
        return frozenset()
    others = known("openrlhf", *(name for name in _SCRIPTS if name != script))
    return others - known("openrlhf", script, "values") - _PLAN


def _find_entry(commands: Iterable[Sequence[str]]) -> tuple[int, int, str] | None:
    """Return (command, word, script) of the trainer that is started."""
    for i, command in enumerate(commands):
        for j, word in enumerate(command):
            match = _ENTRY.fullmatch(word)
            if match is not None:
                return i, j, match["script"]
    return None


def _split_options(document: Document) -> tuple[str, tuple[str, ...], tuple[Finding, ...]]:
    """Return the script that is started and its words; without one, all words are options."""
    commands = document.commands
    found = _find_entry(commands)
    if found is None:
        return "", document.words, ()
    index, at, script = found
    findings: list[Finding] = []
    rest = commands[index + 1 :]
    if _find_entry(rest) is not None:
        findings.append(several_commands(document.path))
    findings += lost_options(rest, lambda word: word.startswith("--"))
    return script, commands[index][at + 1 :], tuple(findings)


def _parse_options(words: Sequence[str]) -> tuple[dict[str, object], tuple[str, ...], tuple[Finding, ...]]:
    """Return option → its words, as argparse would split them, and words that may be options; skip all others."""
    values: dict[str, object] = {}
    unread: list[str] = []
    findings: list[Finding] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if _OPTION.fullmatch(name) is None:
            unread += [word] if is_variable(word) else []
            continue
        name = name.removeprefix("--")
        taken = [value] if equals else []
        while not equals and at < len(words) and _OPTION.fullmatch(words[at].partition("=")[0]) is None:
            taken.append(words[at])
            at += 1
        most = 0 if name in _SWITCHES else len(taken) if name in _LISTS else 1
        unread += [extra for extra in taken[most:] if is_variable(extra)]
        taken = taken[:most] + [extra for extra in taken[most:] if not is_variable(extra)]
        if name in _SWITCHES:
            if taken:
                findings.append(_bad_words(name, "no value (it is a flag)", taken))
            values[name] = True
        elif name in _LISTS:
            values[name] = taken
        elif taken:
            if len(taken) > 1:
                findings.append(_bad_words(name, "one value", taken))
            values[name] = taken[0]
        elif name in _NAMES:
            findings.append(_bad_words(name, "a value", []))
        else:
            values[name] = True
    return values, tuple(unread), tuple(findings)


def _bad_words(name: str, expected: str, taken: Sequence[str]) -> Finding:
    found = " ".join(taken[:4]) or "none"
    return Finding.error("wrong-type", f"--{name}", f"expected {expected}, found {found}", f"--{name} takes {expected}")


def _wrong_options(values: Mapping[str, object], script: str) -> Iterable[Finding]:
    """Yield the findings on options that are known, and not to the script that is started."""
    old = sorted(_options_before_dots(script).intersection(values))
    new = sorted(_options_with_dots("").intersection(values))
    if old and new:
        what = f"--{old[0]} and --{new[0]} belong to different versions: argparse rejects one of them"
        yield Finding.error("mixed-options", f"--{old[0]}", what, "use the names of one version")
    for name in sorted(_options_of_others(script).intersection(values)):
        ending = name.rpartition(".")[2]
        same = next((other for other in sorted(known("openrlhf", script)) if other.endswith(f".{ending}")), None)
        what = f"train_{script} has no such option in any release: argparse rejects it"
        yield Finding.error("unknown-key", f"--{name}", what, f"write --{same}" if same is not None else "remove it")


_OPTIONS = section("openrlhf")  # The options, each under its names of all versions
_DEFAULTS: Mapping[str, tuple[int | None, int]] = {
    "sft": (8, 2048), "dpo": (8, 512), "rm": (1, 512), "kto": (8, 2048), "kd": (8, 2048), "prm": (1, 2048),
    "ppo_ray": (None, 2048),
}  # fmt: skip
"""Script → samples of a micro-batch, tokens of a sample; the micro-batch of PPO differs between versions."""
_TELLING = frozenset(_FSDP2) | {"backend", "zero_stage", "micro_train_batch_size", "pretrain"} | _options_with_dots("")
"""Options that others' command lines do not have."""


def _looks_like(document: Document) -> bool:
    names = {word.partition("=")[0].lstrip("-") for word in document.words if word[:2] == "--"}
    if _find_entry(document.commands) is not None:
        return any("openrlhf" in word for word in document.words) or bool(names & _NAMES)
    return bool(names & _TELLING)


def _prepare(document: Document) -> ReaderInput:
    """Make a command line ready: a script, or a list of options."""
    if document.values is not None:
        raise UsageError("expected a command line, found a file with keys", where=document.path)
    script, words, findings = _split_options(document)
    values, unread, more = _parse_options(words)
    if not script:  # options alone, or those of a program that trains nothing
        unread += tuple(chain.from_iterable(map(programs, document.commands)))
    return ReaderInput(
        model=_OPTIONS,
        table=_TABLE,
        by_engine=_BY_ENGINE,
        values=values,
        spell=lambda path: f"--{path}",
        words=unread,
        noun="option",
        findings=(*findings, *more, *_wrong_options(values, script)),
        # Nothing is loaded from the path unless that is asked for.
        check=lambda given: given.moot.extend(() if given.raw.load_checkpoint else ("ckpt_path",)),
    )


def _script(given: Given) -> str:
    found = _find_entry(given.document.commands)
    return "" if found is None else found[2]


def _engine(given: Given) -> Engine:
    if given.raw.backend is not None:
        return "fsdp2" if given.raw.backend == "fsdp2" else "deepspeed"
    return "fsdp2" if any(find_value(given.values, option) is not None for option in _FSDP2) else "deepspeed"


def _world_size(given: Given) -> int | None:
    if _script(given) != "ppo_ray":
        return launched_ranks(given.document.commands)
    if not (given.has_value("actor_num_nodes") and given.has_value("actor_num_gpus")):
        return None
    return (given.raw.actor_num_nodes or 1) * (given.raw.actor_num_gpus or 8)


def _axes(given: Given) -> dict[str, int]:
    raw = given.raw
    axes = {"dp_shard": -1, "cp": raw.cp or 1, "sp": raw.ring or 1, "tp": 1 if raw.tp is None else raw.tp}
    return {axis: size for axis, size in axes.items() if axis in ("dp_shard", "tp") or size != 1}


def _mesh(given: Given) -> Mesh | None:
    """Return the mesh; the ranks of a ring hold shards of their own, as those of cp do."""
    axes = given.spec.axes
    is_known = all(given.has_value(option) for option in ("tp", "cp", "ring"))
    sharing = axes.get("cp", 1) * axes.get("sp", 1)
    return build_mesh({**axes, "cp": sharing}, given.spec.world_size) if is_known else None


def _adapter(given: Given) -> AdapterSpec | None:
    raw = given.raw
    if not raw.lora_rank:
        return None
    alpha = 16.0 if raw.lora_alpha is None else raw.lora_alpha
    return AdapterSpec(kind="lora", rank=raw.lora_rank, alpha=alpha, targets=raw.lora_targets or ("all-linear",))


def _seq_len(given: Given) -> object:
    raw, script, values = given.raw, _script(given), given.values
    if raw.max_len is not None:
        return raw.max_len
    if script == "ppo_ray" and isinstance(values, Mapping) and values.keys() & _options_before_dots(script):
        return (raw.prompt_max_len or 1024) + (raw.generate_max_len or 1024)
    return _DEFAULTS.get(script, (None, None))[1]


def _zero_strategy(given: Given) -> str | None:
    return zero_strategy(2 if given.raw.zero_stage is None else given.raw.zero_stage)


_TABLE = read_table(
    "openrlhf",
    engine=_engine,
    world_size=_world_size,
    axes=_axes,
    mesh=_mesh,
    reduce_dtype=lambda given: "f32" if given.spec.engine == "fsdp2" else given.spec.param_dtype,
    master_dtype=lambda _: "f32",
    adapter=_adapter,
    quantize=lambda given: "nf4" if given.raw.load_in_4bit else None,
    seq_len=_seq_len,
    batch_size=lambda given: given.raw.micro_batch_size or _DEFAULTS.get(_script(given), (None, None))[0],
    resume_from=lambda given: given.raw.ckpt_path if given.raw.load_checkpoint else None,
)
_BY_ENGINE: Mapping[Engine, Table] = {
    "deepspeed": read_table("openrlhf.deepspeed", strategy=_zero_strategy),
    "fsdp2": read_table("openrlhf.fsdp2"),
}


READER = TrainerReader(name="openrlhf", looks_like=_looks_like, prepare=_prepare)
