"""What file names tell of files that no format has claimed: weights of some tool, a model's assets, a trainer's own."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from ckpt_tools.tables import read_rows
from ckpt_tools.text import counted, first_few

CONFIG_NAME = "config.json"  # Of a model, beside its weights
INDEX_SUFFIX = ".safetensors.index.json"
METADATA_NAME = ".metadata"  # The file that makes a directory a DCP checkpoint; written last
PICKLES = (".bin", ".pt", ".pth", ".ckpt")  # Ends of the names of what `torch.save` writes

_WEIGHTS = (
    ".metadata", "*.safetensors", "*.distcp", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx",
    "*.onnx_data", "*.gguf", "*.npz", "*.ot", "*.tflite", "*.index.json",
)  # fmt: skip
_HF_ASSETS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab*", "merges.txt", "*.model", "chat_template*", "*processor*.json", "*.jinja", "*.py", "README.md",
    "LICENSE*", "modules.json", "*_Pooling/config.json", "*sentence*.json",
)  # fmt: skip

_SIDE = re.compile(
    r"(optim|scheduler|scaler|rng_state|random_states|sampler|training_args|data|extra_state)[\w-]*\.\w+"
    r"|(common|train_state)\.pt"  # of Megatron's
)


def is_side_file(name: str) -> bool:
    """Does a trainer keep a pickle of this name beside the weights?"""
    return _SIDE.fullmatch(name) is not None


def is_weights(name: str) -> bool:
    """Does a file of this name hold weights (in any tool's format)?"""
    base = name.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(base, pattern) for pattern in _WEIGHTS)


def is_step_file(name: str) -> bool:
    """Does a trainer keep a file of this name beside the DCP files of a step? Pickles of its own do, weights do not."""
    return "/" not in name and (name.endswith((*PICKLES, ".pkl")) or not is_weights(name))


def is_for_people(name: str) -> bool:
    """Does no program read a file of this name?"""
    base = name.rpartition("/")[2].lower()
    return base.endswith(".md") or base.startswith(("license", "notice", "readme"))


def is_hf_asset(name: str) -> bool:
    """Is a file of this name one that transformers or a tokenizer needs?"""
    return not is_weights(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in _HF_ASSETS)


def files_below(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the files of every directory, named relative to it."""
    found: dict[str, dict[str, int]] = {}
    for name, size in files.items():
        directory, slash, rest = name.partition("/")
        if slash:
            found.setdefault(directory, {})[rest] = size
    return found


@dataclass(frozen=True, slots=True)
class PartName:
    """A way to name the parts of a model."""

    names: re.Pattern[str]  # Of the whole path; group `i` is the number of the part, `n` of how many
    what: str  # Whose parts they are
    whole: str  # How to make the whole of them
    first: int  # The number of the first


@cache
def _part_names() -> tuple[PartName, ...]:
    """Return the rows of `part_names.tsv`."""
    rows = read_rows(__package__, "part_names.tsv")
    return tuple(PartName(re.compile(row["names"]), row["what"], row["whole"], int(row["first"])) for row in rows)


@dataclass(frozen=True, slots=True)
class NamedPart:
    """What a name says."""

    kind: PartName
    index: int
    count: int | None
    series: tuple[str, ...]  # What all parts of one model have in common: the directory, the stem of the names, …


def read_part_name(path: str) -> NamedPart | None:
    """Return what the name of a file, below its directory, says of a part; None for any other name."""
    if not is_weights(path):
        return None
    for kind in _part_names():
        if (match := kind.names.fullmatch(path)) is not None:
            groups = match.groupdict()
            count = int(groups["n"]) if groups.get("n") else None
            series = (
                os.path.dirname(path) if "more" not in groups else "",
                *(groups.get(k) or "" for k in ("stem", "end")),
            )
            return NamedPart(kind, int(groups["i"] or groups["j"]), count, (*series, str(count)))
    return None


def explain_parts(files: Iterable[str]) -> tuple[NamedPart, str] | None:
    """Return what the names of these files say, and in words what they are, where they are parts of one model."""
    found = {name: named for name in files if (named := read_part_name(name)) is not None}
    series = Counter(named.series for named in found.values())
    if max(series.values(), default=0) < 2:
        return None
    names = [name for name, named in found.items() if named.series == series.most_common(1)[0][0]]
    named = found[names[0]]
    return named, f"{counted(len(names), 'file')}, each {named.kind.what}: {first_few(sorted(names))}"


def parts_of(taken: Iterable[str], files: Iterable[str]) -> Iterator[tuple[NamedPart, str]]:
    """Yield why the `taken` files are not all of a model, to judge by the names of all `files` beside them."""
    # That is what the name says, and in words what is there and what is missing.
    own: dict[tuple[str, ...], dict[int, str]] = {}
    kinds: dict[tuple[str, ...], NamedPart] = {}
    for name in taken:
        if (found := read_part_name(name)) is not None:
            own.setdefault(found.series, {})[found.index] = name
            kinds[found.series] = found
    if not own:
        return
    companions: dict[tuple[str, ...], set[int]] = {series: set() for series in own}
    for name in files:
        if (found := read_part_name(name)) is not None and found.series in companions:
            companions[found.series].add(found.index)
    for series, names in own.items():
        named = kinds[series]
        missing = companions[series] - names.keys()
        some = next(iter(names.values()))
        if named.count is not None:
            if len(names) < named.count:  # numbers begin at 0 or 1
                yield named, f"{some}: {len(names)} of {named.count} files of one model"
        elif missing:
            yield named, f"{some}: {named.kind.what}; this directory has {len(names) + len(missing)} of them"
        elif min(names) > named.kind.first:
            yield named, f"{some}: {named.kind.what}, but not the first"
