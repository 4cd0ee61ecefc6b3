"""What is known of an adapter beyond its factors: alphas, ranks of stacked experts, PEFT's settings; and from where.

What nothing says is taken for true and said field by field (`assumptions`). A wrong one of these loads without a
warning, and every output is another. Alpha is asked for; the others have a value that nearly every run has.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Convention, F, Shapes, Sourced, some_modules
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.read.sidecars import ASSUMED, DIFFUSERS_HEADER, Sidecars, by_pattern
from ckpt_tools.checkpoint.entries import Finding, TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError

_UNIT_SCALE: Mapping[Convention, str] = {
    "diffusers": "diffusers' convention: alpha = rank where none is written",
    "ai-toolkit": "ai-toolkit's convention: alpha = rank where none is written",
    "diffsynth": "DiffSynth-Studio's convention: its trainer sets alpha to the rank",
    "comfyui": "ComfyUI's convention: scale 1 where no alpha is written",
    "gguf": "llama.cpp's rule: scale 1 where alpha is 0 or not written",
    "kohya": "kohya's convention: scale 1 where no alpha is written",
}
"""Whose loaders take a missing alpha for a scale of 1. PEFT's do not: they take 8."""
TENSOR_ALPHA = "tensor alpha"  # Source of an alpha that a tensor beside the factors holds
_STACK = "experts"  # What transformers calls the module of all experts, which holds parameters and is no layer
_MAX_ALPHA = 100_000  # Larger ones are slips: trainers take about the rank, rsLoRA its multiples
ReadScalar = Callable[[TensorEntry], float | None]  # Returns the number that a tensor of one element holds
Settings = Mapping[str, Sourced[object]]


def add_settings(adapter: Adapter[TensorEntry], sidecars: Sidecars, read_scalar: ReadScalar) -> Adapter[TensorEntry]:
    """Add what sidecars, headers and scalar tensors say; what nothing says stays None."""
    components = {module.path.partition(".")[0] for module in adapter.modules} & sidecars.components.keys()
    settings: Settings = sidecars.peft
    if len(components) == 1 and not settings:
        settings = sidecars.components[next(iter(components))]
    settings = {name: found for name, found in settings.items() if found.value is not None} | dict(sidecars.stated)
    modules = [replace(module, parameter=parameter) for module, parameter in _parameters(adapter, settings)]
    modules = [_with_rank(module, adapter, settings) for module in modules]
    done = []
    for module in modules:
        component = sidecars.components.get(module.path.partition(".")[0])
        done.append(_with_alpha(module, component or settings, adapter.convention, sidecars, read_scalar))
    return _with_targets(replace(adapter, modules=tuple(done), settings=settings))


def _with_targets(adapter: Adapter[TensorEntry]) -> Adapter[TensorEntry]:
    """Name the parameters that the modules change, where the base's shapes told and no configuration does."""
    named = sorted({m.parameter and f"{m.path}.{m.parameter}" for m in adapter.modules if m.parameter != "weight"})
    if not named or "" in named or "target_parameters" in adapter.settings:
        return adapter
    found: Sourced[object] = Sourced(named, "shapes of the base model's parameters")
    return replace(adapter, settings={**adapter.settings, "target_parameters": found})


def settle_parameters(adapter: Adapter[TensorEntry], shapes: Shapes) -> Adapter[TensorEntry]:
    """Say which parameter each module changes where only the base model tells, and what settings say of that one."""
    held = replace(adapter, base_shapes=shapes)
    modules = []
    for module, parameter in _parameters(held, adapter.settings):
        settled = module
        if module.parameter == "weight" and parameter == "":
            settled = replace(module, parameter="", rank=None)
        elif parameter and parameter != module.parameter and module.parameter in ("", "weight"):
            settled = _with_rank(replace(module, parameter=parameter), held, adapter.settings)
            alpha = next(_alphas_beside(settled, adapter.settings, adapter.convention, Sidecars()), None)
            settled = replace(settled, alpha=alpha or module.alpha)
        modules.append(settled)
    return _with_targets(adapter.with_modules(modules))


def _parameters(adapter: Adapter[TensorEntry], settings: Settings) -> Iterator[tuple[AdapterModule[TensorEntry], str]]:
    """Say which parameter each module changes: the weight, or one of those that PEFT wraps one by one."""
    wanted = settings.get("target_parameters")
    targets = [name.rpartition(".") for name in wanted.names] if wanted is not None else []
    children: dict[str, list[str]] = defaultdict(list)
    for name in adapter.base_shapes:
        parent, _, leaf = name.rpartition(".")
        children[parent].append(leaf)
    nested = {module.path for module in adapter.modules if module.nesting}
    for module in adapter.modules:
        if not module.is_linear:
            yield module, "weight"
            continue
        found = [leaf for parent, _, leaf in targets if parent and f".{module.path}".endswith(f".{parent}")]
        own = children.get(module.path, [])
        if not found and (module.path in nested or (own and "weight" not in own)):
            found = own
        if not found:
            is_stack = module.path.rpartition(".")[2] == _STACK and not own
            yield module, "" if module.path in nested or is_stack else "weight"
            continue
        if len(found) > 1:
            shapes = {leaf: adapter.base_shapes.get(f"{module.path}.{leaf}") for leaf in found}
            found = [
                leaf
                for leaf, shape in shapes.items()
                if shape is not None and family_of(module).fits_parameter(module.shapes, shape)
            ]
        yield module, found[0] if len(found) == 1 else ""


def _with_rank(
    module: AdapterModule[TensorEntry], adapter: Adapter[TensorEntry], settings: Settings
) -> AdapterModule[TensorEntry]:
    """The factors of stacked experts have rank × experts rows: the base or the configuration tells."""
    if module.parameter == "weight":
        if module.rank is None and family_of(module).is_unranked(module.factors):
            return replace(module, rank=config_rank(module, settings))
        return module
    shape = adapter.base_shapes.get(f"{module.path}.{module.parameter}")
    if shape is not None and family_of(module).fits_parameter(module.shapes, shape):
        rank = module.factors["A"].shape[0] // (shape[0] if len(shape) == 3 else 1)
        return replace(module, rank=Sourced(rank, f"A has {module.factors['A'].shape[0]} rows for {shape[0]} experts"))
    return replace(module, rank=config_rank(module, settings))


def config_rank(module: AdapterModule[F], settings: Settings) -> Sourced[int] | None:
    """Return the rank that PEFT's configuration gives a module, whatever its tensors have; None where it says none."""
    path = module.target
    patterns = settings.get("rank_pattern")
    if patterns is not None:
        found, value = by_pattern(patterns.value, path, where="rank_pattern")
        if not found and patterns.source == DIFFUSERS_HEADER:  # its patterns are those of one model of the pipeline
            found, value = by_pattern(patterns.value, path.partition(".")[2], where="rank_pattern")
        if found:
            return Sourced(_whole(value, "rank_pattern"), f"rank_pattern of {patterns.source}")
    rank = settings.get("r")
    return None if rank is None or not rank.value else Sourced(_whole(rank.value, "r"), rank.source)


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnreadableError(f"{name} must be a whole number, got {value!s}")
    return value


def _with_alpha(
    module: AdapterModule[TensorEntry],
    settings: Settings,
    convention: Convention,
    sidecars: Sidecars,
    read_scalar: ReadScalar,
) -> AdapterModule[TensorEntry]:
    rslora = settings.get("use_rslora")
    if rslora is not None and not isinstance(rslora.value, bool):
        raise UnreadableError(f"use_rslora must be true or false, got {rslora.value!s}")
    factors, family = dict(module.factors), family_of(module)
    entry = factors.pop("alpha", None)
    module = replace(
        module, factors=factors, use_rslora="use_rslora" in family.peft_fields and bool(rslora and rslora.value)
    )
    if entry is not None:
        value = read_scalar(entry)
        if value is None:
            what = f"alpha {entry.fqn!r} is {entry.dtype.name} of shape {list(entry.shape)}, not one number"
            raise UnreadableError(what)
        module = replace(module, alpha=Sourced(value, TENSOR_ALPHA))
    if not family.is_scaled:
        return module
    places = list(_alphas_beside(module, settings, convention, sidecars))
    places = places if module.alpha is None else [module.alpha, *places]
    is_told = sidecars.is_uniform and not family.is_unranked(factors)
    said = [each for each in places if each.value and not is_assumed(each)] if is_told else []
    other = next((each for each in said if said[0] is places[0] and each.value != said[0].value), None)
    if places and is_assumed(places[0]) and convention != "ai-toolkit":  # which overrides what its header says
        other = sidecars.unreadable
    return replace(module, alpha=places[0] if places else None, contradicted=other)


def is_assumed(alpha: Sourced[float]) -> bool:
    """Is an alpha a convention's, because nothing says it?"""
    return alpha.source in _UNIT_SCALE.values()


def _alphas_beside(
    module: AdapterModule[TensorEntry], settings: Settings, convention: Convention, sidecars: Sidecars
) -> Iterator[Sourced[float]]:
    """Yield what every place but a tensor says, the one that counts first."""
    name = family_of(module).alpha_field
    component, _, inner = module.target.partition(".")
    path = inner if component in sidecars.components else module.target
    patterns = settings.get("alpha_pattern")
    if patterns is not None:
        found, value = by_pattern(patterns.value, path, where="alpha_pattern")
        if found:
            yield Sourced(_number(value, "alpha_pattern"), f"alpha_pattern of {patterns.source}")
    alpha = settings.get(name)
    if alpha is not None and alpha.value and (patterns is None or not found):  # 0: verl does not know
        yield Sourced(_number(alpha.value, name), alpha.source)
    kernel = module.factors.get("A")
    is_conv = kernel is not None and len(kernel.shape) > 2 and math.prod(kernel.shape[2:]) > 1
    trainer = sidecars.conv_alpha if is_conv and sidecars.conv_alpha is not None else sidecars.alpha
    if trainer is not None and convention != "ai-toolkit":
        yield trainer
        yield from sidecars.others if trainer is sidecars.alpha else ()
    reason = _UNIT_SCALE.get(convention)
    if reason is not None and module.rank is not None:
        yield Sourced(float(module.rank.value), reason)


def with_alpha(adapter: Adapter[F], alpha: float | None) -> Adapter[F]:
    """Return the adapter with an alpha in every module that needs one: the user's, else the one that was found."""
    scaled = [module for module in adapter.modules if family_of(module).is_scaled]
    if alpha is not None and not scaled:
        raise UsageError("--alpha needs a LoRA, a LoHa or a LoKr, and this adapter has none", hint="leave it out")
    missing = [
        module for module in scaled if module.alpha is None and alpha is None and not _is_unscaled(module, adapter)
    ]
    if missing:
        zero = said_zero(missing[0], adapter)
        why = "no tensor, header or neighbouring file records it"
        if zero is not None:
            why = f"it is 0 in {zero}, which changes nothing"
        hint = (
            "give the lora_alpha of the training run: --alpha VALUE. A wrong one loads without a warning and "
            "changes every output"
        )
        raise UsageError(f"alpha of {some_modules(missing)} is not known: {why}", where="--alpha", hint=hint)
    if alpha is not None and not 0 < alpha <= _MAX_ALPHA:
        what = f"--alpha must be above 0 and at most {_MAX_ALPHA}, got {alpha:g}"
        raise UsageError(what, where="--alpha", hint="give the lora_alpha of the training run")

    def settled(module: AdapterModule[F]) -> AdapterModule[F]:
        if _is_unscaled(module, adapter):
            return _unscaled(module)
        if alpha is None or not family_of(module).is_scaled:
            return module
        return replace(module, alpha=Sourced(float(alpha), "--alpha"), contradicted=None)

    return adapter.with_modules(map(settled, adapter.modules))


def _unscaled(module: AdapterModule[F]) -> AdapterModule[F]:
    """Say a scale of 1 by a rank at which PEFT too builds both factors whole, and an alpha like it."""
    rank = max(max(module.shapes[role][:2], default=1) for role in ("w1", "w2"))
    why = "both factors are whole, which LyCORIS does not scale"
    return replace(module, rank=Sourced(rank, why), alpha=Sourced(float(rank), why))


def _is_unscaled(module: AdapterModule[F], adapter: Adapter[F]) -> bool:
    """LyCORIS does not scale a LoKr whose two factors are full."""
    return adapter.convention != "peft" and family_of(module).is_unranked(module.factors)


def said_zero(module: AdapterModule[F], adapter: Adapter[F]) -> str | None:
    """Return what says an alpha of 0, which is taken for "not known" (verl#5325), but which loaders multiply by."""
    found = adapter.settings.get(family_of(module).alpha_field)
    is_zero = found is not None and isinstance(found.value, int | float) and found.value == 0
    return found.source if found is not None and is_zero else None


def _number(value: object, name: str) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond every float
        pass
    raise UnreadableError(f"{name} must be a number, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A field of PEFT's configuration that nothing says."""

    field: str
    value: object  # What is taken for true
    otherwise: str  # What is wrong if it is not

    @property
    def text(self) -> str:
        """As `--config` takes it."""
        return f"{self.field}={json.dumps(self.value)}"


_RSLORA = Assumption(
    field="use_rslora", value=False, otherwise="with rsLoRA the scale is alpha/√r, and every change √r times as large"
)
_INIT = Assumption(
    field="init_lora_weights",
    value=True,
    otherwise="PiSSA, OLoRA and the like change the base before training, and the factors belong to the changed base",
)
_ALPHAS = Assumption(field="alpha_pattern", value={}, otherwise="modules with an alpha of their own get the common one")


def assumptions(adapter: Adapter[F], *, is_base_proven: bool = False) -> tuple[Assumption, ...]:
    """Return what is assumed of an adapter with alphas; of a base that is not proven to be the trained one, more."""
    if adapter.convention != "peft" or "peft_type" in adapter.settings:
        return assumed_before(adapter)  # a configuration is there, or its ecosystem has no such setting
    scaled = [m for m in adapter.modules if m.alpha is not None and m.alpha.source != TENSOR_ALPHA]
    found = []
    if any(_RSLORA.field in family_of(module).peft_fields for module in scaled):
        found.append(_RSLORA)
    if not is_base_proven and any(_INIT.field in family_of(module).peft_fields for module in adapter.modules):
        found.append(_INIT)
    if len(scaled) > 1:
        found.append(_ALPHAS)
    return tuple(each for each in found if each.field not in adapter.settings)


def assumed_before(adapter: Adapter[F]) -> tuple[Assumption, ...]:
    """Return what the export that wrote the adapter assumed, and nothing has contradicted or confirmed since."""
    header = adapter.settings.get(ASSUMED)
    texts = str(header.value).split(", ") if header is not None else []

    def is_open(each: Assumption) -> bool:
        now = adapter.settings.get(each.field)
        return now is None or (now.source != "--config" and now.value == each.value)

    return tuple(each for each in (_RSLORA, _INIT, _ALPHAS) if each.text in texts and is_open(each))


def findings_of(assumed: Sequence[Assumption], *, strict: bool) -> tuple[Finding, ...]:
    """Return one finding for each; an error when nothing may be assumed."""
    return tuple(
        Finding(
            code="assumed",
            severity="error" if strict else "warning",
            where=each.field,
            what=f"{each.field} is assumed to be {json.dumps(each.value)}: the source does not record it. "
            f"Otherwise: {each.otherwise}",
            hint=_hint(each),
        )
        for each in assumed
    )


def _hint(assumed: Assumption) -> str:
    companions = "put the adapter_config.json of the training run beside the source"
    if assumed.field == "alpha_pattern":
        return companions
    return f"set it: --config {assumed.text}; or {companions}"


def sourced(assumed: Sequence[Assumption]) -> dict[str, Sourced[object]]:
    """Return field → value and source, for the configuration."""
    return {each.field: Sourced(each.value, "assumed: the source does not record it") for each in assumed}


def header_of(assumed: Sequence[Assumption]) -> dict[str, str]:
    """Return what the header of an exported file says of it."""
    return {ASSUMED: ", ".join(each.text for each in assumed)} if assumed else {}
