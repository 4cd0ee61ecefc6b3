"""A path → the config in it, whoever's it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import get_args

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import UsageError
from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.configs.config import Config, Options
from ckpt_tools.preflight.configs.document import Document, read_document
from ckpt_tools.preflight.configs.field_rows import TrainerReader, read_source
from ckpt_tools.preflight.configs.launch import (
    check_meeting,
    launched_documents,
    launched_ranks,
    several_commands,
    unread_ranks,
)
from ckpt_tools.preflight.configs.overrides import overridden
from ckpt_tools.preflight.configs.schema import OptionSection, check_variables, option_names
from ckpt_tools.preflight.places import OVERRIDES, ConfigLocation, PlacedText
from ckpt_tools.preflight.plain_values import as_truth, find_value
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.tables import read_rows

# Trainers whose configs are recognised by what only they have, and not read.
# Source: the examples of each trainer's repository, November 2026.

_MAX_DEPTH = 6
_MISSING = object()


class NotReadError(UsageError):
    """The config of a trainer that preflight does not read: it was not checked."""

    exit_code = 3

    def __init__(self, name: str, *, where: str) -> None:
        hint = "ckpt estimate and ckpt smoke take the model, the mesh and the dtypes as options"
        super().__init__(f"this is a config of {name}, which preflight does not support", where=where, hint=hint)
        self.name = name


def refuse_others(document: Document) -> None:
    """Raise NotReadError if a config belongs to a trainer that is recognised and not read."""
    for row in read_rows(__package__, "others.tsv"):
        texts = {name: () if text == "-" else tuple(text.split(" | ")) for name, text in row.items()}
        if _is_of(document, texts):
            raise NotReadError(row["name"], where=document.path)


def _is_of(document: Document, other: Mapping[str, tuple[str, ...]]) -> bool:
    values = document.values
    if values is not None:
        has_keys = any(
            all(find_value(values, key, _MISSING) is not _MISSING for key in row.split()) for row in other["keys"]
        )
        return has_keys or (bool(other["classes"]) and _names_class(values, other["classes"], 0))
    return any(_starts(command, other) for command in document.commands)


def _names_class(node: object, begins: tuple[str, ...], depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    if isinstance(node, Mapping):
        return any(
            (key in ("_component_", "_target_", "class_path", "recipe") and str(value).startswith(begins))
            or _names_class(value, begins, depth + 1)
            for key, value in node.items()
        )
    return isinstance(node, list) and any(_names_class(item, begins, depth + 1) for item in node)


def _starts(command: Sequence[str], other: Mapping[str, tuple[str, ...]]) -> bool:
    return any(_is_program(command, program.split()) for program in other["programs"]) or (
        bool(other["options"]) and any(word.lstrip("+~").startswith(other["options"]) for word in command)
    )


def _is_program(command: Sequence[str], words: Sequence[str]) -> bool:
    """Do these words stand one after the other in a command? The first may end a path, or begin a module's name."""
    first, *rest = words
    for at, word in enumerate(command):
        begins = word.startswith(first) if first.endswith(".") else word == first or word.endswith(f"/{first}")
        if begins and list(command[at + 1 : at + len(words)]) == rest:
            return True
    return False


# Several configs of one run: accelerate's and the arguments of the script that it starts, DeepSpeed's beside them.
# Source: accelerate 1.15 `accelerator.py` (a plugin that is passed wins over the environment that `launch` makes of its
# config), transformers 5.23 `training_args.py` (`mixed_precision`; `fsdp_plugin_args`) and
# `integrations/deepspeed.py:HfTrainerDeepSpeedConfig.trainer_config_process` (values that must agree).

_OF_LAUNCHER = (
    "engine", "world_size", "axes", "mesh", "strategy", "reshard_after_forward", "offload_params", "offload_optimizer",
    "wrap_classes", "wrap_min_num_params", "wraps_blocks", "state_dict_type", "cpu_ram_efficient_loading",
)  # fmt: skip
"""Fields of the spec that the launcher's config says, unless the arguments shard the model themselves."""
_OF_TRAINER = ("trainer", "llamafactory")  # whose arguments are TrainingArguments, with more of their own
_DTYPES = ("param_dtype", "reduce_dtype", "master_dtype")
_AGREE = ("gradient_accumulation_steps", "gradient_clipping")
_NAMES = {"gradient_clipping": "max_grad_norm"}
_DEFAULTS = {"gradient_accumulation_steps": 1, "max_grad_norm": 1.0}  # of TrainingArguments
_SHARDING = ("fsdp1", "fsdp2", "deepspeed")


def join(launcher: Config, run: Config) -> Config:
    """Return the config of a run of which accelerate's config says one part, and the script's arguments another."""
    if run.framework not in _OF_TRAINER:
        what = f"a config of {launcher.framework} and one of {run.framework} cannot be combined"
        raise UsageError(what, where=run.path, hint="check each of them separately")
    shards_itself = run.spec.engine in _SHARDING
    taken = ("world_size",) if shards_itself else _OF_LAUNCHER
    fields = {name: getattr(launcher.spec, name) for name in taken}
    names = {*taken, *(f"axes.{axis}" for axis in launcher.spec.axes if "axes" in taken)}
    if not _is_mixed(run) and launcher.spec.param_dtype is not None:
        fields |= {name: getattr(launcher.spec, name) for name in _DTYPES}
        names |= set(_DTYPES)
    elif not shards_itself:
        fields |= _dtypes_of_arguments(launcher.spec, run.spec)
    recomputes = run.spec.activation_checkpointing or launcher.spec.activation_checkpointing
    keys = {name: key for name, key in run.spec.keys.items() if name not in names}
    keys |= {name: key for name, key in launcher.spec.keys.items() if name in names or name not in keys}
    spec = replace(run.spec, **fields, activation_checkpointing=recomputes, keys=keys)
    if not shards_itself:
        spec = replace(spec, framework=launcher.framework)
    whole = replace(launcher.spec if shards_itself else spec, keys=launcher.spec.keys if shards_itself else keys)
    findings = tuple(_contradictions(launcher, run))
    return replace(
        run,
        spec=spec,
        world_keys=(*launcher.world_keys, *run.world_keys),
        options=run.options.added_to(launcher.options),
        findings=run.findings + findings,
        companions=(replace(launcher, spec=whole),),
    )


def _dtypes_of_arguments(launcher: ParallelSpec, run: ParallelSpec) -> dict[str, str | None]:
    """Return the dtypes where the arguments say the mixed precision: FSDP averages in it, and widens the rest."""
    is_fsdp = launcher.engine in ("fsdp1", "fsdp2")
    widens = is_fsdp or launcher.engine == "deepspeed"
    return {
        "reduce_dtype": run.param_dtype if is_fsdp else run.reduce_dtype,
        "master_dtype": "f32" if widens and run.param_dtype in ("bf16", "f16") else run.master_dtype,
    }


def _contradictions(launcher: Config, run: Config) -> Iterator[Finding]:
    """Yield what both configs say, and not alike."""
    precision = find_value(launcher.values, "mixed_precision")
    said = next((name for name in ("bf16", "fp16") if _is_on(run, name)), None)
    if said and isinstance(precision, str) and precision.lower() not in (said, "no"):
        what = f"mixed_precision: {precision}, and {said} in {run.path}: the training arguments win"
        yield Finding.warning("contradiction", "mixed_precision", what, f"mixed_precision: {said}")
    key = run.spec.keys.get("engine", "fsdp")
    if run.spec.engine in _SHARDING and launcher.spec.engine in _SHARDING:
        is_same = run.spec.engine == launcher.spec.engine
        yield Finding(
            code="contradiction",
            severity="warning" if is_same or run.spec.engine != "deepspeed" else "error",
            where=key,
            what=f"{key} shards the model, and so does {launcher.path}: the training arguments win",
            hint=f"set it in one place: remove {key}, or set distributed_type: MULTI_GPU in {launcher.path}",
        )
    if launcher.spec.engine == "deepspeed" and run.spec.engine != "deepspeed":
        for name in _AGREE:
            other = _NAMES.get(name, name)
            path = f"deepspeed_config.{name}"
            ours = find_value(launcher.values, path)
            theirs = find_value(run.values, other, _DEFAULTS[other])
            if ours not in (None, "auto", "none", "None") and _number(ours) != _number(theirs):
                what = f"{path}: {ours}, and {other}: {theirs} in {run.path}: Trainer stops where they differ"
                yield Finding.error("contradiction", path, what, f"{path}: {theirs}, or auto")


def _is_mixed(run: Config) -> bool:
    """Do the arguments, or their defaults (TRL's), say a mixed precision? A dtype of stored weights is none."""
    if any(_is_on(run, name) for name in ("bf16", "fp16")):
        return True
    is_off = as_truth(find_value(run.values, "bf16")) is False
    is_stored = run.spec.keys.get("param_dtype") in ("torch_dtype", "dtype")
    return run.spec.param_dtype is not None and not is_off and not is_stored


def _number(value: object) -> float | str:
    try:
        return float(str(value)[:40])
    except ValueError:
        return str(value)


def _is_on(config: Config, name: str) -> bool:
    return as_truth(find_value(config.values, name)) is True


def with_deepspeed(documents: Sequence[Document]) -> list[Document]:
    """Return the documents with DeepSpeed's file as the `deepspeed` of the arguments beside it, if there is one."""
    others = [one for one in documents if not (one.values is not None and "zero_optimization" in one.values)]
    files = [one for one in documents if one not in others]
    if len(files) != 1 or len(others) != 1 or others[0].values is None or others[0].values.get("deepspeed"):
        return list(documents)
    values = {**others[0].values, "deepspeed": files[0].path}
    return [replace(others[0], values=values, files=(*others[0].files, files[0].path))]


READERS: Mapping[Framework, TrainerReader] = {
    name: import_module(f"{__package__}.{name.replace('-', '_')}").READER for name in get_args(Framework)
}
"""The trainers, each in a file of its own."""


def read_config(
    *paths: str,
    framework: Framework | None = None,
    world_size: int | None = None,
    given: Collection[str] = (),
    overrides: Sequence[str] = (),
) -> Config:
    """Read a trainer's config and those of the same run, or raise NotReadError; `given` fields are known otherwise."""
    placed = tuple(PlacedText(word, ConfigLocation(OVERRIDES, 0)) for word in overrides)
    found = [read_document(path, placed or None) for path in paths]
    if any(one.takes_arguments for one in found):
        placed = ()  # they are the script's
    documents = [each for one in found for each in _documents(one, framework)]
    launchers = [one for one in documents if len(documents) > 1 and READERS["accelerate"].looks_like(one)]
    others = [one for one in documents if one not in launchers]
    if len(others) > 1:
        others = with_deepspeed(others)
    if len(launchers) > 1 or len(others) > 1:
        problem = "two configs of the same kind are given"
        hint = "pass the launcher's config and the trainer's, and check other runs separately"
        raise UsageError(problem, where=(launchers if len(launchers) > 1 else others)[1].path, hint=hint)
    *before, last = (*launchers, *others)
    if placed:
        last = _overridden(last, placed)
    if not before:
        return understand(last, framework=framework, world_size=world_size, given=given)
    launcher = understand(before[0], world_size=world_size, given=given)
    says_nothing = bool(launcher.assumed)  # there is no config of accelerate's
    is_known = not last.commands or any(one.looks_like(last) for one in READERS.values())
    if is_known or says_nothing:
        world = world_size or launcher.spec.world_size
        config = understand(last, framework=framework, world_size=world, given=given)
        if not last.commands or config.options.is_known:
            return join(launcher, config)
        if says_nothing:
            return config
    what = f"the arguments of the program in {last.path}, which are not a known trainer's"
    return replace(launcher, not_checked=(what,))


def _documents(document: Document, framework: Framework | None) -> tuple[Document, ...]:
    """Return the configs of the run that a file stands for: itself, or what its launch line names."""
    takes_scripts = (framework,) if framework is not None else _OF_COMMANDS
    readers = [READERS[name] for name in takes_scripts if name in _OF_COMMANDS and READERS[name].looks_like(document)]
    if document.values is not None or (readers and readers != [READERS["torchtitan"]]):
        return (document,)
    refuse_others(document)
    try:
        found = launched_documents(document)
    except UsageError:
        if not readers:
            raise
        found = ()
    # torchtitan's config is a file that is named, or a Python function that its reader looks for.
    return (document,) if not found or (readers and not any(one.kind for one in found)) else found


_OF_COMMANDS: tuple[Framework, ...] = ("verl", "openrlhf", "torchtitan")  # those whose readers take a script as it is


def _overridden(document: Document, words: Sequence[str]) -> Document:
    """Return a document with options that override its own; a command has them at its end."""
    if document.values is not None:
        return overridden(document, words, is_strict=True)
    commands = []
    for command in document.commands:
        is_own = any(READERS[name].looks_like(replace(document, commands=(command,))) for name in _OF_COMMANDS)
        commands.append((*command, *words) if is_own else command)
    return replace(document, commands=tuple(commands))


def understand(
    document: Document,
    *,
    framework: Framework | None = None,
    world_size: int | None = None,
    given: Collection[str] = (),
) -> Config:
    """Do the same with a document that is read already."""
    refuse_others(document)
    found = framework or detect(document)
    source = READERS[found].prepare(document)
    started = launched_ranks(document.commands, document.num_tasks) if document.values is not None else None
    config = read_source(found, source, document, world_size=world_size or started)
    if config.spec.world_size is None:
        config = _with_launcher(config, document)
    if framework is not None and document.values is not None:
        _check_named(document, document.values, framework, source.model)
    config = _with_document(config, document)
    options = _without_given(config, {*given, *(("world_size",) if world_size else ())})
    config = replace(config, options=options, findings=config.findings + check_variables(options, config.values))
    unread = config.unread_fields
    mesh = None if "mesh" in unread else config.spec.mesh
    world = None if "world_size" in unread else config.spec.world_size
    return replace(config, spec=replace(config.spec, mesh=mesh, world_size=world_size or world))


def _with_launcher(config: Config, document: Document) -> Config:
    """Count the ranks among what was not read, where the launcher has them from variables."""
    words = unread_ranks(document.commands)
    options = replace(config.options, unread=(*config.options.unread, *words), read=config.options.read + len(words))
    return replace(config, options=options, world_keys=(*config.world_keys, *words))


def _with_document(config: Config, document: Document) -> Config:
    """Count what was not read of the files around the config, and remember where things are written."""
    words = (*config.options.words, *document.words_unread)
    more = [several_commands(document.starts_more)] if document.starts_more else []
    more += check_meeting(document.commands)
    return replace(
        config,
        options=replace(config.options, words=words),
        findings=(*config.findings, *more),
        files=document.files,
        absent=document.absent,
        place=document.place,
    )


def _without_given(config: Config, given: Collection[str]) -> Options:
    """Return the options without those as unread that say what is known otherwise."""
    paths = {config.spec.keys.get(field) for field in given}
    if "world_size" in given:
        paths |= set(config.world_keys)
    return config.options.without_unread(paths)


def _check_named(
    document: Document, values: Mapping[str, object], framework: Framework, model: type[OptionSection]
) -> None:
    """Refuse a config of another framework: nearly all of it would be passed over, and the rest be found right."""
    known = option_names(model).intersection(values)
    others = [name for name, one in READERS.items() if one.looks_like(document)]
    if framework in others or (known and not others) or 2 * len(known) >= len(values):
        return
    hint = f"pass the config that {framework} reads"
    if others:
        hint = f"this looks like a config of {' or of '.join(others)}: --framework {others[0]}"
    what = f"{framework} reads {len(known) or 'none'} of the {len(values)} keys of this file"
    raise UsageError(what, where=document.path, hint=hint)


def detect(document: Document) -> Framework:
    """Return whose config a document is; raise UsageError if it is nobody's, or more than one framework's."""
    found = [name for name, one in READERS.items() if one.looks_like(document)]
    if len(found) == 1:
        return found[0]
    what = f"looks like a config of {' and of '.join(found)}" if found else "is not a config of a known trainer"
    raise UsageError(
        f"this {what}", where=document.path, hint=f"name the trainer: --framework {'|'.join(found or READERS)}"
    )
