"""A model's tensors, and which of a checkpoint's belong to them: what `meta_model.compare` says. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ckpt_tools.preflight.model_facts import ModelFacts, Quantization

Kind = Literal["parameter", "buffer", "transient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A tensor of the model."""

    dtype: str
    """As the model is built, in safetensors' spelling."""
    shape: tuple[int, ...]
    kind: Kind
    """"buffer" is saved, "transient" is a buffer that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTensor:
    """What the checkpoint has for a name of the model."""

    dtype: str
    shape: tuple[int, ...]
    fqns: tuple[str, ...]
    """Its names there; several when the model fuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model cut down, and whether it runs by itself."""

    path: str | None
    """Its config.json; None when nothing could be cut so that it runs."""
    num_elems: int = 0
    """Its parameters."""
    why: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model, and which of a checkpoint's tensors belong to it (what `meta_model.compare` says)."""

    title: str
    """Class of the model."""
    base_prefix: str
    """What transformers adds to or takes from a file's names by itself."""
    num_elems: int
    """Parameters of the model, shared ones counted once."""
    tensors: Mapping[str, ModelTensor]
    """By name."""
    ties: tuple[tuple[str, ...], ...]
    """Names of one and the same parameter."""
    found: Mapping[str, FoundTensor] = field(default_factory=dict)
    """By the model's name."""
    left: tuple[str, ...] = ()
    """FQNs of the checkpoint that the model does not have."""
    adapters: tuple[str, ...] = ()
    """FQNs of adapters' factors."""
    refused: tuple[str, str | None] | None = None
    """Why names could not be matched at all, and a hint."""
    trial: Trial | None = None
    """What was found to run in place of a large model; None when it was not looked for, or need not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What a process with torch has seen of a model."""

    facts: ModelFacts | None = None
    """For the rules; None when there is no config that can be read."""
    comparison: Comparison | None = None
    """Its tensors, and those of a checkpoint; None when the model cannot be built."""
    reads: Mapping[str, Any] | None = None
    """What ranks read of the checkpoint (`reads_to_json`), or under "refused" or "unknown" why that is not known."""
    why_not: str = ""
    """Why there is no comparison."""


def facts_to_json(facts: ModelFacts) -> dict[str, object]:
    """Return facts for another process."""
    return asdict(facts) | {"stored": sorted(facts.stored)}


def facts_from_json(document: Mapping[str, Any]) -> ModelFacts:
    """Return what `facts_to_json` wrote."""
    values = dict(document)
    for name in ("intermediate_sizes", "blocks", "module_classes"):
        values[name] = None if values[name] is None else tuple(values[name])
    packed = values["quantization"]
    values["quantization"] = None if packed is None else Quantization(**packed)
    values["shapes"] = {name: tuple(shape) for name, shape in values["shapes"].items()}
    values["stored"] = frozenset(values["stored"])
    return ModelFacts(**values)


def comparison_from_json(document: Mapping[str, Any]) -> Comparison:
    """Return what `meta_model.compare` described."""
    refused = document.get("refused")
    return Comparison(
        title=document["title"],
        base_prefix=document["base_prefix"],
        num_elems=document["num_elems"],
        tensors={
            name: ModelTensor(dtype=t["dtype"], shape=tuple(t["shape"]), kind=t["kind"])
            for name, t in document["tensors"].items()
        },
        ties=tuple(map(tuple, document["ties"])),
        found={
            name: FoundTensor(dtype=t["dtype"], shape=tuple(t["shape"]), fqns=tuple(t["fqns"]))
            for name, t in document.get("found", {}).items()
        },
        left=tuple(document.get("left", ())),
        adapters=tuple(document.get("adapters", ())),
        refused=None if refused is None else (refused["what"], refused["hint"]),
        trial=Trial(**document["trial"]) if "trial" in document else None,
    )
