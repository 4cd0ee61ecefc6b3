"""A path → the config in it, whoever's it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.errors import UsageError
from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.configs import (
    accelerate,
    ai_toolkit,
    axolotl,
    deepspeed,
    llamafactory,
    openrlhf,
    torchtitan,
    trainer,
    verl,
)
from ckpt_tools.preflight.configs.config import Config, Options
from ckpt_tools.preflight.configs.document import Document, read_document
from ckpt_tools.preflight.configs.launch import (
    check_meeting,
    launched_documents,
    launched_ranks,
    several_commands,
    unread_ranks,
)
from ckpt_tools.preflight.configs.options import check_variables, option_names
from ckpt_tools.preflight.configs.others import refuse_others
from ckpt_tools.preflight.configs.overrides import overridden
from ckpt_tools.preflight.configs.schema import Section
from ckpt_tools.preflight.configs.table import Reader, read_source
from ckpt_tools.preflight.configs.together import join, with_deepspeed
from ckpt_tools.preflight.places import OVERRIDES, Place, PlacedText

READERS: Mapping[Framework, Reader] = {
    one.name: one
    for one in (
        accelerate.READER,
        trainer.READER,
        torchtitan.READER,
        axolotl.READER,
        ai_toolkit.READER,
        verl.READER,
        openrlhf.READER,
        llamafactory.READER,
        deepspeed.READER,
    )
}
"""The trainers, each in a file of its own."""


def read_config(
    *paths: str,
    framework: Framework | None = None,
    world_size: int | None = None,
    given: Collection[str] = (),
    overrides: Sequence[str] = (),
) -> Config:
    """Read a trainer's config, and those that belong to the same run (accelerate's, DeepSpeed's, a script's).

    `given` are fields of the spec that are known otherwise: what the file says of them need not be read. Raise
    NotReadError for a trainer that is recognised and not read.
    """
    placed = tuple(PlacedText(word, Place(OVERRIDES, 0)) for word in overrides)
    found = [read_document(path, placed or None) for path in paths]
    if any(one.takes_arguments for one in found):
        placed = ()  # they are the script's
    documents = [each for one in found for each in _documents(one, framework)]
    launchers = [one for one in documents if len(documents) > 1 and accelerate.READER.looks_like(one)]
    others = [one for one in documents if one not in launchers]
    if len(others) > 1:
        others = with_deepspeed(others)
    if len(launchers) > 1 or len(others) > 1:
        raise UsageError(
            "two configs of the same kind are given",
            where=(launchers if len(launchers) > 1 else others)[1].path,
            hint="give the launcher's config and the trainer's, and check other runs on their own",
        )
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
    if document.values is not None or (readers and readers != [torchtitan.READER]):
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


_OF_COMMANDS: tuple[Framework, ...] = ("verl", "openrlhf", "torchtitan")
"""Those whose readers take a script as it is."""


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


def _check_named(document: Document, values: Mapping[str, object], framework: Framework, model: type[Section]) -> None:
    """Refuse a config of another framework: nearly all of it would be passed over, and the rest be found right."""
    known = option_names(model).intersection(values)
    others = [name for name, one in READERS.items() if one.looks_like(document)]
    if framework in others or (known and not others) or 2 * len(known) >= len(values):
        return
    read = f"reads {len(known)}" if known else "reads none"
    raise UsageError(
        f"{framework} {read} of the {len(values)} keys of this file",
        where=document.path,
        hint=f"this looks like a config of {' or of '.join(others)}: --framework {others[0]}"
        if others
        else f"give the config that {framework} reads",
    )


def detect(document: Document) -> Framework:
    """Return whose config a document is; raise UsageError if it is nobody's, or more than one framework's."""
    found = [name for name, one in READERS.items() if one.looks_like(document)]
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"this looks like a config of {' and of '.join(found)}" if found else "this is not a config of a known trainer",
        where=document.path,
        hint=f"name the trainer: --framework {'|'.join(found or READERS)}",
    )
