"""What an adapter is: modules, their factors, and where every setting came from.

A factor is a `TensorEntry` while only headers were read, and an `Array` once its bytes are there: `F` below.

Whatever an ecosystem calls its tensors, here a factor has one role: the file of its family in `families/` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from ckpt_tools.text import counted, first_few

if TYPE_CHECKING:
    from ckpt_tools.checkpoint.entries import TensorEntry

SAVED: Literal["saved"] = "saved"  # The family of whole tensors, which replace the base's
TOKENS: Literal["tokens"] = "tokens"  # The family of rows of an embedding, which replace the base's
FamilyName = str  # How the factors change a weight: the names of the table in `families/`
Convention = Literal["peft", "diffusers", "kohya", "comfyui", "ai-toolkit", "diffsynth", "trainer", "gguf", "mlx"]
"""Whose names the tensors had; "trainer" is one that has models of its own (torchtitan, torchtune, Megatron)."""
Target = Literal["peft", "diffusers", "kohya", "comfyui", "gguf", "mlx"]  # Whose names they can get

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # Shapes of factors by their role, or of a model's parameters by their name
T_co = TypeVar("T_co", covariant=True)
F = TypeVar("F")
G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Sourced(Generic[T_co]):
    """A setting, and how it is known."""

    value: T_co
    source: str  # For people: "--alpha", "header lora_adapter_metadata", "A has 16 rows", …

    @property
    def names(self) -> list[str]:
        """The texts in a list; none where it is no list."""
        return [each for each in self.value if isinstance(each, str)] if isinstance(self.value, list) else []


Fields = dict[str, Sourced[object]]  # Field of a configuration → value and source


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule(Generic[F]):
    """The factors of one adapted module (or of one parameter of it)."""

    path: str
    """The module's path in the base model ("model.layers.0.self_attn.q_proj"); in the names of `Adapter.convention`
    where these do not tell the path (kohya's lora_unet_…)."""
    family: FamilyName
    factors: Mapping[str, F]  # Role → tensor
    rank: Sourced[int] | None = None  # r; None for families without one, and for full-size factors
    alpha: Sourced[float] | None = None  # Numerator of the scale; for oft the constraint. None while it is not known
    contradicted: Sourced[float] | None = None  # What another place says of alpha, where that is another number
    use_rslora: bool = False  # Scale alpha/√r instead of alpha/r
    parameter: str = "weight"
    """The parameter that is changed; another one for PEFT's target_parameters (MoE experts), "" while nothing tells
    which."""
    nesting: int = 0
    """How many `base_layer` PEFT puts between the path and the factors: it nests one wrapper for every parameter of a
    module (target_parameters)."""

    @property
    def is_saved(self) -> bool:
        """Does it hold whole tensors, which replace the base's?"""
        return self.family == SAVED

    @property
    def is_dora(self) -> bool:
        """Has it a magnitude?"""
        return "magnitude" in self.factors

    @property
    def is_linear(self) -> bool:
        """Has it factors that PEFT has for transposed weights and for parameters of stacked experts as well?"""
        return "A" in self.factors

    @property
    def target(self) -> str:
        """The name by which PEFT's patterns know it: its path, and the parameter's where that is not the weight."""
        return self.path if self.parameter == "weight" else f"{self.path}.{self.parameter}"

    @property
    def shapes(self) -> Shapes:
        """Role → shape; () for a factor without one."""
        return {role: tuple(getattr(factor, "shape", ())) for role, factor in self.factors.items()}

    def with_factors(self, factors: Mapping[str, G]) -> AdapterModule[G]:
        """Return the module with other factors in the place of its own."""
        return replace(self, factors=factors)  # type: ignore[arg-type, return-value]  # they may be of another type


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(Generic[F]):
    """Everything that one adapter holds."""

    modules: tuple[AdapterModule[F], ...]  # In the order of their paths
    convention: Convention  # Whose names the tensors had
    name: str = "default"  # PEFT's adapter name
    settings: Mapping[str, Sourced[object]] = field(default_factory=dict)
    """What is known beyond the tensors: base_model_name_or_path, init_lora_weights, oft_block_size,
    use_cayley_neumann, task_type, …"""
    left_out: tuple[str, ...] = ()  # What the source holds beside the adapter, for people
    omitted: frozenset[str] = frozenset()
    """Paths of the modules of which --include and --exclude left out tensors: what the source's configuration says of
    these holds no longer."""
    unknown: tuple[str, ...] = ()  # Names in an adapter's own file that are no part of any adapter that is known here
    is_training_state: bool = False
    """Read from a trainer's checkpoint: its names are not yet those that a loader would meet."""
    base_shapes: Shapes = field(default_factory=dict)
    """Shapes of the base model's parameters, where the source holds these too; names as a plain model has them. () for
    quantised ones."""
    base_tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    """These parameters themselves, by the same names."""

    def with_modules(self, modules: Iterable[AdapterModule[G]]) -> Adapter[G]:
        """Return the adapter with other modules in the place of its own."""
        return replace(self, modules=tuple(modules))  # type: ignore[arg-type, return-value]  # perhaps of another type

    def with_factors(self, make: Callable[[AdapterModule[F], str], G]) -> Adapter[G]:
        """Return the adapter with make(module, role) in the place of every factor."""
        return self.with_modules(
            module.with_factors({role: make(module, role) for role in module.factors}) for module in self.modules
        )


def some_modules(modules: Sequence[AdapterModule[F]]) -> str:
    """Return how many modules, and the first names, for messages."""
    return f"{counted(len(modules), 'module')} ({first_few([module.path for module in modules])})"
