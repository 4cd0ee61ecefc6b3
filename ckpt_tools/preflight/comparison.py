"""A model's tensors, and which of a checkpoint's belong to them: what `meta_model.compare` says. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckpt_tools.description.layout import Mesh
from ckpt_tools.maps.contract import Contract
from ckpt_tools.preflight.model_facts import ModelFacts
from ckpt_tools.preflight.reads import Reads

MAX_ELEMS = 12_000_000
"""Parameters of a model that is tried as it is: more take longer than a minute on a laptop."""
Kind = Literal["parameter", "buffer", "transient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A tensor of the model."""

    dtype: str
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
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A model, and which of a checkpoint's tensors belong to it, by the model's names."""

    title: str
    base_prefix: str
    """What transformers adds to or takes from a file's names by itself."""
    num_elems: int
    tensors: Mapping[str, ModelTensor]
    ties: tuple[tuple[str, ...], ...]
    """Names of one and the same parameter."""
    found: Mapping[str, FoundTensor] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    """FQNs of the checkpoint that the model does not have."""
    contract: Contract = field(default_factory=Contract)
    """What loading makes of names that only one side has."""
    adapters: tuple[str, ...] = ()
    """FQNs of adapters' factors."""
    refused: tuple[str, str | None] | None = None
    """Why names could not be matched at all, and a hint."""
    trial: Trial | None = None
    """What was found to run in place of a large model; None when it was not looked for, or need not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a process with torch is to look at: a config, a checkpoint, the mesh that reads it. Paths are absolute."""

    config: str
    checkpoint: str | None
    mesh: Mesh | None
    cuts: tuple[str, ...]
    """Smaller configs, tried in order when the model has more than `MAX_ELEMS` parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What a process with torch has seen of a model."""

    facts: ModelFacts | None = None
    """For the rules; None when there is no config that can be read."""
    comparison: Comparison | None = None
    """Its tensors, and those of a checkpoint; None when the model cannot be built."""
    reads: Reads | None = None
    """What ranks read of the checkpoint; None when it was not asked."""
    why_not: str = ""
