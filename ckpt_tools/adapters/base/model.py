"""What is known of a base model: its parameters' names and shapes, and the modules that these are of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt_tools.adapters.adapter import Shapes, Sourced
from ckpt_tools.adapters.architectures.of_base import BaseFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """What is known of the base model."""

    shapes: Shapes
    """Parameter → shape; by the names on disk until `as_named`."""
    source: str
    """For people: "--base", "the base model in the source"."""
    task_type: Sourced[object] | None = None
    """PEFT's task type, by the architecture in its config.json."""
    family: BaseFamily
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def class_name(self) -> str | None:
        """Diffusers' class."""
        return self._text("_class_name")

    @property
    def model_type(self) -> str | None:
        """Transformers' type."""
        return self._text("model_type")

    def _text(self, name: str) -> str | None:
        value = self.config.get(name)
        return value if isinstance(value, str) else None


def parents_of(names: Iterable[str]) -> frozenset[str]:
    """Return the paths of all modules that hold the named parameters, themselves or through others."""
    found: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return frozenset(found)


def base_path(path: str) -> str:
    """Return a module's path in the plain base model: PEFT wraps attention layers whose own parts it adapts as well."""
    return path.replace(".base_layer.", ".")
