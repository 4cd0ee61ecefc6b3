"""What an adapter must become to have a place at its target (other paths, another family), and its names there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from ckpt_tools.adapters.adapter import Adapter, F, Fields, Shapes, Sourced, Target
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import ModelFamily
from ckpt_tools.adapters.architectures.choose import BaseFamily, choose_architectures, family_in_header, rivals_of
from ckpt_tools.adapters.base.model import BaseModel, module_finder
from ckpt_tools.adapters.ecosystems.output import Written
from ckpt_tools.adapters.ecosystems.peft.files import from_one_model
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.integrity import check_structure
from ckpt_tools.adapters.read.assemble import NamedFactor, assemble, parse_key
from ckpt_tools.adapters.read.opening import TensorReader, entry_of
from ckpt_tools.adapters.read.sidecars import read_sidecars
from ckpt_tools.adapters.settings import add_settings
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array

Weights = Callable[[], AbstractContextManager[tuple[Mapping[str, TensorEntry], TensorReader]]]
"""Lends the base's tensors and their reader."""


def under_base_names(adapter: Adapter[F], base: Shapes) -> Adapter[F] | None:
    """Return the adapter with the base's own module paths; None where its modules are called otherwise there."""
    find = module_finder(base)
    found = {module.path: find(module.path) for module in adapter.modules}
    if None in found.values() or len(set(found.values())) < len(found):
        return None
    return adapter.with_modules(replace(module, path=found[module.path] or "") for module in adapter.modules)


def through_diffusers(
    loaded: Adapter[Array],
    notes: list[str],
    architecture: ModelFamily | None,
    svd_rank: int | None,
    base: BaseFamily | None,
) -> Adapter[Array]:
    """Return an adapter of a diffusion model under diffusers' module paths, which are also PEFT's."""
    written = to_target(loaded, "diffusers", architecture=architecture, base=base, svd_rank=svd_rank, may_fuse=False)
    notes += written.notes
    named = [NamedFactor(name, parse_key(name), entry_of(name, tensor)) for name, tensor in written.tensors.items()]
    described = assemble(
        named, convention="diffusers", is_training=False, trained=None, bias=None, path="the converted adapter"
    )
    sidecars = read_sidecars((), written.metadata)
    described = add_settings(described, sidecars, lambda entry: float(written.tensors[entry.fqn].item()))
    placed, _ = from_one_model(described)
    return placed.with_factors(lambda module, role: written.tensors[module.factors[role].fqn])


def as_loras(loaded: Adapter[Array], notes: list[str], svd_rank: int | None, base: Shapes) -> Adapter[Array]:
    """Return the adapter with every module as a LoRA; refuse to approximate unless a rank for that is given."""
    from ckpt_tools.adapters.ecosystems.place_modules import Fitting

    fitting = Fitting(svd_rank=svd_rank)
    modules = []
    for module in loaded.modules:
        shape = base.get(f"{module.path}.weight")
        if shape is None and family_of(module).hides_kernel(module.factors):
            what = (
                f"{module.path!r} may be a convolution, but its factors do not show the kernel; PEFT has "
                f"no format for this {module.family} unchanged"
            )
            raise UsageError(what, where=module.path, hint="give the base model, whose weights show it: --base DIR")
        modules.append(module if module.is_saved else fitting.as_lora(module, shape))
    notes += fitting.finish()
    settings = {name: value for name, value in loaded.settings.items() if name in _KEPT}
    return replace(loaded.with_modules(modules), settings=settings)


_KEPT = ("base_model_name_or_path", "task_type", "target_modules", "modules_to_save", "revision")
"""Settings that hold whatever the family."""


def target_of(name: str) -> Target:
    """Return the ecosystem of this name."""
    targets: tuple[Target, ...] = get_args(Target)
    if name not in targets:
        raise UsageError(f"unknown target {name!r}", hint=f"--to takes {', '.join(targets)}")
    return name


def summary(adapter: Adapter[TensorEntry], base_model: str | None) -> Fields:
    """Return what is known of an adapter, for targets that have no configuration of their own."""
    known: Fields = {}
    families = Counter(module.family for module in adapter.modules)
    known["type"] = Sourced(" + ".join(families), "the factors' names")
    for name, values in (
        ("rank", [m.rank for m in adapter.modules if family_of(m).is_scaled and m.rank is not None]),
        ("alpha", [m.alpha for m in adapter.modules if family_of(m).is_scaled and m.alpha is not None]),
    ):
        counts = Counter(found.value for found in values if found is not None)
        if counts:
            common = counts.most_common(1)[0][0]
            source = next(found.source for found in values if found is not None and found.value == common)
            known[name] = Sourced(common if len(counts) == 1 else sorted(counts), source)
    if base_model is not None:
        known["base_model"] = Sourced(base_model, "--base-model")
    return known


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
    """Return what is to be written for diffusers, kohya or ComfyUI; what was done to it is added to `notes`."""
    if to in ("gguf", "mlx"):
        from ckpt_tools.adapters.ecosystems import gguf_mlx

        loras = as_loras(loaded, notes, svd_rank, base.shapes if base is not None else {})
        return gguf_mlx.to_gguf(loras, base) if to == "gguf" else gguf_mlx.to_mlx(loras, base)
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
    """Hold what the user says against the base: a family with tables goes before it, an unknown one is for the user."""
    if base.name is not None:
        what = f"--architecture is {architecture}, but the base is {base.title} ({base.source})"
        raise UsageError(what, where="--architecture", hint="leave out --architecture: the base determines it")
    if not base.possible:
        notes.append(f"names by --architecture {architecture}, although the base is {base.title}: not proven")


def _unchanged(loaded: Adapter[Array], base: BaseModel, notes: list[str]) -> Adapter[Array]:
    """Return an adapter of a model without tables under the base's own names, compared with its shapes."""
    title = base.family.title
    named = under_base_names(loaded, base.shapes)
    if named is None:
        what = f"ckpt has no tables for {title}, and the adapter's modules do not have the base's names"
        raise UsageError(what, where=loaded.modules[0].path, hint="is it the base of the training run?")
    errors = [each for each in check_structure(named, base=base.shapes, repairs=True) if each.severity == "error"]
    if errors:
        raise UsageError(errors[0].what, where=errors[0].where, hint=errors[0].hint)
    notes.append(
        f"ckpt has no tables for {title}: its modules keep their names, which are the base's; tested with no loader"
    )
    return named


def _with_base_norms(loaded: Adapter[Array], base: BaseModel, weights: Weights, notes: list[str]) -> Adapter[Array]:
    """Return a DoRA with the magnitudes that ComfyUI must be given."""
    from ckpt_tools.adapters.ecosystems.writers import with_base_norms

    with weights() as (tensors, reader):
        folded = with_base_norms(under_base_names(loaded, base.shapes) or loaded, tensors, reader, base.source)
    notes.append(
        "dora_scale was multiplied by ‖W‖/‖W+ΔW‖: ComfyUI divides by ‖W‖ (its PR #15458, open in November 2026, would "
        "change that). The file is for ComfyUI only, and its header says so"
    )
    return folded


def to_target(
    adapter: Adapter[Array],
    target: Target,
    *,
    architecture: ModelFamily | None = None,
    base: BaseFamily | None = None,
    svd_rank: int | None = None,
    may_fuse: bool = True,
) -> Written:
    """Write an adapter in the names of diffusers, kohya or comfyui; `errors` of the result has the inexact modules.

    Its factors are loaded and its alphas known. `base` goes before the adapter's names; modules of a base without
    tables are under the base's own. `svd_rank` is the rank of an approximation where nothing exact exists. diffusers
    fuses projections of FLUX.2 when it meets a LoKr of fused ones: with `may_fuse` False the module paths are those of
    the model as it is.
    """
    from ckpt_tools.adapters.ecosystems import writers
    from ckpt_tools.adapters.ecosystems.place_modules import Fitting

    write = {"diffusers": writers.to_diffusers, "kohya": writers.to_kohya, "comfyui": writers.to_comfyui}[target]
    if architecture is None and base is not None and passes_unchanged(base, target):
        fitting = Fitting(svd_rank=svd_rank, convention=adapter.convention, may_fuse=may_fuse)
        write_unchanged = writers.to_diffusers_unchanged if target == "diffusers" else writers.to_comfyui_unchanged
        return write_unchanged(adapter, base, fitting)
    found = choose_architectures(adapter, architecture=architecture, base=base)
    results: list[Written] = []
    for name in found:
        try:
            fitting = Fitting(svd_rank=svd_rank, convention=adapter.convention, may_fuse=may_fuse)
            results.append(write(adapter, ARCHITECTURES[name], fitting))
        except UsageError:
            if len(found) == 1:
                raise
            break
    if len(results) < len(found) or not all(_is_same(results[0], other) for other in results[1:]):
        what = f"the adapter's modules could be those of {' or '.join(ARCHITECTURES[name].title for name in found)}"
        hint = "choose one with --architecture, or give the base model with --base"
        raise UsageError(what, where=adapter.modules[0].path, hint=hint)
    if architecture is None and base is None and target != "diffusers":
        _refuse_rivals(adapter, found)
    if len(found) == 1:
        return results[0]
    of_family = ("ss_base_model_version", "modelspec.")
    kept = {key: value for key, value in results[0].metadata.items() if not key.startswith(of_family)}
    return replace(results[0], metadata=kept)


def passes_unchanged(base: BaseFamily, target: Target) -> bool:
    """Does the target take the modules of a base without tables under their own names?"""
    if base.possible or base.is_language_model:
        return False
    if target == "comfyui":  # it reads its own files, whose names are mostly others than those of diffusers' classes
        return not base.is_of_diffusers
    return target == "diffusers" and base.component is not None


def _refuse_rivals(adapter: Adapter[Array], found: Sequence[str]) -> None:
    """Refuse names that models without tables have as well: diffusers' stay as they are, others would be guessed."""
    if family_in_header(adapter) in found:
        return
    titles = [title for name in found for title in rivals_of(adapter, name)]
    if titles:
        raise UsageError(
            f"the model is not known: its modules can be {ARCHITECTURES[found[0]].title}'s, and those of "
            f"{'; '.join(dict.fromkeys(titles))}",
            where=adapter.modules[0].path,
            hint=f"give the base model: --base DIR; or choose one: --architecture {found[0]}",
        )


def _is_same(one: Written, other: Written) -> bool:
    """Does it not matter which of two families the adapter is for?"""
    if one.tensors.keys() != other.tensors.keys():
        return False
    from ckpt_tools.transfer.arrays import bytes_of

    return all(
        (tensor.dtype, tensor.shape) == (other.tensors[name].dtype, other.tensors[name].shape)
        and bytes_of(tensor) == bytes_of(other.tensors[name])
        for name, tensor in one.tensors.items()
    )
