"""Are an adapter's modules in the base model, and of the right shape? By the family's names, or by the base's own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Shapes
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import Architecture, ModelFamily
from ckpt_tools.adapters.architectures.names import Place, readings, underscored
from ckpt_tools.adapters.base.model import BaseModel, base_path, parents_of
from ckpt_tools.adapters.checks.integrity import check_base
from ckpt_tools.adapters.families import family_of
from ckpt_tools.description.checkpoint import Finding, TensorEntry
from ckpt_tools.text import escape_name

_DOTTED = ("transformer.", "unet.", "diffusion_model.", "model.diffusion_model.")
_FLAT = re.compile(r"(?:lora_unet|lora_transformer|lycoris)_")
_ENCODER = re.compile(r"(?:text_encoder(?:_\d)?\.|text_encoders\.|lora_te\d?_)")


def check_against(
    adapter: Adapter[TensorEntry], base: BaseModel, family: ModelFamily | None
) -> tuple[list[Finding], list[str]]:
    """Compare an adapter's modules with the base's; return what is wrong, and what could not be checked."""
    modules = parents_of(base.shapes)
    has_plain_names = any(base_path(module.path) in modules for module in adapter.modules)
    if family == "llm" or has_plain_names:
        return list(check_base(adapter, base.shapes)), []
    if family is not None:
        return list(_by_tables(adapter, ARCHITECTURES[family], base.shapes)), []
    return _by_own_names(adapter, base.shapes)


def _by_own_names(adapter: Adapter[TensorEntry], base: Shapes) -> tuple[list[Finding], list[str]]:
    """Hold an adapter of a family without tables against the names of the base, with what tools put in front."""
    modules, flat = parents_of(base), underscored(tuple(base))
    findings: list[Finding] = []
    foreign: list[str] = []
    encoders = 0
    for module in adapter.modules:
        if _ENCODER.match(module.path):
            encoders += 1
            continue
        names = [module.path, *(module.path.removeprefix(each) for each in _DOTTED)]
        names.append(flat.get(_FLAT.sub("", module.path, count=1)) or "")
        found = next((name for name in names if name in modules), None)
        if found is None:
            foreign.append(module.path)
        elif (weight := base.get(f"{found}.{module.parameter}")) is not None:
            findings += _shape_of(module, {(weight[0], math.prod(weight[1:]))} if len(weight) > 1 else set())
    not_checked = [f"{encoders} modules of text encoders, which the base model does not hold"] if encoders else []
    if len(foreign) + encoders == len(adapter.modules) and foreign:
        not_checked.append(
            f"names: none of {len(foreign)} modules has a name of the base model, and ckpt knows no other names for "
            f"models of this architecture ({escape_name(foreign[0])})"
        )
    elif foreign:
        what = f"the base model has no module of this name ({len(foreign)} of {len(adapter.modules)} are not in it)"
        hint = "was the adapter trained on this model, and do all its names come from one tool?"
        where = foreign[0]
        findings.append(Finding.error(code="adapter-unmatched", where=where, what=what, hint=hint))
    return findings, not_checked


def _by_tables(adapter: Adapter[TensorEntry], architecture: Architecture, base: Shapes) -> Iterator[Finding]:
    """Yield modules that the base lacks, where names have to go through the tables first."""
    modules = parents_of(base)
    roots = {module.partition(".")[0] for module in modules}
    is_pipeline = any(part.component in roots for part in architecture.parts)
    missing = []
    for module in adapter.modules:
        found = readings(module.path, architecture)
        if found and found[0].part.is_encoder and not is_pipeline:
            continue  # the base is the transformer or the U-Net alone
        paths = {path for each in found for path in (each.native, each.spelled("alias"), *each.parts, *each.diffusers)}
        paths |= {f"{each.part.component}.{path}" for each in found for path in each.diffusers}
        paths |= {f"model.diffusion_model.{each.native}" for each in found}
        if not paths & modules:
            missing.append(module.path)
        else:
            yield from _shape_of(module, {shape for each in found for shape in _shapes_of(each, base)})
    if missing:
        yield Finding.error(
            code="adapter-unmatched",
            where=missing[0],
            what=f"the base model has no module of this name ({len(missing)} of {len(adapter.modules)} are not in it)",
            hint="is it the base that the adapter was trained on?",
        )


def _shape_of(module: AdapterModule[TensorEntry], wanted: set[tuple[int, int]]) -> Iterator[Finding]:
    """Hold the factors against the weight, or the weights, that they are for."""
    family, shapes = family_of(module), module.shapes
    have = family.matrix(shapes) if family.is_matrix_sure(shapes) else None
    if have is None or not wanted or have in wanted:
        return
    yield Finding.error(
        code="adapter-shape",
        where=module.path,
        what=f"factors for {list(have)}, and the base model's weight is "
        f"{' or '.join(str(list(each)) for each in sorted(wanted))}",
        hint="is it the base that the adapter was trained on?",
    )


def _shapes_of(each: Place, base: Shapes) -> Iterator[tuple[int, int]]:
    """Yield (out, in × kernel) of what a name means in the base: fused, or the rows of its parts together."""
    for root in ("", "model.diffusion_model.", f"{each.part.component}."):
        spellings = ([each.native], [each.spelled("alias")], each.parts, each.diffusers)
        ways = [[base.get(f"{root}{path}.weight", ()) for path in paths] for paths in spellings]
        if each.at is not None and len(ways[-1]) > 1:  # the tables do not tell its rows of the fused weight
            ways = [[way[each.at]] for way in ways[2:] if way]
        for weights in ways:
            if weights and all(len(shape) > 1 for shape in weights):
                yield sum(shape[0] for shape in weights), math.prod(weights[0][1:])
