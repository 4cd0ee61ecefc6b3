"""One rule, and the tensor-parallel styles that a rule can name instead of placements.

A style says how a module is parallelised; what matters on disk is which dim of its parameters the axis cuts.

Source: the styles that transformers registers (`transformers/distributed/tensor_parallel.py` and
`expert_parallel.py` in 5.23; the `local_*`, `*_rep` and `sequence_parallel` spellings of 4.5x), which are
`torch.distributed.tensor.parallel`'s ColwiseParallel and RowwiseParallel for the weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckpt_tools.checkpoint.globs import NameIndex, expand_braces, find_named
from ckpt_tools.checkpoint.layout import Mesh, Placement, Shard
from ckpt_tools.errors import UsageError

Cut = Literal["out", "in", "packed_out", "packed_in", "rows", "columns", "experts", "whole"]
"""What a style cuts: a layer's output or input features, those of each of the matrices that one tensor holds side by
side, a table's rows or columns, experts, nothing."""

_STYLES: dict[Cut, str] = {
    "out": "colwise colwise_rep colwise_gather_output local_colwise",
    "in": "rowwise rowwise_rep rowwise_split_input local_rowwise",
    "packed_out": "packed_colwise",
    "packed_in": "packed_rowwise local_packed_rowwise",
    "rows": "embedding_rowwise",
    "columns": "embedding_colwise",
    "experts": "grouped_gemm",
    # These steer activations and gradients and leave their parameters uncut.
    "whole": "replicate replicated_with_grad_allreduce sequence_parallel mla_kv_a_proj all_reduce moe_tp_experts "
    "moe_identity_expert ep_dispatch_experts ep_router local_params local gather",
}
STYLES: dict[str, Cut] = {style: cut for cut, styles in _STYLES.items() for style in styles.split()}
"""Every known style → what it cuts."""


def _axis_of(cut: Cut) -> str | None:
    """Return the axis that a style cuts along; one that cuts nothing needs none."""
    return None if cut == "whole" else "ep" if cut == "experts" else "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Placements, or a style, for the tensors whose FQN matches a pattern."""

    match: str  # The pattern; see `compile_glob`. With a style it may also name the module that holds the parameters
    place: Mapping[str, Placement] | None = None
    """Axis → placement; empty means that no axis but FSDP's cuts the tensor."""
    style: str | None = None  # A key of `STYLES`. Exactly one of `place` and `style` is given
    origin: str = "--set"  # Where the rule was written, for messages
    optional: bool = False  # True when the rule may match nothing (parameters that a plan names and a model may lack)
    hint: str = ""  # What to do when it matches nothing and should; without, the nearest names are shown
    is_live: bool = False  # Is it about the names that are written alone? A plan is of the live model
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    """FQN → the shape that its dims are counted in, where that is known; another one is refused."""

    def __post_init__(self) -> None:
        expand_braces(self.match)
        if (self.place is None) == (self.style is None):
            what = f"the rule for {self.match!r} needs either place or style"
            raise UsageError(what, where=self.origin, hint=_EXAMPLE)
        if self.style is None:
            return
        if self.style not in STYLES:
            what = f"unknown style {self.style!r} in the rule for {self.match!r}"
            raise UsageError(what, where=self.origin, hint=suggest(self.style, STYLES, "the styles are"))

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that the rule speaks of."""
        if self.place is not None:
            return tuple(self.place)
        axis = _axis_of(STYLES[self.style or ""])
        return (axis,) if axis else ()

    def find(self, names: NameIndex) -> set[str]:
        """Return the tensors that the rule is about; a style also reaches the direct parameters of a module.

        Raises:
            UsageError: There are none, and the rule is not optional.
        """
        names, modules = names.own if self.is_live else names, self.style is not None
        if self.optional:
            return names.find(self.match, modules=modules)
        what = f"the rule {self.match!r}"
        return find_named(what, self.match, names, self.origin, self.hint, modules=modules)

    def placements(self, fqn: str, num_dims: int) -> dict[str, Placement]:
        """Return axis → placement for the tensor `fqn` of `num_dims` dims; styles leave FSDP's axis alone."""
        if self.place is not None:
            return dict(self.place)
        dim = _cut_dim(STYLES[self.style or ""], fqn, num_dims)
        return {} if dim is None else {axis: Shard(dim) for axis in self.axes}

    def is_packed(self, num_dims: int) -> bool:
        """Whether a rank of the live model has a part of each of the matrices in the tensor, and no single run.

        transformers marks these parameters with PyTorch's `_StridedShard`, and cuts the vectors beside them in one run.
        """
        return num_dims > 1 and STYLES.get(self.style or "") in ("packed_out", "packed_in")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """What a rules file says, rules in its order: the first match wins."""

    rules: tuple[Rule, ...]
    mesh: Mesh | None = None


_EXAMPLE = "write for example place: {tp: S(0)}, or style: colwise"


def _cut_dim(how: Cut, fqn: str, num_dims: int) -> int | None:
    """Return the dim that is cut, None for none. A scalar is never cut.

    Linear weights are (…, out, in): experts stacked along dim 0 keep that dim whole. The bias of a rowwise
    layer is added after the sum over ranks, so every rank keeps all of it. Packed matrices lie along the dim that is
    cut; a file has the parts of that dim one after the other, as transformers' own checkpoints of them.
    """
    if num_dims == 0 or how == "whole":
        return None
    if how in ("out", "packed_out"):
        return max(num_dims - 2, 0)
    if how == "packed_in":
        return num_dims - 1 if num_dims > 1 else None
    if how == "in":
        return None if fqn.rpartition(".")[2] == "bias" else num_dims - 1
    if how == "columns":
        return 1 if num_dims > 1 else None
    return 0


def suggest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint: the known words nearest to `word`, or all of them after `otherwise`."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"{otherwise} {', '.join(names)}"
