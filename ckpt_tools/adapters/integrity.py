"""What is wrong with an adapter, whatever shall become of it: findings with stable codes.

adapter-truncated       a factor is empty, or has fewer dims than it needs
adapter-missing-factor  half a pair
adapter-rank            the factors of a module disagree on its rank
adapter-dtype           a factor holds no floating-point numbers
adapter-config          the configuration beside the tensors has another rank than these
adapter-alpha-zero      the scale is 0: the adapter changes nothing
adapter-alpha-differs   two places say two alphas
adapter-alpha-missing   nothing says the alpha, and a loader would assume one
adapter-zero            the factors multiply to 0: the adapter, or a part of it, changes nothing
adapter-non-finite      infinite, or not a number
adapter-wrapper-key     names with leftovers of torch.compile or a wrapper, which no loader strips
adapter-unknown-key     names that are no part of any adapter that is known
adapter-unmatched       the base model has no such module
adapter-shape           the base model's weight has another shape

What no training leaves behind, though loaders take it:

adapter-dead-module     factors that are 0 where the same module of other layers was trained, or that never begin at 0
adapter-alpha           the scale is negative, or out of every proportion
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import TOKENS, Adapter, AdapterModule, F, Shape, Shapes
from ckpt_tools.adapters.base.model import base_path, parents_of
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Matrix
from ckpt_tools.adapters.families.tokens import indices_of, why_wrong
from ckpt_tools.adapters.settings import TENSOR_ALPHA, config_rank, is_assumed, said_zero
from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME, DType
from ckpt_tools.checkpoint.entries import Finding, Severity, TensorEntry
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.text import first_few
from ckpt_tools.transfer.value_counts import count_values

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array


@dataclass(frozen=True, slots=True)
class Values:
    """What was seen of a tensor's values; an empty tensor is everything."""

    is_zero: bool  # Every element is 0 or -0
    is_one: bool
    is_finite: bool


_FLOATS = ("F64", "F32", "BF16", "F16", "F8_E5M2", "F8_E4M3")


def is_float(dtype: DType) -> bool:
    """Can the elements of a factor be of this type?"""
    return dtype.name in _FLOATS


def look_at(content: memoryview, dtype: DType) -> Values | None:
    """Return what the elements are like; None for a type that is no floating-point one."""
    counts = count_values(content, dtype) if is_float(dtype) else None
    if counts is None:
        return None
    import numpy as np

    from ckpt_tools.transfer.arrays import numpy_dtype

    one = np.ones(1, numpy_dtype(dtype)).tobytes()
    is_one = not content or (content[: len(one)] == one and content[len(one) :] == content[: -len(one)])
    return Values(is_zero=counts.is_zero, is_one=is_one, is_finite=counts.is_finite)


ValueTable = Mapping[tuple[int, str], Values | None]
"""(number of the module, role) → what its values are like; None, or nothing, for a factor that was not looked at."""

NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")  # Of a layer, in a path
_IN_OUT = re.compile(r".*\.(?:[cq]_attn|c_proj|c_fc)|(?:.*\.)?(?:wte|wpe|\w*embed\w*)")  # GPT-2's Conv1D, embeddings
_EXPERT = re.compile(r"(?:^|[._])experts?[._]\d")  # One that the router never chose stays untrained in a healthy run
_NEVER_ZERO = ("A", "B_embedding")  # Roles that begin with random values in every trainer: PEFT, kohya's, LyCORIS
_LARGEST, _SMALLEST = 256.0, 1e-6
"""Of scales: alpha/r is around 1; rsLoRA's alpha/√r reaches 64 with alpha 512, kohya's alpha of 1 gives 1/r."""
_TRUNCATED_HINT = (
    "an FSDP or ZeRO-3 run that saved only one rank's part leaves this: export from the sharded checkpoint instead "
    "(its DCP directory, or accelerate's pytorch_model_fsdp_0)"
)


def check_adapter(
    adapter: Adapter[F], *, repairs: bool = False, read: Callable[[TensorEntry], memoryview] | None = None
) -> Iterator[Finding]:
    """Yield everything that is wrong with an adapter; with `repairs`, wrong names alone are only warnings.

    Of factors that are not loaded the values count with `read`, which returns bytes. Then, too, what no training leaves
    behind is said.
    """
    yield from check_structure(adapter, repairs=repairs)
    seen: dict[str, Values | None] = {}  # what several modules share is read once
    table = {}
    for number, module in enumerate(adapter.modules):
        for role, factor in module.factors.items():
            if not isinstance(factor, TensorEntry):
                table[number, role] = _look(factor)
            elif read is not None:
                if factor.fqn not in seen:
                    seen[factor.fqn] = look_at(read(factor), factor.dtype) if factor.num_elems else None
                table[number, role] = seen[factor.fqn]
    if table:
        yield from check_values(adapter, table, is_suspicious=read is not None)


def check_structure(adapter: Adapter[F], *, base: Shapes | None = None, repairs: bool = False) -> Iterator[Finding]:
    """Yield what headers tell; arguments as for `check_adapter`."""
    for name in adapter.unknown:
        hint = "leave it out with --exclude if it does not belong to the adapter"
        yield _finding("adapter-unknown-key", name, "is not part of any kind of adapter that ckpt knows", hint)
    yield from _wrapper_keys(adapter, is_error=not repairs and not adapter.is_training_state)
    for module in adapter.modules:
        findings = list(_check_module(module))
        yield from findings
        if not findings and module.parameter == "weight":
            yield from _check_config(module, adapter)
            yield from _check_settings(module, adapter)
        yield from _check_alpha(module, adapter)
    yield from _check_alphas([m for m in adapter.modules if not family_of(m).is_unranked(m.factors)])
    if base:
        yield from check_base(adapter, base)


def _check_alphas(modules: Sequence[AdapterModule[F]]) -> Iterator[Finding]:
    """Yield modules without the alpha that a tensor holds for others, and alphas of which another place knows none."""
    alphas = [(module, module.alpha) for module in modules if module.alpha is not None]
    lost = [module for module, alpha in alphas if is_assumed(alpha)]
    if lost and any(alpha.source == TENSOR_ALPHA for _, alpha in alphas):
        what = f"{len(lost)} of {len(alphas)} modules have no alpha, and the others have one"
        hint = "was the adapter saved completely? Else export it with --alpha"
        yield _finding("adapter-alpha-missing", lost[0].path, what, hint)
    known = {alpha.value for _, alpha in alphas}
    for module, alpha in alphas:
        other = module.contradicted
        if other is not None and other.value not in known:
            said = f"{other.value:g}" if math.isfinite(other.value) else "no number"
            what = f"alpha is {alpha.value:g} ({alpha.source}) and {said} ({other.source}): which was trained?"
            hint = "give the alpha of the training run: ckpt export-lora SRC DST --alpha VALUE"
            yield _finding("adapter-alpha-differs", module.path, what, hint, "warning")


def _finding(code: str, where: str, what: str, hint: str | None = None, severity: Severity = "error") -> Finding:
    return Finding(code=code, severity=severity, where=where, what=what, hint=hint)


def _check_config(module: AdapterModule[F], adapter: Adapter[F]) -> Iterator[Finding]:
    found = config_rank(module, adapter.settings)
    if found is None or module.rank is None or not family_of(module).is_scaled or found.value == module.rank.value:
        return
    by = adapter.settings["r"].source if "r" in adapter.settings else "rank_pattern"
    what = f"rank {found.value} in {by}, but {module.rank.source}"
    hint = "does the configuration belong to another run? Its alpha would be wrong as well"
    yield _finding("adapter-config", module.path, what, hint)


def _check_settings(module: AdapterModule[F], adapter: Adapter[F]) -> Iterator[Finding]:
    """Tensors that the configuration promises: PEFT would begin them anew, and say a warning."""
    tokens = indices_of(module, adapter.settings) if module.family == TOKENS else None
    if tokens is not None and (problem := why_wrong(module, tokens.value)):
        yield _finding("adapter-config", module.path, f"{problem} ({tokens.source})", "does it belong to another run?")
    for setting, role, _ in family_of(module).peft_switches:
        found = adapter.settings.get(setting)
        if found is not None and found.value is True and role not in module.factors:
            what = f"factor {role} is missing: {setting} is true ({found.source}), and PEFT would initialise it"
            hint = "was the adapter saved completely? If it was trained without, set that in adapter_config.json"
            yield _finding("adapter-missing-factor", module.path, what, hint)


def _wrapper_keys(adapter: Adapter[F], *, is_error: bool) -> Iterator[Finding]:
    factors = (factor for module in adapter.modules for factor in module.factors.values())
    names = [factor.fqn for factor in factors if isinstance(factor, TensorEntry)]
    wrapped = [name for name in names if strip_wrappers(name) != name]
    if wrapped:
        what = (
            f"{len(wrapped)} of {len(names)} names contain a wrapper's prefix (_orig_mod, …): loaders find no such "
            "modules, so the adapter does nothing"
        )
        hint = "strip them with ckpt export-lora"
        yield _finding("adapter-wrapper-key", wrapped[0], what, hint, "error" if is_error else "warning")


def _check_module(module: AdapterModule[F]) -> Iterator[Finding]:
    family, shapes = family_of(module), module.shapes
    for role, factor in module.factors.items():
        dtype = _dtype(factor)
        if not module.is_saved and dtype is not None and not is_float(dtype) and not family.may_be_whole(role):
            what = f"factor {role} is {dtype.name}, which is not a floating-point type"
            yield _finding("adapter-dtype", _name_of(module, role), what)
    bad = [
        role
        for role, shape in shapes.items()
        if (0 in shape and not (family.may_prune and len(shape) == 2))
        or (not module.is_saved and not family.may_be_flat(role) and len(shape) < 2)
    ]
    for role in bad:
        what = f"factor {role} has the shape {list(shapes[role])}"
        yield _finding("adapter-truncated", _name_of(module, role), what, _TRUNCATED_HINT)
    missing, there = family.missing(shapes), ", ".join(sorted(shapes)) or "none"
    for role in missing:
        yield _finding("adapter-missing-factor", module.path, f"factor {role} is missing (there are {there})")
    if missing or bad:
        return
    dims = family.rank_dims(shapes)
    for roles in family.ranked_together(shapes):
        group = [role for role in roles if dims.get(role, math.inf) < len(shapes[role])]
        if len({shapes[role][dims[role]] for role in group}) > 1:
            shown = ", ".join(f"{role} {list(shapes[role])}" for role in group)
            yield _finding("adapter-rank", module.path, f"the factors disagree on the rank: {shown}", _TRUNCATED_HINT)


def _name_of(module: AdapterModule[F], role: str) -> str:
    factor = module.factors[role]
    return factor.fqn if isinstance(factor, TensorEntry) else f"{module.path} {role}"


def _check_alpha(module: AdapterModule[F], adapter: Adapter[F]) -> Iterator[Finding]:
    family = family_of(module)
    if not family.is_scaled:
        return
    zero = said_zero(module, adapter)
    if module.alpha is None and zero is not None:
        what = f"alpha is 0 in {zero}: loaders multiply by it, so the adapter changes nothing"
        hint = "give the alpha of the training run: ckpt export-lora SRC DST --alpha VALUE"
        yield _finding("adapter-alpha-zero", module.path, what, hint)
    elif module.alpha is None:
        if not adapter.is_training_state and not family.is_unranked(module.factors):
            hint = "put lora_alpha into adapter_config.json, or export with --alpha"
            yield _finding("adapter-alpha-missing", module.path, "alpha is not recorded, and PEFT would use 8", hint)
    elif module.alpha.value == 0:
        what = f"alpha is 0 ({module.alpha.source}): the module changes nothing"
        yield _finding("adapter-alpha-zero", module.path, what, "give the alpha of the training run: --alpha VALUE")
    elif not math.isfinite(module.alpha.value):
        yield _finding("adapter-non-finite", module.path, f"alpha is {module.alpha.value} ({module.alpha.source})")


def check_base(adapter: Adapter[F], base: Shapes) -> Iterator[Finding]:
    """Yield modules that the base lacks, or has in another shape; a saved one may be a new head."""
    modules, holders = parents_of(base), {name.rpartition(".")[0] for name in base}
    unmatched = [m for m in adapter.modules if m.path and not m.is_saved and base_path(m.path) not in modules]
    for module in unmatched:
        what = f"the base model has no such module ({len(unmatched)} of {len(adapter.modules)} are not in it)"
        yield _finding("adapter-unmatched", module.path, what, "is it the base that the adapter was trained on?")
    for module in adapter.modules:
        path = base_path(module.path)
        if module.is_saved or not path:
            continue  # a resized embedding, or a head of another size, is what such modules are for
        weight = base.get(f"{path}.{module.parameter}")
        if weight is None:
            # Quantised layers keep their weights under names of their own.
            if path in modules and module.parameter and (module.parameter != "weight" or path not in holders):
                what = f"the base model has no parameter {module.parameter!r} in this module"
                yield _finding("adapter-unmatched", module.path, what)
            continue
        family, shapes = family_of(module), module.shapes
        found = family.matrix(shapes) if family.is_matrix_sure(shapes) else None
        if found is not None and weight and not _fits(found, weight, path, is_stack=module.parameter != "weight"):
            what = f"{', '.join(sorted(shapes))} are for {list(found)}, and the base model's is {list(weight)}"
            yield _finding("adapter-shape", module.path, what, "is it the base that the adapter was trained on?")


def _fits(found: Matrix, weight: Shape, path: str, *, is_stack: bool) -> bool:
    if len(weight) < 2:
        return False
    if None in found:
        return found[1] == weight[1]
    if is_stack and len(weight) == 3:
        return set(found) == set(weight[1:])
    flat = (weight[0], math.prod(weight[1:]))
    return found == flat or (len(weight) == 2 and found == flat[::-1] and _IN_OUT.fullmatch(path) is not None)


def check_values(adapter: Adapter[F], table: ValueTable, *, is_suspicious: bool = False) -> Iterator[Finding]:
    """Yield what the values tell; when `is_suspicious`, also what speaks for a damage that no loader notices."""
    idle: list[tuple[AdapterModule[F], dict[str, Values]]] = []
    alive: set[str] = set()
    changing = 0
    adapted = {module.path for module in adapter.modules if not module.is_saved}
    for number, module in enumerate(adapter.modules):
        seen = {role: values for role in module.factors if (values := table.get((number, role))) is not None}
        for role, values in seen.items():
            if not values.is_finite:
                what = f"factor {role} of {module.path!r} has elements that are infinite or not a number"
                hint = "the training run diverged: use an earlier checkpoint"
                yield _finding("adapter-non-finite", f"{module.path} {role}", what, hint)
        if module.is_saved:
            changing += module.path not in adapted  # else an embedding that PEFT saves along with its factors
        elif is_idle(module, seen):
            idle.append((module, seen))
        else:
            changing += 1
            alive |= {NUMBER.sub("*", module.path)} if seen else set()
    if idle:
        where, shown = idle[0][0].path, first_few([module.path for module, _ in idle])
        what = f"{len(idle)} of {len(adapter.modules)} modules change nothing: their factors multiply to 0 ({shown})"
        hint = "they were not trained, or not saved"
        if not changing:
            what = f"the adapter changes nothing: the factors of all {len(idle)} modules multiply to 0 ({shown})"
            hint = "it was not trained, or its trained values were not saved"
        yield _finding("adapter-zero", where, what, hint, "warning" if changing else "error")
    if is_suspicious:
        for module, seen in idle if alive else ():
            yield from _dead(module, seen, alive)
        for module in adapter.modules:
            yield from _scale(module)


def is_idle(module: AdapterModule[F], seen: Mapping[str, Values]) -> bool:
    """Does a module change nothing, by what was seen of its factors? A DoRA may: its row norms are its own."""
    return not module.is_dora and family_of(module).is_idle(module.factors, seen)


def _dead(module: AdapterModule[F], seen: Mapping[str, Values], alive: Collection[str]) -> Iterator[Finding]:
    """Yield that an idle module beside `alive` ones, numbers as *, has lost what was trained."""
    if any(role in _NEVER_ZERO and values.is_zero for role, values in seen.items()):
        what, hint = "a factor that starts with random values is 0", "was the adapter saved completely?"
    elif NUMBER.sub("*", module.path) in alive and not _EXPERT.search(module.path):
        what = "its factors multiply to 0, and the same module in other layers was trained"
        hint = "was it saved completely? If this layer was not meant to be trained, leave its tensors out"
    else:
        return
    yield _finding("adapter-dead-module", module.path, what, hint)


def _scale(module: AdapterModule[F]) -> Iterator[Finding]:
    if module.alpha is None or module.rank is None or not module.rank.value or not math.isfinite(module.alpha.value):
        return  # said by the other checks, or nothing scales it
    rank = module.rank.value
    scale = module.alpha.value / (math.sqrt(rank) if module.use_rslora else rank)
    if scale == 0 or _SMALLEST <= scale <= _LARGEST:
        return
    what = "is negative: it subtracts what was trained" if scale < 0 else "is implausible"
    what = f"the scale {scale:g} (alpha {module.alpha.value:g}, {module.alpha.source}) {what}"
    hint = "give the alpha of the training run: ckpt export-lora SRC DST --alpha VALUE"
    yield _finding("adapter-alpha", module.path, what, hint)


def _dtype(factor: object) -> DType | None:
    if isinstance(factor, TensorEntry):
        return factor.dtype
    return BY_TORCH_NAME.get(str(getattr(factor, "dtype", "")))


def _look(factor: object) -> Values | None:
    array: Array = factor  # type: ignore[assignment]
    dtype = _dtype(array)
    if dtype is None or not array.size:
        return None
    from ckpt_tools.transfer.arrays import bytes_of

    return look_at(bytes_of(array), dtype)
