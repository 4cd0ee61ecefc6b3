"""What the directory of a training step looks like, trainer by trainer.

Most trainers save a step as one DCP directory. accelerate and transformers' Trainer give the model and the optimizer a
DCP directory each, and put small files beside: RNG states of every rank, the scheduler, the trainer's own progress.

Source: accelerate 1.15 `utils/fsdp_utils.py`, `checkpointing.py`; transformers 5.23 `trainer.py`; lightning 2.6
`fabric/strategies/model_parallel.py`; torchtitan 0.3 `components/checkpointer/dcp.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from ckpt_tools.checkpoint.entries import Asset, Checkpoint
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME, is_hf_asset
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.trainer_contracts import describe
from ckpt_tools.checkpoint.identity import TrainerName
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.tables import read_rows
from ckpt_tools.text import counted, first_few

Holds = Literal["model", "optimizer"]
Library = Literal["diffusers", "sentence-transformers", "files"]
"""Whose repository of several models it is; "files" where each is one file of a directory."""

MODEL_PART = "pytorch_model_fsdp_0"
OPTIMIZER_PART = "optimizer_0"
HERE = "."  # What the model of a repository is called that lies in the directory itself
POLICY_PART = "actor"  # Where verl puts the policy inside of a global_step_N
ROLES = (POLICY_PART, "policy", "critic", "ref")
"""Directories of the models in a step of verl's or SkyRL's, the one that is trained for its own sake first."""
_PART = re.compile(r"(pytorch_model_fsdp|optimizer)_(0|[1-9]\d{0,5})", re.ASCII)
_RANK_FILE = re.compile(r"(pytorch_model_fsdp|optimizer)\w*_rank\d+\.bin", re.ASCII)
_HOLDS: Mapping[str, Holds] = {"pytorch_model_fsdp": "model", "optimizer": "optimizer"}
PROGRESS_FILE = "trainer_state.json"  # Where the Trainer writes how far it is; the last file of a save
_TITLES = {
    "accelerate": "accelerate's step",
    "trainer": "the Trainer's step",
    "verl": "verl's step",
    "diffusers": "a diffusers pipeline",
    "sentence-transformers": "a sentence-transformers model",
    "files": "a directory",
}
_LOADER = re.compile(r"dataloader\.dp_rank_\d+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A DCP directory inside of a step."""

    directory: str  # Its name in the step
    holds: Holds
    index: int  # Which of several models or optimizers
    nbytes: int  # Of its files
    is_saved: bool  # It has `.metadata`: its save came to an end

    @property
    def name(self) -> str:
        """What a model of a repository is called, be it a directory or a file."""
        return self.directory.removesuffix(".safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The directory of a step that keeps the model and the optimizer apart."""

    trainer: Literal["accelerate", "trainer", "verl"] | Library
    parts: tuple[StepPart, ...]  # Models before optimizers
    companions: tuple[Asset, ...]  # Every other file
    lacking: tuple[str, ...] = ()  # Models that a repository says it has, and that have no weights here

    @classmethod
    def of_models(
        cls, trainer: Literal["verl"] | Library, sizes: Mapping[str, int], companions: Mapping[str, int], *lacking: str
    ) -> Self:
        """Return one of models alone (directory → bytes), beside which lie these files."""
        named = enumerate(sizes.items())
        parts = (StepPart(directory=d, holds="model", index=i, nbytes=n, is_saved=True) for i, (d, n) in named)
        assets = (Asset(file=name, nbytes=size) for name, size in companions.items())
        return cls(trainer=trainer, parts=tuple(parts), companions=tuple(assets), lacking=lacking)

    @property
    def title(self) -> str:
        """Whose it is, for people."""
        return _TITLES[self.trainer]

    @property
    def is_repository(self) -> bool:
        """Is it no step, but several models that are used together?"""
        return self.trainer in get_args(Library)

    @property
    def has_own(self) -> bool:
        """Does one of the models lie in the directory itself?"""
        return any(not part.directory for part in self.parts)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of a repository's models, the likeliest to be meant first."""
        return tuple(part.name or HERE for part in self.parts) if self.is_repository else ()

    @property
    def models(self) -> tuple[StepPart, ...]:
        """The parts that hold a model."""
        return tuple(part for part in self.parts if part.holds == "model")

    @property
    def rank_files(self) -> tuple[str, ...]:
        """Pickles of a rank's own part of a model or an optimizer (accelerate's use_dcp=False), in order."""
        return tuple(sorted(filter(_RANK_FILE.fullmatch, self.names)))

    @property
    def names(self) -> frozenset[str]:
        """Names of the files beside the parts."""
        return frozenset(asset.file for asset in self.companions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """What a trainer starts from: a row of `step_layouts.tsv`, which says what they are."""

    trainer: str
    names: str
    prefix: str
    part: str
    start: str
    refusal: str
    instead: str


def trainer_layout(trainer: TrainerName) -> TrainerLayout:
    """Return the row of a trainer in `step_layouts.tsv`."""
    row = next(row for row in read_rows(__package__, "step_layouts.tsv") if row["trainer"] == trainer)
    return TrainerLayout(**{name: "" if text == "-" else text for name, text in row.items()})


def find_step(files: Mapping[str, int]) -> Step | None:
    """Return the step that a directory with these files (relative name → size) is; None when it is none of its kind."""
    sizes: dict[str, int] = {}
    for name, size in files.items():
        directory, slash, _ = name.partition("/")
        if slash and is_part(directory):
            sizes[directory] = sizes.get(directory, 0) + size
    held = [name for name in sizes if any(_is_data(file, name) for file in files)]
    if not held or METADATA_NAME in files:
        return None
    parts = sorted((_part(name, sizes[name], files) for name in held), key=lambda part: (part.holds, part.index))
    own = (MANIFEST_NAME, JOURNAL_NAME)
    companions = (name for name in files if name.partition("/")[0] not in held and name not in own)
    return Step(
        trainer="trainer" if PROGRESS_FILE in files else "accelerate",
        parts=tuple(parts),
        companions=tuple(Asset(file=name, nbytes=files[name]) for name in companions),
    )


def is_part(directory: str) -> bool:
    """Is this what accelerate calls the directory of a model or an optimizer inside of a step?"""
    return _PART.fullmatch(directory) is not None


def is_model_part(directory: str) -> bool:
    """Is this what accelerate calls the directory of a model inside of a step?"""
    return is_part(directory) and not directory.startswith("optimizer")


def list_contents(step: Step) -> Iterator[tuple[str, int, str]]:
    """Yield what a step consists of: (name, bytes, what it is). Files that differ by a number are one row."""
    whole = {"model": "a model" if step.is_repository else "the model", "optimizer": "the optimizer's state"}
    for part in step.parts:
        yield (
            part.directory or HERE,
            part.nbytes,
            whole[part.holds] + ("" if part.is_saved else ", not completely saved"),
        )
    rows: dict[str, list[Asset]] = {}
    for asset in step.companions:
        rows.setdefault(re.sub(r"\d+", "*", asset.file), []).append(asset)
    for pattern, assets in rows.items():
        one = len(assets) == 1
        name = assets[0].file if one else f"{pattern} ({counted(len(assets), 'file')})"
        yield name, sum(asset.nbytes for asset in assets), describe(assets[0].file)


def note_reading(step: Step) -> str:
    """Say that the model is read of a step, and what is not; a config or a tokenizer may be."""
    model = step.models[0].directory or HERE
    others = replace(step, companions=tuple(asset for asset in step.companions if not is_hf_asset(asset.file)))
    rest = [name for name, _, _ in list_contents(others) if name != model]
    return f"reads {model} of {step.title}" + (f", and not {first_few(rest, 6)}" if rest else "")


def dataloader_ranks(checkpoint: Checkpoint) -> int:
    """Return of how many data-parallel ranks torchtitan's data loader left its state; 0 where there is none."""
    return sum(_LOADER.fullmatch(blob.fqn) is not None for blob in checkpoint.blobs)


def _part(name: str, nbytes: int, files: Mapping[str, int]) -> StepPart:
    kind, _, number = name.rpartition("_")
    return StepPart(
        directory=name,
        holds=_HOLDS[kind],
        index=int(number),
        nbytes=nbytes,
        is_saved=f"{name}/{METADATA_NAME}" in files,
    )


def _is_data(file: str, directory: str) -> bool:
    """Is this a file of DCP directly in the directory?"""
    parent, _, name = file.rpartition("/")
    return parent == directory and (name == METADATA_NAME or name.endswith(".distcp"))
