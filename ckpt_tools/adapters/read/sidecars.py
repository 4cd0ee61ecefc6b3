"""What stands beside an adapter's tensors: adapter_config.json, the header's metadata, trainers' own files.

Every value comes with where it was found. The files are input like any other: bounded, checked, never executed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpt_tools.adapters.adapter import Sourced
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.checkpoint.formats.opening import Opened, read_document
from ckpt_tools.checkpoint.formats.step_layouts import ROLES, is_model_part
from ckpt_tools.errors import LimitError, StorageError, UnreadableError, UsageError
from ckpt_tools.models.config import CONFIG_NAME, config_in
from ckpt_tools.storage.locations import absolute, is_directory, is_file, is_remote, open_place, open_source, scheme_of
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few
from ckpt_tools.transfer.placement.plain_yaml import load_yaml

ADAPTER_CONFIG = "adapter_config.json"
DIFFUSERS_KEY = "lora_adapter_metadata"  # Header of diffusers' files: the configuration of every model of the pipeline
DIFFUSERS_HEADER = f"header {DIFFUSERS_KEY}"  # Source of what diffusers' own header says
DORA_SCALE = "ckpt_dora_scale"
"""Header of the files whose dora_scale ckpt made for ComfyUI's normalisation: for other loaders it is wrong."""
BASE_NORM = "base-norm"  # Value of `DORA_SCALE`: the magnitudes are to be divided by the norms of the base's weights
ASSUMED = "ckpt_assumed"  # Header of exported files: what nothing said of the adapter, "use_rslora=false, …"
MODEL_FAMILY = ("ss_base_model_version", "modelspec.architecture")
"""Header of kohya's tools and relatives: what model an adapter is for."""
ARGUMENTS_HEADER = "header ss_network_args"
_ALPHAS = ("ss_network_alpha", "lora_alpha", "network_alpha", "alpha")
"""Header of kohya's tools, SGLang and others: the alpha of all modules."""
_NONE = (None, "", "None", "null")  # What says that there is none
_VARYING = ("block", "preset", "rs_lora", "reg_", "dynamic")
"""Parts of the names of kohya's and LyCORIS' arguments that give modules alphas of their own."""
_VERL = "lora_train_meta.json"
_LYCORIS = "lycoris_config.json"
_AI_TOOLKIT = ("config.yaml", "config.yml")
_RUNS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "run_config.yaml": {"lora_alpha": ("peft", "alpha")},  # Megatron-Bridge 0.3.1 `training/checkpointing.py`
    "torchtune_config.yaml": {"lora_alpha": ("model", "lora_alpha")},  # torchtune 0.6.1 `training/metric_logging.py`
    "args.json": {"lora_alpha": ("lora_alpha",), "use_rslora": ("use_rslora",)},  # ms-swift 4.6 `arguments`
    _VERL: {"lora_alpha": ("lora_alpha",), "r": ("r",), "task_type": ("task_type",)},
}
"""Files in which trainers note their run: field of PEFT's configuration → keys."""
_MAX_BYTES = 1_000_000
_MAX_PATTERN_CHARS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecars:
    """Everything that was found."""

    peft: Mapping[str, Sourced[object]] = field(default_factory=dict)
    components: Mapping[str, Mapping[str, Sourced[object]]] = field(default_factory=dict)
    """As `peft`, by the component of a pipeline (diffusers' header: "transformer", "text_encoder", …)."""
    alpha: Sourced[float] | None = None  # Of all modules, by a trainer's file or header
    others: tuple[Sourced[float], ...] = ()  # As `alpha`, in other places of the header
    unreadable: Sourced[float] | None = None  # NaN, from a place of the header that has an alpha and no number
    is_uniform: bool = True  # Has every module of one kind that alpha, by what the trainer was told?
    conv_alpha: Sourced[float] | None = None  # As `alpha`, for convolutions with a kernel
    is_ai_toolkit: bool = False
    stated: Mapping[str, Sourced[object]] = field(default_factory=dict)
    """What the header says under `ASSUMED` and `MODEL_FAMILY`."""


def read_json(source: Source, name: str) -> dict[str, object]:
    """Read a small JSON object."""
    where = os.path.join(source.root, name)
    document = parse_json(read_document(source, name, _MAX_BYTES), what=name, where=where)
    if not isinstance(document, dict):
        raise UnreadableError(f"{name} is not a JSON object", where=where)
    return document


def base_config(base: Opened) -> Mapping[str, object]:
    """Return a base model's config.json; {} where there is none."""
    if not any(a.file == CONFIG_NAME for a in base.checkpoint.assets):
        return {}
    return config_in(base.source).values


def is_there(path: str) -> bool:
    """Is there a file, or on this machine anything of that name?"""
    return is_file(path) if is_remote(path) else os.path.lexists(path)


def _is_directory(path: str) -> bool:
    try:
        return is_directory(path)
    except UsageError:  # above a repository
        return False


def read_sidecars(
    directories: Iterable[tuple[str, frozenset[str]]], metadata: Mapping[str, str], *, is_training: bool = False
) -> Sidecars:
    """Collect what is known beyond the tensors: by the names that are meant in each directory, the nearest first.

    Beside a trainer's checkpoint two files that contradict each other are refused: no loader reads one of them alone.
    """
    peft: dict[str, Sourced[object]] = {}
    components = _diffusers_header(metadata)
    found = {name: _found(metadata[name], f"header {name}") for name in _ALPHAS if metadata.get(name) not in _NONE}
    odd = next((Sourced(math.nan, f"header {name}") for name, each in found.items() if each is None), None)
    alphas, arguments = [a for a in found.values() if a is not None and a.value], _header_arguments(metadata)
    alpha, conv_alpha = next(iter(alphas), None), _found(arguments.get("conv_alpha"), ARGUMENTS_HEADER)
    if "" in components:
        peft = dict(components[""])
    if DORA_SCALE in metadata:
        peft[DORA_SCALE] = Sourced(metadata[DORA_SCALE], f"header {DORA_SCALE}")
    for directory, names in directories:
        if not _is_directory(directory):
            continue
        with open_source(directory) as source:
            there = {name for name in names if is_there(os.path.join(directory, name))}
            if ADAPTER_CONFIG in there:
                for key, value in read_json(source, ADAPTER_CONFIG).items():
                    peft.setdefault(key, Sourced(value, ADAPTER_CONFIG))
            for name in (name for name in _RUNS if name in there):
                document = read_json(source, name) if name == _VERL else _plain(source, name)
                for key, keys in _RUNS[name].items():
                    _take(peft, key, Sourced(_dig(document, keys), name), may_differ=not is_training)
            if _LYCORIS in there and alpha is None:
                document = read_json(source, _LYCORIS)
                alpha = _found(document.get("linear_alpha", document.get("alpha")), _LYCORIS)
                conv_alpha = _found(document.get("conv_alpha"), _LYCORIS)
            for name in _AI_TOOLKIT:
                if name in there and alpha is None:
                    alpha, conv_alpha = _ai_toolkit(source, name)
    known = peft.get("lora_alpha")
    if is_training and known and alpha and known.value and known.value != alpha.value:
        raise _contradiction("lora_alpha", known, alpha)
    return Sidecars(
        peft=peft,
        components={name: fields for name, fields in components.items() if name},
        alpha=alpha,
        others=tuple(alphas[1:]),
        unreadable=odd,
        conv_alpha=conv_alpha,
        is_uniform=not any(word in name for name in arguments for word in _VARYING),
        is_ai_toolkit="ai-toolkit" in metadata.get("software", ""),
        stated={key: Sourced(metadata[key], f"header {key}") for key in (ASSUMED, *MODEL_FAMILY) if key in metadata},
    )


RUN_NAMES = frozenset(_RUNS)  # Those that trainers put a level above the weights
TRAINER_NAMES = RUN_NAMES | {_LYCORIS, *_AI_TOOLKIT}
ALL_NAMES = TRAINER_NAMES | {ADAPTER_CONFIG}


def _take(fields: dict[str, Sourced[object]], name: str, found: Sourced[object], *, may_differ: bool) -> None:
    """Add what a trainer's file says, where nothing nearer does; 0 is what verl writes where it does not know."""
    known = fields.get(name)
    is_said = isinstance(found.value, bool) or (isinstance(found.value, int | float | str) and bool(found.value))
    if is_said and (known is None or known.value is None or (known.value == 0 and known.value is not False)):
        fields[name] = found
    elif is_said and known and not may_differ and name != "task_type" and known.value != found.value:
        raise _contradiction(name, known, found)


def _contradiction(name: str, one: Sourced[object], other: Sourced[float] | Sourced[object]) -> UnreadableError:
    what = f"{name} is {one.value!s} in {one.source}, and {other.value!s} in {other.source}"
    return UnreadableError(what, hint="remove the file of the other run")


def _found(value: object, source: str) -> Sourced[float] | None:
    """Return a number that may be an alpha; text counts when it spells one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return Sourced(number, source) if math.isfinite(number) else None


def _diffusers_header(metadata: Mapping[str, str]) -> dict[str, dict[str, Sourced[object]]]:
    """Source: diffusers `loaders/lora_base.py`: one flat object, every key behind the component's name."""
    text = metadata.get(DIFFUSERS_KEY)
    if text is None:
        keys = {name.removesuffix(".lora_alpha"): name for name in metadata if name.endswith(".lora_alpha")}
        found = {name: _found(metadata[key], f"header {key}") for name, key in keys.items()}
        return {name: {"lora_alpha": Sourced(a.value, a.source)} for name, a in found.items() if a is not None}
    source = DIFFUSERS_HEADER
    document = parse_json(text.encode(), what=source, where=None, max_bytes=_MAX_BYTES)
    if not isinstance(document, dict):
        raise UnreadableError(f"{source} is not a JSON object")
    components: dict[str, dict[str, Sourced[object]]] = {}
    for key, value in document.items():
        component, _, name = key.rpartition(".")
        components.setdefault(component, {})[name] = Sourced(value, source)
    return components


def _header_arguments(metadata: Mapping[str, str]) -> Mapping[str, object]:
    """Source: kohya-ss `train_network.py`: the module's arguments as JSON."""
    text = metadata.get("ss_network_args", "null")
    arguments = parse_json(text.encode(), what=ARGUMENTS_HEADER, where=None, max_bytes=_MAX_BYTES)
    return arguments if isinstance(arguments, dict) else {}


def _ai_toolkit(source: Source, name: str) -> tuple[Sourced[float] | None, Sourced[float] | None]:
    """Source: ai-toolkit: config.process[0].network.{linear_alpha, conv_alpha}."""
    network = _dig(_plain(source, name), ("config", "process", "", "network"))
    return _found(_dig(network, ("linear_alpha",)), name), _found(_dig(network, ("conv_alpha",)), name)


def _plain(source: Source, name: str) -> object:
    """Return a YAML or JSON file; its name is anybody's, so that what is of another form says nothing."""
    try:
        return load_yaml(read_document(source, name, _MAX_BYTES).decode(), full=True)
    except (ValueError, LimitError):
        return None


def _dig(document: object, keys: Iterable[str]) -> object:
    """Return a value inside a document, "" for the first of a list; None where there is none."""
    for key in keys:
        if not key:
            document = document[0] if isinstance(document, list) and document else None
        else:
            document = document.get(key) if isinstance(document, dict) else None
    return document


def by_pattern(table: object, path: str, *, where: str) -> tuple[bool, object]:
    """Look a module up in PEFT's rank_pattern or alpha_pattern; return whether a pattern matches, and its value.

    The first pattern that the path ends with counts; raise UsageError for one that is broken or may take for ever.
    """
    if not table:
        return False, None
    if not isinstance(table, dict):
        raise UnreadableError(f"{where} is not a JSON object")
    for pattern, value in table.items():
        if matches(rf"(.*\.)?({pattern})$", path, shown=pattern, where=where):
            return True, value
    return False, None


def matches(pattern: str, text: str, *, shown: str, where: str, full: bool = False) -> bool:
    """Match a regular expression out of a file, which nobody vouches for."""
    # Quantified groups that hold quantifiers take exponential time; module names need none.
    if len(pattern) > _MAX_PATTERN_CHARS or re.search(r"\)\s*[*+{]", shown) or len(re.findall("[*+{]", shown)) > 12:
        raise UsageError(f"the pattern {shown!r} could take forever to match", where=where, hint="name the modules")
    try:
        found = re.fullmatch(pattern, text) if full else re.match(pattern, text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{shown!r} is not a regular expression: {error}", where=where) from error
    return found is not None


# Where in a path the adapter is: which file or directory to open, and where its sidecars may lie.

PEFT_FILE = "adapter_model.safetensors"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
MLX_FILE = "adapters.safetensors"
DIFFUSERS_TRAPS = ("scheduler", "optimizer", "checkpoint")
"""diffusers overlooks a file with one of these in its name, and fails when no other is there."""
_VERL_RANK = re.compile(r"model_world_size_\d+_rank_\d+\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """What to open."""

    path: str  # A safetensors file or a directory
    sidecars: tuple[tuple[str, frozenset[str]], ...]
    """Directories in which sidecars may lie, nearest first, and which of them."""
    took_adapter: bool = False  # The adapter's name chose the directory


def locate(path: str, adapter_name: str | None) -> Location:
    """Find the adapter in a file, a PEFT or DCP directory, accelerate's checkpoint, or a directory of adapters."""
    path = _with_neighbours(path)
    if not is_directory(path):
        directory = os.path.dirname(absolute(path))
        return Location(path=path, sidecars=_companion(directory, path))
    files, directories = list_directory(path)
    if METADATA_NAME in files:
        return Location(path=path, sidecars=_around_dcp(path))
    held = sorted(name for name in directories if is_there(os.path.join(path, name, PEFT_FILE)))
    if adapter_name in held:  # PEFT puts each into a directory of its own, and "default" beside these
        chosen = os.path.join(path, str(adapter_name))
        return Location(path=os.path.join(chosen, PEFT_FILE), sidecars=_companion(chosen, PEFT_FILE), took_adapter=True)
    for name in (PEFT_FILE, DIFFUSERS_FILE, MLX_FILE):
        if name in files:
            return Location(path=os.path.join(path, name), sidecars=_companion(path, name))
    others = [name for name in files if name.endswith(".gguf")]
    if len(others) == 1 and not any(name.endswith(".safetensors") for name in files):
        return Location(path=os.path.join(path, others[0]), sidecars=())
    models = sorted(filter(is_model_part, directories))
    if models:
        return Location(path=path, sidecars=_around_dcp(os.path.join(path, models[0])))
    if any(_VERL_RANK.fullmatch(name) for name in files):
        if held:
            what = "verl's rank files, with the adapter by itself beside them"
            raise UsageError(what, where=path, hint=f"use the adapter that verl wrote: {os.path.join(path, held[0])}")
        return Location(path=path, sidecars=_around_dcp(path))
    roles = [role for role in ROLES if role in directories]
    if roles and not files & {PEFT_FILE, ADAPTER_CONFIG}:
        return Location(path=path, sidecars=_around_dcp(os.path.join(path, roles[0])))
    if held and not any(name.endswith(".safetensors") for name in files):
        shown = first_few(held, 6)
        what = f"a directory of adapters: {shown}"
        raise UsageError(what, where=path, hint=f"choose one: --adapter {held[0]}")
    if "adapter_model.bin" in files:
        what = "a pickled adapter (adapter_model.bin), which ckpt does not execute"
        hint = "save it again with a PEFT that writes safetensors, in a trusted environment"
        raise UnreadableError(what, where=path, hint=hint)
    if ADAPTER_CONFIG in files and not any(name.endswith(".safetensors") for name in files):
        what = f"{ADAPTER_CONFIG} without {PEFT_FILE}: the adapter's tensors were not saved"
        hint = "use the trainer's sharded checkpoint (pytorch_model_fsdp_0, or its DCP directory)"
        raise UnreadableError(what, where=path, hint=hint)
    return Location(path=path, sidecars=_companion(path, ""))


def of_adapter(
    sidecars: tuple[tuple[str, frozenset[str]], ...], name: str, *, is_one_of_several: bool
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the directories with one adapter's configuration: PEFT gives each but "default" one of its own."""
    own = [os.path.join(directory, name) for directory, names in sidecars if ADAPTER_CONFIG in names]
    own = [each for each in own if os.path.basename(name) == name and is_there(os.path.join(each, ADAPTER_CONFIG))]
    is_shared = name == "default" or not (own or is_one_of_several)
    yield from ((each, frozenset({ADAPTER_CONFIG})) for each in own)
    yield from ((directory, names if is_shared else names - {ADAPTER_CONFIG}) for directory, names in sidecars)


def _with_neighbours(path: str) -> str:
    """Return `path`, a page of the hub by its address there; refuse a web server, which lists nothing."""
    if not is_remote(path):
        return path
    source, file = open_place(path)
    with source:
        root = source.root
    if scheme_of(root) in ("http", "https"):
        what = "an adapter has further files beside it, and a web server does not list them"
        raise UsageError(what, where=path, hint="download the adapter with its adapter_config.json")
    return root if file is None else os.path.join(root, file)


def list_directory(path: str) -> tuple[set[str], set[str]]:
    """Return the names of files and of directories."""
    files: set[str] = set()
    directories: set[str] = set()
    if is_remote(path):
        with open_source(path) as source:
            for name in source.list_files():
                first, slash, _ = name.partition("/")
                (directories if slash else files).add(first)
        return files, directories
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                (directories if entry.is_dir() else files).add(entry.name)
    except OSError as error:
        raise StorageError(f"cannot list: {error.strerror}", where=path) from error
    return files, directories


def _companion(directory: str, file: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """PEFT's configuration belongs to PEFT's file; trainers put theirs a level up as well."""
    names = ALL_NAMES
    if file and os.path.basename(file) != PEFT_FILE and is_there(os.path.join(directory, PEFT_FILE)):
        names = TRAINER_NAMES  # somebody else's configuration
    parent = os.path.dirname(absolute(directory))
    return (directory, names), (parent, frozenset({"lora_train_meta.json"}))


def _around_dcp(path: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Trainers put PEFT's configuration beside the DCP directory that holds the model."""
    path = absolute(path)
    parent = os.path.dirname(path)
    above = ALL_NAMES if is_model_part(os.path.basename(path)) else RUN_NAMES
    return (path, ALL_NAMES), (parent, above)
