"""What an estimate says, as values and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ckpt_tools.estimate.case import Case, Margin
from ckpt_tools.results import CheckedResult, as_json, plain
from ckpt_tools.units import format_device, format_size


class UntrackedError(Exception):
    """A case whose memory cannot be tracked, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is held while one block runs, when it is the most."""

    phase: str  # "forward", "backward" (with what is recomputed in it) or "step", the optimizer's
    block: str  # The block's name; "" for what runs outside of blocks. What runs before a block goes backward with it
    held: Mapping[str, int]  # Bytes on the device, as in `Memory.at_peak`


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of the rank that holds the most, in bytes.

    The first five are each the most that it takes at any time; they do so at different times, and `peak` is less than
    their sum.
    """

    params: int  # This rank's part of the parameters, trained and frozen, and the buffers
    grads: int  # This rank's part of the gradients, once backward is over
    optimizer: int  # State of the optimizer between steps
    activations: int  # Inputs, what forward keeps for backward, and what backward computes with
    gathered: int  # Parameters gathered from other ranks and gradients on their way to them
    peak: int  # The most at any time, on the device
    host: int = 0  # Held in host memory instead (offload)
    at_peak: Mapping[str, int] = field(default_factory=dict)
    """What `peak` is made of: the five above, and "step", what the optimizer's step needs for itself."""
    moments: tuple[Moment, ...] = ()  # The training step in order, where it was tracked; the highest holds `peak`

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it, without the moments."""
        return {name: value for name, value in asdict(self).items() if name != "moments"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseEstimate:
    """One way to train the model, and what it takes."""

    case: Case
    formula: Memory  # By arithmetic
    tracked: Memory | None  # By PyTorch's tracker, of a step that was run without data
    why_not_tracked: str | None = None  # When it was not
    margin: Margin  # Beside the tensors
    fits: bool | None = None
    """Do peak and margin fit in the device? None when nothing says how large it is, or `doubt` decides."""
    doubt: str | None = None  # Why it is not known whether it fits, although the device's size is

    @property
    def per_rank(self) -> Memory:
        """What counts: what was tracked, else the formula."""
        return self.tracked or self.formula

    @property
    def needed(self) -> int:
        """Peak and margin, in bytes."""
        return self.per_rank.peak + self.margin.total

    @property
    def difference(self) -> float | None:
        """How far the formula's peak is from the tracked one, relative to that."""
        if self.tracked is None or not self.tracked.peak:
            return None
        return (self.formula.peak - self.tracked.peak) / self.tracked.peak

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        return {
            **as_json(self.case, "strategy mesh label"),
            "mesh": str(self.case.mesh),
            "case": self.case.to_json(),
            "method": "formula" if self.tracked is None else "tracked",
            **as_json(self, "per_rank formula tracked"),
            "timeline": plain(self.per_rank.moments),
            **as_json(self, "difference why_not_tracked margin needed fits doubt"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A change that was tried because nothing fitted."""

    what: str  # The change, in words and options
    estimate: CaseEstimate

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        return {"what": self.what, **self.estimate.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate(CheckedResult):
    """What `estimate` found."""

    model: str  # What was estimated, and where its sizes come from
    params: int
    cases: tuple[CaseEstimate, ...]  # Every way that was asked for
    gpu_memory: int | None = None  # Bytes of a device
    proposals: tuple[Proposal, ...] = ()  # When nothing fits: what was tried, and the first that fits last
    notes: tuple[str, ...] = ()  # What the numbers do not cover
    seconds: float = 0.0  # What the estimate took
    peak_rss_bytes: int = 0  # Memory of the process that tracked, at most

    @property
    def per_rank(self) -> Memory:
        """Of the first way."""
        return self.cases[0].per_rank

    @property
    def fits(self) -> bool | None:
        """Does any way fit? None when nothing says how large a device is, or it is not known of one and none does."""
        if self.gpu_memory is None:
            return None
        if any(case.fits for case in self.cases):
            return True
        return None if any(case.doubt for case in self.cases) else False

    @property
    def recommended(self) -> CaseEstimate | None:
        """Of the ways that fit, the one with the least recomputation, then the least gathering of parameters."""
        return min((case for case in self.cases if case.fits), key=lambda each: each.case.cost, default=None)

    @property
    def recommendation(self) -> str | None:
        """Which way to train, or which change would fit, and why; None where there is neither."""
        best, change = self.recommended, self.advice
        if best is None:
            return None if change is None else f"with {change.what} it would: {self._need(change.estimate)}"
        fitting = [case.case.cost[0] for case in self.cases if case.fits]
        least = ", then the least gathering of parameters" * (fitting.count(best.case.cost[0]) > 1)
        why = f"; the least recomputation that fits{least}" if len(fitting) > 1 else "; the only one that fits"
        return self._need(best) + (why if len(self.cases) > 1 else "; --strategy all compares the others")

    def _need(self, found: CaseEstimate) -> str:
        sizes = (format_size(found.per_rank.peak), format_size(found.margin.total), format_device(self.gpu_memory or 0))
        label = found.case.label.replace(" + checkpointing", " with activation checkpointing")
        held = "peak {} and margin {} of {}".format(*sizes)
        return f"{label} on {found.case.mesh}: {held}"

    @property
    def ok(self) -> bool:
        """True unless a device is known and nothing is known to fit it."""
        return bool(self.fits) or self.gpu_memory is None

    @property
    def title(self) -> str:
        """Does it fit, and what does the first way take?"""
        needed = f"{format_size(self.cases[0].needed)} per rank" if self.cases else ""
        fits = {True: "fits", False: "does NOT fit", None: "not known whether it fits"}[self.fits]
        return needed if self.gpu_memory is None else f"{fits}, {needed}"

    @property
    def advice(self) -> Proposal | None:
        """The cheapest change that fits."""
        return next((proposal for proposal in self.proposals if proposal.estimate.fits), None)

    def to_json(self) -> dict[str, object]:
        """Return the JSON document (without the schema version)."""
        document = as_json(self, "model params per_rank strategies=cases gpu_memory fits advice proposals notes")
        return document | {"seconds": round(self.seconds, 3), "peak_rss_bytes": self.peak_rss_bytes}
