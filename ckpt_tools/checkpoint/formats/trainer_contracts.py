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
from functools import cache

KEY = "key:"  # Before the first key of a DCP checkpoint, where contracts name one beside files
MODEL, OPTIMIZER = "the model", "the optimizer's state"
SCHEDULE, SCALER = "the learning-rate schedule", "the gradient scaler"
_SIGNS = {r"\#": r"(0|[1-9]\d{0,5})", r"\*\*": ".*", r"\*": r"\d+", r"\[/\]": "(?:[^/]+/)?", r"\[": "(?:", r"\]": ")?"}
_SIGNS |= {r"\ ": "|", r"\|": "|"}
_TITLES = {"trainer": "the Trainer", "deepspeed": "DeepSpeed", "lightning": "Lightning", "megatron": "Megatron"}


@cache
def _pattern(names: str) -> re.Pattern[str]:
    """Return what matches one of `names`: # is a number that counts, * another, ** anything, [a|b] may be left out."""
    signs = "|".join(map(re.escape, _SIGNS))
    return re.compile(re.sub(signs, lambda found: _SIGNS[found[0]], re.escape(names)), re.ASCII)


@dataclass(frozen=True, slots=True)
class Need:
    """A part of a step."""

    what: str
    names: str  # Of its files, or `KEY` and the first key of its items (`_pattern`); the first is shown to people
    anew: str = ""  # What the trainer begins anew without it; "" where it stops with an error
    is_sure: bool = True  # Every full save has it. Else saves of some settings do: the other saves of a run tell.
    by_rank: bool = False  # Every rank has one; else numbers are of several models, optimizers, … from 0 on
    is_lenient: bool = False  # The trainer takes a file that cannot be read for one that is missing; else it stops

    def file(self, number: int | None = None) -> str:
        """Return the name of the file that would be it, for people."""
        shown = self.names.partition(" ")[0]
        shown = re.sub(r"\[([^]]*)\]", lambda found: found[1] if number is not None and "#" in found[1] else "", shown)
        return shown.replace("#", str(number or 0)).replace("**", "").replace("*", "0").removeprefix(KEY)

    def tell(self, title: str, *, is_broken: bool = False) -> str:
        """Say what the trainer does without it."""
        goes_on = self.anew and (self.is_lenient or not is_broken)
        return f"{title} resumes, but resets {self.anew}" if goes_on else f"{title} stops with an error on resuming"


@dataclass(frozen=True, slots=True)
class Contract:
    """What a full save has."""

    trainer: str
    marks: str  # A step of it has a match of each of them; "&" stands between them
    saved: tuple[Need, ...]  # In the order of saving; a name is of the first that it matches

    @property
    def title(self) -> str:
        """For people, as the subject of a sentence."""
        return _TITLES.get(self.trainer, self.trainer)

    def sort(self, names: Collection[str]) -> dict[Need, dict[str, int | None]]:
        """Return which of these names are there of each need, each with its number."""
        found: dict[Need, dict[str, int | None]] = {need: {} for need in self.saved}
        for name in sorted(names):
            for need in self.saved:
                if match := _pattern(need.names).fullmatch(name):
                    found[need][name] = int(match[match.lastindex]) if match.lastindex else None
                    break
        return found


_PARTS, _OPTIMIZER_PARTS = "pytorch_model_fsdp_#", "optimizer_# optimizer_*_rank*.bin"
_RANKED, _FULL = "pytorch_model_fsdp_*_rank#.bin", "pytorch_model_fsdp[_#].bin"
_HF = "[/][pytorch_|adapter_]model[-*-of-*]"
_HF = f"{_HF}.safetensors[.index.json] {_HF}.bin[.index.json]"
_ANY = "model[_#].safetensors pytorch_model[_#].bin **.safetensors [**/]pytorch_model**.bin"
_ZERO = "[/][zero_pp_rank_#_]mp_rank_00_model_states.pt"
ZERO_OPTIMIZER = "[/][bf16_|fp16_]zero_pp_rank_#_mp_rank_00"
ZERO_OPTIMIZER = f"{ZERO_OPTIMIZER}_optim_states.pt {ZERO_OPTIMIZER}optim_states.pt"
_BIN = "optimizer[_#].bin"
_OF_TRAINER = "trainer_state.json scheduler.pt rng_state[_#].pth training_args.bin"
_LATEST = Need("the name of the save to go on from", "latest")
_ANEW = "the optimizer and the learning-rate schedule"


def _contract(trainer: str, marks: str, *saved: Need) -> Contract:
    return Contract(trainer, marks, saved)


def _of_trainer(model: str, optimizer: str, mark: str = "", *, by_rank: bool = False) -> Contract:
    """What the Trainer saves of a model, with its optimizer so: it loads optimizer and schedule, or neither."""
    return _contract(
        "trainer",
        f"{mark or model} & {_OF_TRAINER}",
        Need(MODEL, model, by_rank=by_rank),
        Need("the config", "config.json", is_sure=False),
        Need(OPTIMIZER, optimizer, "" if by_rank else _ANEW, by_rank=by_rank),
        Need(SCHEDULE, "scheduler.pt", "" if by_rank else _ANEW, is_sure=not by_rank),
        Need(SCALER, "scaler.pt", SCALER, is_sure=False),
        Need("the RNG state", "rng_state[_#].pth", "the RNG state", by_rank=True),
        Need("the Trainer's progress", "trainer_state.json"),
        *([_LATEST] if by_rank else []),
    )


def _of_accelerate(model: str, optimizer: str, marks: str = "", *, by_rank: bool = False) -> Contract:
    """What `save_state` saves of a model, with its optimizer in these files."""
    return _contract(
        "accelerate",
        marks or model,
        Need(MODEL, model, by_rank=by_rank),
        Need(OPTIMIZER, optimizer, by_rank=by_rank),
        Need(SCHEDULE, "scheduler[_#].bin", is_sure=False),
        Need("the data loader's state", "sampler[_*].bin dl_state_dict[_*].bin", is_sure=False),
        Need(SCALER, "scaler.pt", is_sure=False),
        Need("the RNG state", "random_states_#.pkl", "the RNG state", by_rank=True, is_lenient=True),
        Need("an object that the script registered", "custom_checkpoint_#.pkl", is_sure=False),
    )


CONTRACTS: tuple[Contract, ...] = (
    _of_trainer(_PARTS, _OPTIMIZER_PARTS, f"{_PARTS} optimizer_#"),
    _of_accelerate(_PARTS, _OPTIMIZER_PARTS, f"{_PARTS} optimizer_#"),
    _of_accelerate(_RANKED, "optimizer_*_rank#.bin", by_rank=True),
    _of_trainer(_FULL, _BIN),
    _of_accelerate(_FULL, _BIN),
    _of_trainer(_ZERO, ZERO_OPTIMIZER, by_rank=True),
    _of_accelerate(_ZERO, ZERO_OPTIMIZER, f"{_ZERO} & random_states_#.pkl scheduler[_#].bin {_BIN}", by_rank=True),
    _contract(
        "deepspeed",
        _ZERO,
        Need(MODEL, _ZERO, by_rank=True),
        Need(OPTIMIZER, ZERO_OPTIMIZER, by_rank=True),
        Need(_LATEST.what, _LATEST.names, "everything"),
    ),
    _of_trainer(_HF, "optimizer.pt"),
    _of_accelerate(_ANY, _BIN, f"random_states_#.pkl {_BIN}"),
    _of_accelerate(_ANY, _BIN, "model.safetensors & model_#.safetensors"),
    _contract(
        "verl",
        "[/]model_world_size_*_rank_#.pt",
        Need(MODEL, "[/]model_world_size_*_rank_#.pt", by_rank=True),
        Need(OPTIMIZER, "[/]optim_world_size_*_rank_#.pt", is_sure=False, by_rank=True),
        Need("the schedule and the RNG state", "[/]extra_state_world_size_*_rank_#.pt", is_sure=False, by_rank=True),
        Need("the data loader's state", "data.pt", "the data loader's state", is_sure=False),
    ),
    _contract(
        "lightning",
        "key:state_dict & key:optimizer_* meta.pt",
        Need(MODEL, "key:state_dict"),
        Need(OPTIMIZER, "key:optimizer_*"),
        Need("loops, callbacks and schedules", "meta.pt"),
    ),
    _contract(
        "lightning",
        "key:pytorch-lightning_version",
        Need(MODEL, "key:state_dict"),
        Need(OPTIMIZER, "key:optimizer_states"),
        Need(SCHEDULE, "key:lr_schedulers"),
        Need("the loops", "key:loops"),
    ),
    _contract(
        "torchtitan",
        "key:lr_scheduler key:train_state & key:**.**",  # the model's own keys lie at the root
        Need(OPTIMIZER, "key:optimizer"),
        Need(SCHEDULE, "key:lr_scheduler"),
        Need("the data loader's state", "key:dataloader", is_sure=False),
        Need("torchtitan's progress", "key:train_state"),
        Need(MODEL, "key:**"),
    ),
    _contract(
        "megatron",
        ".metadata & metadata.json",
        Need(MODEL, ".metadata"),
        Need("the trainer's arguments and progress", "common.pt", is_sure=False),
    ),
    _contract(
        "plain", "key:optim**", Need(OPTIMIZER, "key:optim**", is_sure=False), Need(MODEL, "key:**", is_sure=False)
    ),
)
"""The first one whose marks are all there is a step's."""


def describe(name: str) -> str:
    """Say what a trainer keeps in a file of this name; "" for what is not known."""
    needs = (need for contract in CONTRACTS for need in contract.saved)
    rest = "the Trainer's arguments" if name == "training_args.bin" else ""
    return next((need.what for need in needs if _any(need.names, [name])), rest)


def find_contract(names: Collection[str]) -> Contract | None:
    """Return whose step a directory with these files, and `KEY` with the first keys of its items, is."""
    return next((each for each in CONTRACTS if all(_any(mark, names) for mark in each.marks.split(" & "))), None)


def _any(names: str, there: Collection[str]) -> bool:
    return any(map(_pattern(names).fullmatch, there))
