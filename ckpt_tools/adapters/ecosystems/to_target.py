"""An adapter in the names of diffusers, kohya or ComfyUI, whichever model family it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Adapter, Target
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import ArchitectureName, ModelFamily
from ckpt_tools.adapters.architectures.of_base import BaseFamily
from ckpt_tools.adapters.ecosystems.output import Written
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.moving.arrays import Array


def to_target(
    adapter: Adapter[Array],
    target: Target,
    *,
    architecture: ModelFamily | None = None,
    base: BaseFamily | None = None,
    svd_rank: int | None = None,
    may_fuse: bool = True,
) -> Written:
    """Write an adapter in the names of an ecosystem, exactly.

    Args:
        adapter: With its factors loaded and its alphas known.
        target: diffusers, kohya or comfyui; PEFT's files are written by `export`.
        architecture: The model family; told from the names by default.
        base: What the base model is; it goes before the adapter's names. Modules of a base without tables are under
            the base's own names.
        svd_rank: Rank of an approximation, for modules that cannot be expressed exactly; the error is reported.
        may_fuse: diffusers fuses projections of FLUX.2 when it meets a LoKr of fused ones; False for the module paths
            of the model as it is.

    Returns:
        File name, tensors, header and notes; `errors` has the modules that are not exact.

    Raises:
        UsageError: An unknown family or module, or one that the target cannot express.
    """
    from ckpt_tools.adapters.architectures.choose import choose_architectures
    from ckpt_tools.adapters.ecosystems.comfyui.writer import to_comfyui, to_comfyui_unchanged
    from ckpt_tools.adapters.ecosystems.diffusers.writer import to_diffusers, to_diffusers_unchanged
    from ckpt_tools.adapters.ecosystems.fit import Fitting
    from ckpt_tools.adapters.ecosystems.kohya.writer import to_kohya

    writers = {"diffusers": to_diffusers, "kohya": to_kohya, "comfyui": to_comfyui}
    if architecture is None and base is not None and passes_unchanged(base, target):
        fitting = Fitting(svd_rank=svd_rank, convention=adapter.convention, may_fuse=may_fuse)
        unchanged = to_diffusers_unchanged if target == "diffusers" else to_comfyui_unchanged
        return unchanged(adapter, base, fitting)
    found = choose_architectures(adapter, architecture=architecture, base=base)
    results: list[Written] = []
    for name in found:
        try:
            fitting = Fitting(svd_rank=svd_rank, convention=adapter.convention, may_fuse=may_fuse)
            results.append(writers[target](adapter, ARCHITECTURES[name], fitting))
        except UsageError:
            if len(found) == 1:
                raise
            break
    if len(results) < len(found) or not all(_is_same(results[0], other) for other in results[1:]):
        raise UsageError(
            f"the adapter's modules could be those of {' or '.join(ARCHITECTURES[name].title for name in found)}",
            where=adapter.modules[0].path,
            hint="say which with --architecture, or give the base model with --base",
        )
    if architecture is None and base is None and target != "diffusers":
        _refuse_rivals(adapter, found)
    return results[0] if len(found) == 1 else _without_family(results[0])


def passes_unchanged(base: BaseFamily, target: Target) -> bool:
    """Does the target take the modules of a base without tables under their own names?"""
    from ckpt_tools.adapters.ecosystems.comfyui.writer import SAME_IN_COMFYUI

    if base.possible or base.is_language_model or base.component is None:
        return False
    return target == "diffusers" or (target == "comfyui" and base.title in SAME_IN_COMFYUI)


def _refuse_rivals(adapter: Adapter[Array], found: Sequence[ArchitectureName]) -> None:
    """Refuse names that models without tables have as well: diffusers' stay as they are, others would be guessed."""
    from ckpt_tools.adapters.architectures.choose import family_in_header
    from ckpt_tools.adapters.architectures.rivals import rivals_of

    if family_in_header(adapter) in found:
        return
    titles = [title for name in found for title in rivals_of(adapter, name)]
    if titles:
        raise UsageError(
            f"the model is not known: its modules can be {ARCHITECTURES[found[0]].title}'s, and those of "
            f"{'; '.join(dict.fromkeys(titles))}",
            where=adapter.modules[0].path,
            hint=f"give the base model: --base DIR; or say which: --architecture {found[0]}",
        )


def _is_same(one: Written, other: Written) -> bool:
    """Does it not matter which of two families the adapter is for?"""
    if one.tensors.keys() != other.tensors.keys():
        return False
    from ckpt_tools.moving.arrays import bytes_of

    return all(
        (tensor.dtype, tensor.shape) == (other.tensors[name].dtype, other.tensors[name].shape)
        and bytes_of(tensor) == bytes_of(other.tensors[name])
        for name, tensor in one.tensors.items()
    )


def _without_family(written: Written) -> Written:
    metadata = {
        key: value
        for key, value in written.metadata.items()
        if key != "ss_base_model_version" and not key.startswith("modelspec.")
    }
    return replace(written, metadata=metadata)
