"""What a checkpoint is, and whether it is whole: the answer that every command prints and obeys.

Made at opening by `formats.identify`, from small reads alone ([0016](../decisions/0016-identity.md)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from ckpt_tools.results import Result
from ckpt_tools.text import counted, escape_message
from ckpt_tools.units import format_number

Known = Literal["yes", "no", "not known"]
Whole = Literal["yes", "part", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCount:
    """A number of training steps, and the files that say it."""

    step: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One of several sets of weights that lie together."""

    name: str
    """The file, index or directory that names it."""
    files: tuple[str, ...]
    is_taken: bool
    why: str
    """Why it is taken, or not."""
    differs: Known = "not known"
    """From the one that is taken."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Identity(Result):
    """What a checkpoint is. Whatever is not known is empty, None or "not known"."""

    format: str
    """How it is stored: a name of `formats.table`."""
    trainer: str = ""
    steps: tuple[StepCount, ...] = ()
    """More than one: its files are of different steps."""
    mesh: str = ""
    num_ranks: int | None = None
    architecture: str = ""
    num_parameters: int = 0
    """Elements of the model's tensors, without optimizer state; tied ones as often as they are stored."""
    num_layers: int | None = None
    hidden_size: int | None = None
    dtypes: Mapping[str, int] = field(default_factory=dict)
    """Dtype of the model's tensors → bytes, most first."""
    quantisation: str = ""
    names: str = ""
    """Whose names the tensors have."""
    components: tuple[str, ...] = ()
    """Models in the repository, where there are several."""
    whole: Whole = "not known"
    evidence: tuple[str, ...] = ()
    """Why it is whole or a part, in words."""
    by_names: bool = False
    """It is a part by ckpt's table of names alone, which may not know the model in this form."""
    hollow: str = ""
    """Why it holds nothing, though its names are there."""
    chosen: str = ""
    """Why it is a part on purpose, as the manifest of ckpt says."""
    resumable: Known = "not known"
    """Could its trainer resume from it, completely?"""
    reasons: tuple[str, ...] = ()
    """Why, or why not."""
    candidates: tuple[Candidate, ...] = ()
    executables: tuple[str, ...] = ()
    """Pickles and code that came along, and what they would import or run."""
    not_read: tuple[str, ...] = ()
    """What was not looked at."""

    @property
    def title(self) -> str:
        """One line: `Qwen3ForCausalLM · 36 layers · 8.2 B parameters · bf16 · torchtitan step 2000 · whole`."""
        step = " and ".join(str(count.step) for count in self.steps)
        who = " ".join(filter(None, (self.trainer, f"step {step}" if step else "")))
        ranks = "" if self.num_ranks is None else counted(self.num_ranks, "rank")
        resumable = {"yes": "resumable", "no": "not resumable", "not known": ""}[self.resumable]
        part = "a part, on purpose" if self.chosen else "a PART"
        whole = {"yes": "whole", "part": part, "not known": "whole or not: not known"}[self.whole]
        parts = (
            self.architecture or (f"{len(self.components)} models" if self.components else "architecture not known"),
            counted(self.num_layers, "layer") if self.num_layers else "",
            f"{count_text(self.num_parameters)} parameters",
            self.quantisation or "+".join(name.lower() for name in list(self.dtypes)[:3]),
            who,
            " ".join(filter(None, (ranks, self.mesh))),
            whole,
            resumable if self.trainer else "",
        )
        return escape_message(" · ".join(filter(None, parts)))

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        return asdict(self)


def count_text(number: int) -> str:
    """Return a number of parameters as people write it: 8.2 B, 135 M, 1,234."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{format_number(number / size)} {unit}"
    return f"{number:,}"


TrainerName = Literal["accelerate", "trainer", "torchtitan", "lightning", "verl", "plain"]
