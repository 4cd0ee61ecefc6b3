"""One statement per option: a field of one frozen class has its name, type, default and help.

`takes` makes the library's function from such a class (type checkers see its fields as keywords), `cli.build` makes
the command line from it, and `bin/docs` the reference pages.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields, replace
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

from ckpt_tools.description.layout import Mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.table import FORMATS
from ckpt_tools.remote.places import is_remote, local

REMOTE_WORKERS = 16
"""Requests that are under way at once by default."""

P = ParamSpec("P")
Options = TypeVar("Options")
Result = TypeVar("Result")

AnyPath = str | os.PathLike[str]
ProgressFactory = Callable[[int], Callable[[int], None]]
"""Given the number of bytes to move, returns what is told of every part that was moved."""


@dataclass(frozen=True, slots=True)
class Doc:
    """What a field is for. Alone: a field that only the library has."""

    help: str


@dataclass(frozen=True, slots=True)
class Argument(Doc):
    """A positional argument of the command line."""

    metavar: str


@dataclass(frozen=True, slots=True)
class Option(Doc):
    """An option of the command line; what is not given here follows from the field."""

    _: KW_ONLY
    name: str | None = None
    """With both dashes; that of the field by default."""
    short: str | None = None
    metavar: str | None = None
    """By default the words of a `Literal`."""
    min: float | None = None
    max: float | None = None
    env: bool = False
    """CKPT_NAME in the environment sets it."""
    none: str | None = None
    """Word for None, and the default."""
    is_tristate: bool = False
    """Not given differs from the default, which is not shown."""
    after: str | None = None
    """The option that it follows in --help, where it is stated elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One option as its class states it."""

    name: str
    hint: Any
    """Its type, without annotations."""
    default: Any
    """`inspect.Parameter.empty` without one."""
    stated: Doc
    is_positional: bool = False

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        named = self.stated.name if isinstance(self.stated, Option) else None
        return named or "--" + self.name.replace("_", "-")

    @property
    def is_path(self) -> bool:
        """Does it name a file or a directory?"""
        return any(get_origin(part) is os.PathLike for part in get_args(self.hint))

    @property
    def words(self) -> tuple[str, ...]:
        """The words that it takes; none where every text will do."""
        parts = (self.hint, *get_args(self.hint))
        if str in parts:
            return ()
        return tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))

    @property
    def text(self) -> str:
        """Its help, and the words that the command line shows in place of a value."""
        shown = self.stated.metavar if isinstance(self.stated, Option) else None
        return f"{self.stated.help} ({shown})" if shown and "|" in shown else self.stated.help

    def check(self, value: object) -> None:
        """Refuse a word that it does not take."""
        if self.words and isinstance(value, str) and value not in self.words:
            raise UsageError(f"{self.flag} must be one of {', '.join(self.words)}, got {value!r}")


@functools.cache
def parameters(options: type) -> tuple[Parameter, ...]:
    """Return the options that a class states, in their order."""
    hints = get_type_hints(options, include_extras=True)
    return tuple(
        parameter(
            field.name,
            hints[field.name],
            inspect.Parameter.empty if field.default is MISSING else field.default,
            is_positional=not field.kw_only,
        )
        for field in fields(options)
    )


def parameter(name: str, hint: object, default: object, *, is_positional: bool = False) -> Parameter:
    """Return the option that an annotated field or parameter states."""
    bare, stated = get_args(hint) if get_origin(hint) is Annotated else (hint, Doc(""))
    return Parameter(name=name, hint=bare, default=default, stated=stated, is_positional=is_positional)


def takes(options: Callable[P, Options]) -> Callable[[Callable[[Options], Result]], Callable[P, Result]]:
    """Let a function of an options class be called with the fields of that class."""
    stated = parameters(cast("type", options))  # a class; as a `Callable` it tells P

    def decorate(function: Callable[[Options], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            given = options(*args, **kwargs)
            for each in stated:
                each.check(getattr(given, each.name))
            paths = {each.name: getattr(given, each.name) for each in stated if each.is_path}
            here = {name: local(path) for name, path in paths.items() if isinstance(path, str) and local(path) != path}
            if here:
                given = replace(cast("Any", given), **here)
            return function(given)

        call.__dict__["options"] = options
        call.__dict__["__signature__"] = _signature(stated, function)
        call.__doc__ = _describe(stated, function.__doc__ or "")
        return call

    return decorate


def options_of(function: Callable[..., object]) -> tuple[Parameter, ...]:
    """Return the options of a function that `takes` made."""
    return parameters(vars(function)["options"])


def _signature(stated: Sequence[Parameter], function: Callable[..., object]) -> inspect.Signature:
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    made = [
        inspect.Parameter(each.name, kinds[each.is_positional], default=each.default, annotation=each.hint)
        for each in sorted(stated, key=lambda each: not each.is_positional)
    ]
    return inspect.Signature(made, return_annotation=function.__annotations__["return"])


def _describe(stated: Sequence[Parameter], text: str) -> str:
    """Return a docstring with the section that the options class states."""
    head, raises, tail = inspect.cleandoc(text).partition("\nRaises:")
    rows = [f"    {each.name}: {each.text}" for each in sorted(stated, key=lambda each: not each.is_positional)]
    return "\n".join([head.rstrip(), "", "Args:", *rows, *(["", f"Raises:{tail}"] if raises else [])])


def default_num_workers(*paths: AnyPath | None, computes: bool = False) -> int:
    """Return how many threads work by default on what these paths name.

    Two per core, at most eight, where one may wait for the disk, and one, where they compute on what they move.
    Sixteen where a path is remote: most of them wait.
    """
    if any(path is not None and is_remote(os.fspath(path)) for path in paths):
        return REMOTE_WORKERS
    cores = len(os.sched_getaffinity(0)) or 1
    return min(8, cores if computes else 2 * cores)


# What several commands have

Source = Annotated[
    AnyPath, Argument("A safetensors file, a model directory, a DCP directory or a training step.", "SRC")
]
Destination = Annotated[AnyPath, Argument("Directory to create.", "DST")]
MeshText = Annotated[
    str | Mesh | None,
    Option(
        "Device mesh, e.g. dp_replicate=2,dp_shard=4,tp=2; the last axis varies fastest; -1 is inferred from "
        "--world-size. Axes: dp_replicate (ddp), dp_shard (fsdp, dp), tp, ep, cp, pp.",
        metavar="AXIS=N,…",
    ),
]
WorldSize = Annotated[int | None, Option("Number of ranks, to infer -1 in --mesh.", min=1)]
Dequantize = Annotated[
    bool, Option("Decode quantised weights, as --dtype says or config.json; without it their bytes stay as they are.")
]
DTypeName = Annotated[
    str, Option("Cast the model's floating-point tensors, but no quantised ones.", metavar="keep|bf16|f16|f32")
]
DTypeFor = Annotated[
    Sequence[str],
    Option(
        "Cast these floating-point tensors otherwise (repeatable; the first match wins).",
        metavar="GLOB=DTYPE",
    ),
]
MaxShardSize = Annotated[
    str | None,
    Option(
        "Maximum size of a file, e.g. 5GB (decimal) or 5GiB (default: the original files where known, else 5GB).",
        metavar="SIZE",
    ),
]
Include = Annotated[
    Sequence[str],
    Option(
        "Only these tensors (repeatable). * stays inside one dotted component, ** crosses, {a,b} alternates.",
        metavar="GLOB",
    ),
]
Exclude = Annotated[Sequence[str], Option("Skip these tensors (repeatable).", metavar="GLOB")]
Overwrite = Annotated[bool, Option("Replace DST; the old one is kept until the new one is durable.")]
PartText = Annotated[
    str | None,
    Option(
        "Write one part of N, from 0: run the same command once for each, anywhere; the last one publishes DST.",
        metavar="I/N",
    ),
]
AsPart = Annotated[bool, Option("Take a known part of a model as what it is; without it a part is refused.")]
KeepPickles = Annotated[bool, Option("Copy pickles and code that the checkpoint brought along.")]
OnlyCommit = Annotated[bool, Doc("Write no part: publish what all parts have written.")]
DryRun = Annotated[bool, Option("Plan only: files, bytes, memory, disk. Writes nothing.", short="-n")]
NumWorkers = Annotated[int | None, Option("Number of threads.", short="-j", env=True, min=1, max=256)]
Progress = Annotated[ProgressFactory | None, Doc("Makes the receiver of progress.")]
ShapesFrom = Annotated[
    AnyPath | None,
    Option("Checkpoint of the same model, for the shapes of FSDP1's LOCAL_STATE_DICT pieces.", metavar="MODEL"),
]
Component = Annotated[
    str | None,
    Option("One model of several in a repository, e.g. unet (. for the one at the top).", metavar="NAME"),
]
From = Annotated[str | None, Option("Format of SRC (default: detected).", name="--from", metavar="|".join(FORMATS))]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
    """How to cut, as the user said it."""

    mesh: MeshText = None
    world_size: WorldSize = None
    rules: Annotated[AnyPath | None, Option("YAML file of placement rules.", metavar="FILE")] = None
    set: Annotated[
        Sequence[str],
        Option(
            "Placement rule (repeatable; before those of --rules; the first match wins); GLOB= means FSDP only, "
            "AXIS:F that FSDP cuts over this axis, too.",
            metavar="GLOB=AXIS:S(D),…",
        ),
    ] = ()
    tp_plan: Annotated[
        str | None,
        Option("Cut along tp as transformers cuts the architecture that config.json names.", metavar="auto"),
    ] = None
    assets: Annotated[
        AnyPath | None, Option("Directory with the config.json for --tp-plan, where SRC has none.", metavar="DIR")
    ] = None
    tp_uneven: Annotated[
        Literal["refuse", "replicate"],
        Option(
            "Tensors whose dim both tp and dp_shard cut and tp does not divide: refuse them, or keep them whole on tp."
        ),
    ] = "refuse"
