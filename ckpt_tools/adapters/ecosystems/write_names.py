"""A loaded adapter in the names of diffusers, kohya or ComfyUI, with what its base model decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Adapter, Target
from ckpt_tools.adapters.architectures.architecture import ModelFamily
from ckpt_tools.adapters.architectures.of_base import BaseFamily
from ckpt_tools.adapters.base.model import BaseModel
from ckpt_tools.adapters.checks.integrity import check_structure
from ckpt_tools.adapters.ecosystems.forms import as_loras, under_base_names
from ckpt_tools.adapters.ecosystems.output import Written
from ckpt_tools.adapters.ecosystems.to_target import passes_unchanged, to_target
from ckpt_tools.adapters.read.tensors import TensorReader
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.moving.arrays import Array

Weights = Callable[[], AbstractContextManager[tuple[Mapping[str, TensorEntry], TensorReader]]]
"""Lends the base's tensors and their reader."""


def write_names(
    loaded: Adapter[Array],
    to: Target,
    *,
    base: BaseModel | None,
    weights: Weights,
    architecture: ModelFamily | None,
    svd_rank: int | None,
    notes: list[str],
) -> Written:
    """Return what is to be written.

    Args:
        loaded: The adapter, in any names.
        to: diffusers, kohya or comfyui.
        base: What is known of the base model.
        weights: Its tensors, for a DoRA in ComfyUI.
        architecture: The model family, where the user says it.
        svd_rank: Rank of an approximation, for what the target cannot express exactly.
        notes: Is told what was done, beside `Written.notes`.

    Raises:
        UsageError: The model is not known, or the target cannot express the adapter.
    """
    family = None if base is None else base.family
    if family is not None and architecture is not None and architecture != family.name:
        _contradict(architecture, family, notes)
    if base is not None and architecture is None and passes_unchanged(base.family, to):
        loaded = _unchanged(loaded, base, notes)
        if to == "diffusers":
            loaded = as_loras(loaded, notes, svd_rank, base.shapes)
    if to == "comfyui" and base is not None and any(module.is_dora for module in loaded.modules):
        loaded = _with_base_norms(loaded, base, weights, notes)
    return to_target(loaded, to, architecture=architecture, base=family, svd_rank=svd_rank)


def _contradict(architecture: str, base: BaseFamily, notes: list[str]) -> None:
    """Hold what the user says against the base: a family with tables goes before it, an unknown one is for the user.

    Raises:
        UsageError: The base is of another family.
    """
    if base.name is not None:
        raise UsageError(
            f"--architecture says {architecture}, and the base is {base.title} ({base.source})",
            where="--architecture",
            hint="leave it out: the base decides",
        )
    if not base.possible:
        notes.append(f"names by --architecture {architecture}, although the base is {base.title}: not proven")


def _unchanged(loaded: Adapter[Array], base: BaseModel, notes: list[str]) -> Adapter[Array]:
    """Return an adapter of a model without tables under the base's own names, held against its shapes.

    Raises:
        UsageError: It is not for this base.
    """
    title = base.family.title
    named = under_base_names(loaded, base.shapes)
    if named is None:
        raise UsageError(
            f"ckpt has no tables for {title}, and the adapter's modules are not called as the base's are",
            where=loaded.modules[0].path,
            hint="is it the base of the training run?",
        )
    errors = [each for each in check_structure(named, base=base.shapes, repairs=True) if each.severity == "error"]
    if errors:
        raise UsageError(errors[0].what, where=errors[0].where, hint=errors[0].hint)
    notes.append(f"ckpt has no tables for {title}: its modules keep their names")
    return named


def _with_base_norms(loaded: Adapter[Array], base: BaseModel, weights: Weights, notes: list[str]) -> Adapter[Array]:
    """Return a DoRA with the magnitudes that ComfyUI must be given."""
    from ckpt_tools.adapters.ecosystems.comfyui.norms import with_base_norms

    with weights() as (tensors, reader):
        folded = with_base_norms(under_base_names(loaded, base.shapes) or loaded, tensors, reader, base.source)
    notes.append(
        "dora_scale was multiplied by ‖W‖/‖W+ΔW‖: ComfyUI divides by ‖W‖ (its PR #15458, open in November 2026, would "
        "change that). The file is for ComfyUI alone, and its header says so"
    )
    return folded
