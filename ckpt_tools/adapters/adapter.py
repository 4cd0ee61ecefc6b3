"""What an adapter is: modules, their factors, and where every setting came from.

A factor is a `TensorEntry` while only headers were read, and an `Array` once its bytes are there: `F` below.

Whatever an ecosystem calls its tensors, here a factor has one role. Letters: r rank, out and in the dims of the base
weight, k a kernel's, n a number of blocks, b a block's size.

    lora   A (r, in[, k, k]), B (out, r[, 1, 1]), mid (r, r, k, k) of Tucker, A_embedding (r, num_embeddings) and
           B_embedding (dim, r), B_bias (out,)
    loha   w1_a (out, r), w1_b (r, in), w2_a, w2_b alike; t1, t2 (r, r, k, k)
    lokr   w1 (l, m), or w1_a (l, r) and w1_b (r, m); w2 (out/l, in/m[, k, k]), or w2_a and w2_b; t2 (r, r, k, k)
    oft    R (n, b(b-1)/2) as PEFT has it (R_embedding for an embedding), or blocks (n, b, b) as LyCORIS has it; rescale
    boft   R (m, n, b, b) and s (out, 1) as PEFT has it, or blocks (m, n, b, b) as LyCORIS has it; rescale
    full   diff (the weight's shape), diff_b (out,)
    saved  weight, bias, …: whole tensors that replace the base's (PEFT's modules_to_save, trained biases); the role is
           the parameter's name below the path. Such a module may stand beside another one with the same path.

Any of lora, loha and lokr may have a magnitude as well (DoRA): (out,), (out, 1, …) or (1, in, 1, …).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from ckpt_tools.description.checkpoint import TensorEntry

Family = Literal["lora", "loha", "lokr", "oft", "boft", "full", "saved"]
"""How the factors change a weight; DoRA is a magnitude beside another family's factors."""
Convention = Literal["peft", "diffusers", "kohya", "comfyui", "ai-toolkit", "torchtitan"]
"""Whose names the tensors had."""
Target = Literal["peft", "diffusers", "kohya", "comfyui"]
"""Whose names they can get."""

T_co = TypeVar("T_co", covariant=True)
F = TypeVar("F")
G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Sourced(Generic[T_co]):
    """A setting, and how it is known."""

    value: T_co
    """The setting itself."""
    source: str
    """For people: "--alpha", "header lora_adapter_metadata", "A has 16 rows", …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule(Generic[F]):
    """The factors of one adapted module (or of one parameter of it)."""

    path: str
    """The module's path in the base model ("model.layers.0.self_attn.q_proj"); in the names of `Adapter.convention`
    where these do not tell the path (kohya's lora_unet_…)."""
    family: Family
    """How the factors change the weight."""
    factors: Mapping[str, F]
    """Role → tensor."""
    rank: Sourced[int] | None = None
    """r; None for families without one, and for full-size factors."""
    alpha: Sourced[float] | None = None
    """Numerator of the scale; for oft the constraint. None while it is not known."""
    use_rslora: bool = False
    """Scale alpha/√r instead of alpha/r."""
    parameter: str = "weight"
    """The parameter that is changed; another one for PEFT's target_parameters (MoE experts), "" while nothing tells
    which."""
    nesting: int = 0
    """How many `base_layer` PEFT puts between the path and the factors: it nests one wrapper for every parameter of a
    module (target_parameters)."""

    @property
    def is_dora(self) -> bool:
        """Has it a magnitude?"""
        return "magnitude" in self.factors

    def with_factors(self, factors: Mapping[str, G]) -> AdapterModule[G]:
        """Return the module with other factors in the place of its own."""
        return replace(self, factors=factors)  # type: ignore[arg-type, return-value]  # they may be of another type


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(Generic[F]):
    """Everything that one adapter holds."""

    modules: tuple[AdapterModule[F], ...]
    """In the order of their paths."""
    convention: Convention
    """Whose names the tensors had."""
    name: str = "default"
    """PEFT's adapter name."""
    settings: Mapping[str, Sourced[object]] = field(default_factory=dict)
    """What is known beyond the tensors: base_model_name_or_path, init_lora_weights, oft_block_size,
    use_cayley_neumann, task_type, …"""
    left_out: tuple[str, ...] = ()
    """What the source holds beside the adapter, for people."""
    omitted: frozenset[str] = frozenset()
    """Paths of the modules of which --include and --exclude left out tensors: what the source's configuration says of
    these holds no longer."""
    unknown: tuple[str, ...] = ()
    """Names in an adapter's own file that are no part of any adapter that is known here."""
    is_training_state: bool = False
    """Read from a trainer's checkpoint: its names are not yet those that a loader would meet."""
    base_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the base model's parameters, where the source holds these too; names as a plain model has them. () for
    quantised ones."""
    base_tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    """These parameters themselves, by the same names."""

    def with_modules(self, modules: tuple[AdapterModule[G], ...]) -> Adapter[G]:
        """Return the adapter with other modules in the place of its own."""
        return replace(self, modules=modules)  # type: ignore[arg-type, return-value]  # they may be of another type
