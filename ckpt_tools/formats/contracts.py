"""What each trainer saves of a step, in which order, and what it does on resuming without a file of it.

Source: transformers 5.23 `trainer.py` (`_save_checkpoint`, `_load_from_checkpoint`, `_load_optimizer_and_scheduler`,
`_load_rng_state`), on which axolotl, LLaMA-Factory and TRL build; accelerate 1.15 `checkpointing.py`,
`utils/fsdp_utils.py`; lightning 2.6 `fabric/strategies/model_parallel.py`; torchtitan 0.3 `components/checkpointer/`;
verl 0.5 `utils/checkpoint/fsdp_checkpoint_manager.py`; deepspeed 0.19.8 `runtime/engine.py`; megatron-core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Without = Literal["crash", "restarts", "ignores"]
"""The trainer stops with an error; goes on and begins a part of its state anew; does not read the file."""
KEY = "key:"
"""Before the first key of a DCP checkpoint, where contracts name one beside files."""


@dataclass(frozen=True, slots=True)
class Need:
    """A part of a step."""

    what: str
    name: str
    """Regular expression of its files, or of `KEY` and the first key of its items; group 1 is the rank, if any."""
    without: Without
    """What the trainer does where the file is missing."""
    broken: Without = "crash"
    """What it does with a file that cannot be read."""
    is_sure: bool = True
    """Every full save has it. Else saves of some settings do: the other saves of a run tell."""
    is_weights: bool = False
    by_rank: bool = False
    """Every rank has one."""
    anew: str = ""
    """What begins anew without it, where that is more than itself."""

    def find(self, names: Collection[str]) -> dict[str, int | None]:
        """Return those of the files and keys that are it, each with its rank."""
        pattern = re.compile(self.name, re.ASCII)
        found = ((name, pattern.fullmatch(name)) for name in sorted(names))
        return {name: int(each[1]) if each.re.groups and each[1] else None for name, each in found if each}

    def file(self, rank: int | None = None) -> str:
        """Return the name of the file that would be it, for people."""
        shown = self.name if rank is None else self.name.replace(r"(\d+)", str(rank))
        while (simpler := re.sub(r"\(\?[:!][^()]*\)\??", "", shown)) != shown:
            shown = simpler
        shown = shown.split("|")[0 if rank is not None else -1]
        shown = shown.replace(r"\d+", "0").replace("_?", "_").replace("\\", "").removesuffix("/.metadata")
        return shown.removeprefix(KEY).removesuffix(".*")

    def tell(self, title: str, *, is_broken: bool = False) -> str:
        """Say what the trainer does without it."""
        match self.broken if is_broken else self.without:
            case "crash":
                return f"{title} stops with an error on resuming"
            case "restarts":
                return f"{title} resumes and begins {self.anew or self.what} anew"
        return f"{title} does not read it"


@dataclass(frozen=True, slots=True)
class Contract:
    """What a full save has, in the order of saving."""

    trainer: str
    title: str
    """For people, as the subject of a sentence."""
    saved: tuple[Need, ...]
    marks: tuple[str, ...]
    """Regular expressions of names: a step of it has a match of each of them."""


_RANKED = r"pytorch_model_fsdp_\d+_rank(\d+)\.bin"
_PARTS = r"pytorch_model_fsdp_\d+/\.metadata|pytorch_model_fsdp_\d+"
_OPTIMIZER_PARTS = r"optimizer_\d+/\.metadata|optimizer_\d+_rank\d+\.bin|optimizer_\d+"
_ANY_PART = rf"{_PARTS}|optimizer_\d+/\.metadata|optimizer_\d+"
_FULL = r"pytorch_model_fsdp(?:_\d+)?\.bin"
_HF = r"(?:[^/]+/)?(?:(?:pytorch_)?model|adapter_model)(?:-\d+-of-\d+)?(?:\.bin|\.safetensors)(?:\.index\.json)?"
_ANY = r"(?:.+/)?[\w.-]+\.safetensors|(?:.+/)?pytorch_model[\w-]*\.bin|model.safetensors"
_ZERO = r"(?:[^/]+/)?zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt|(?:[^/]+/)?mp_rank_00_model_states\.pt"
ZERO_OPTIMIZER = r"(?:[^/]+/)?(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_?optim_states\.pt"
_BIN = r"optimizer(?:_\d+)?\.bin"
_OF_TRAINER = r"trainer_state\.json|scheduler\.pt|rng_state(_\d+)?\.pth|training_args\.bin"
_OF_ACCELERATE = r"random_states_\d+\.pkl|scheduler(_\d+)?\.bin|optimizer(_\d+)?\.bin"
_OPTIMIZER = "the optimizer's state"
_SCHEDULE = "the learning-rate schedule"
_BOTH = "the optimizer and the learning-rate schedule"


def _model(name: str, *, by_rank: bool = False) -> Need:
    return Need("the model", name, "crash", is_weights=True, by_rank=by_rank)


def _of_trainer(model: Need, optimizer: str, mark: str = "", *, by_rank: bool = False) -> Contract:
    """What the Trainer saves of a model, with its optimizer so: it loads optimizer and schedule, or neither."""
    saved = (
        model,
        Need("the config", r"config\.json", "ignores", is_sure=False),
        Need(_OPTIMIZER, optimizer, "crash" if by_rank else "restarts", by_rank=by_rank, anew=_BOTH),
        Need(_SCHEDULE, r"scheduler\.pt", "restarts", anew=_BOTH, is_sure=optimizer != ZERO_OPTIMIZER),
        Need("the gradient scaler", r"scaler\.pt", "restarts", is_sure=False),
        Need("the RNG state", r"rng_state_(\d+)\.pth|rng_state\.pth", "restarts", by_rank=True),
        Need("the Trainer's progress", r"trainer_state\.json", "crash"),
        *([Need("the name of the save to go on from", r"latest", "crash")] if by_rank else []),
    )
    return Contract("trainer", "the Trainer", saved, (mark or model.name, _OF_TRAINER))


def _of_accelerate(model: Need, optimizer: str, *marks: str, by_rank: bool = False) -> Contract:
    """What `save_state` saves of a model, with its optimizer in these files."""
    saved = (
        model,
        Need(_OPTIMIZER, optimizer, "crash", by_rank=by_rank),
        Need(_SCHEDULE, r"scheduler(?:_\d+)?\.bin", "crash", is_sure=False),
        Need("the data loader's sampler", r"sampler(?:_\d+)?\.bin", "crash", is_sure=False),
        Need("the data loader's state", r"dl_state_dict(?:_\d+)?\.bin", "restarts", is_sure=False),
        Need("the gradient scaler", r"scaler\.pt", "crash", is_sure=False),
        Need("the RNG state and step count", r"random_states_(\d+)\.pkl", "restarts", "restarts", by_rank=True),
        Need("an object that the script registered", r"custom_checkpoint_\d+\.pkl", "crash", is_sure=False),
    )
    return Contract("accelerate", "accelerate", saved, marks or (model.name,))


def _of_verl(kind: str, what: str, *, is_weights: bool = False) -> Need:
    name = rf"(?:\w+/)?{kind}_world_size_\d+_rank_(\d+)\.pt"
    return Need(what, name, "crash", is_weights=is_weights, is_sure=is_weights, by_rank=True)


_RANKED_OPTIMIZER = r"optimizer_\d+_rank(\d+)\.bin"
_OWN = rf"{KEY}optim\w*"
_TITAN = rf"{KEY}(?!(?:optimizer|lr_scheduler|train_state|dataloader)$).*"
CONTRACTS: tuple[Contract, ...] = (
    _of_trainer(_model(_PARTS), _OPTIMIZER_PARTS, _ANY_PART),
    _of_accelerate(_model(_PARTS), _OPTIMIZER_PARTS, _ANY_PART),
    _of_accelerate(_model(_RANKED, by_rank=True), _RANKED_OPTIMIZER, by_rank=True),
    _of_trainer(_model(_FULL), _BIN),
    _of_accelerate(_model(_FULL), _BIN),
    _of_trainer(_model(_ZERO, by_rank=True), ZERO_OPTIMIZER, by_rank=True),
    _of_accelerate(_model(_ZERO, by_rank=True), ZERO_OPTIMIZER, _ZERO, _OF_ACCELERATE, by_rank=True),
    Contract(
        "deepspeed",
        "DeepSpeed",
        (
            _model(_ZERO, by_rank=True),
            Need(_OPTIMIZER, ZERO_OPTIMIZER, "crash", by_rank=True),
            Need("the name of the save to go on from", r"latest", "restarts", anew="everything"),
        ),
        (_ZERO,),
    ),
    _of_trainer(_model(_HF), r"optimizer\.pt"),
    _of_accelerate(_model(_ANY), _BIN, r"random_states_\d+\.pkl|optimizer(_\d+)?\.bin"),
    Contract(
        "verl",
        "verl",
        (
            _of_verl("model", "the model", is_weights=True),
            _of_verl("optim", _OPTIMIZER),
            _of_verl("extra_state", "the schedule and the RNG state"),
            Need("the data loader's state", r"data\.pt", "restarts", is_sure=False),
        ),
        (r"(\w+/)?model_world_size_\d+_rank_\d+\.pt",),
    ),
    Contract(
        "lightning",
        "Lightning",
        (
            _model(f"{KEY}state_dict"),
            Need(_OPTIMIZER, rf"{KEY}optimizer_\d+", "crash"),
            Need("loops, callbacks and schedules", r"meta\.pt", "crash"),
        ),
        (f"{KEY}state_dict", rf"{KEY}optimizer_\d+|meta\.pt"),
    ),
    Contract(
        "lightning",
        "Lightning",
        (
            _model(f"{KEY}state_dict"),
            Need(_OPTIMIZER, f"{KEY}optimizer_states", "crash"),
            Need(_SCHEDULE, f"{KEY}lr_schedulers", "crash"),
            Need("the loops", f"{KEY}loops", "crash"),
        ),
        (f"{KEY}pytorch-lightning_version",),
    ),
    Contract(
        "torchtitan",
        "torchtitan",
        (
            _model(_TITAN),
            Need(_OPTIMIZER, f"{KEY}optimizer", "crash"),
            Need(_SCHEDULE, f"{KEY}lr_scheduler", "crash"),
            Need("the data loader's state", f"{KEY}dataloader", "crash", is_sure=False),
            Need("torchtitan's progress", f"{KEY}train_state", "crash"),
        ),
        (f"{KEY}lr_scheduler|{KEY}train_state", rf"{KEY}[^.]+\..+"),  # the model's own keys lie at the root
    ),
    Contract(
        "megatron",
        "Megatron",
        (_model(r"\.metadata"), Need("the trainer's arguments and progress", r"common\.pt", "crash", is_sure=False)),
        (r"\.metadata", r"metadata\.json"),
    ),
    Contract(
        "plain", "the loop", (_model(rf"{KEY}(?!optim).*"), Need(_OPTIMIZER, _OWN, "crash", is_sure=False)), (_OWN,)
    ),
)
"""The first one whose marks are all there is a step's."""


def find_contract(names: Collection[str]) -> Contract | None:
    """Return whose step a directory with these files, and `KEY` with the first keys of its items, is."""
    return next((each for each in CONTRACTS if all(_any(mark, names) for mark in each.marks)), None)


def _any(pattern: str, names: Collection[str]) -> bool:
    return any(map(re.compile(pattern, re.ASCII).fullmatch, names))
