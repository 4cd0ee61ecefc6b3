"""Is an adapter whole, and will a loader take it and change anything? Headers and the adapter's own bytes."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import accumulate
from typing import Literal

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Convention, Shapes, Sourced
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import Architecture, ModelFamily
from ckpt_tools.adapters.architectures.choose import choose_families, family_named
from ckpt_tools.adapters.architectures.names import ModulePlace, readings
from ckpt_tools.adapters.base.model import (
    BaseModel,
    adapted_paths,
    as_named,
    base_path,
    module_finder,
    parents_of,
    replicated,
)
from ckpt_tools.adapters.base.reading import on_base, read_base
from ckpt_tools.adapters.ecosystems.diffusers_loader import COMPONENTS, FOREIGN, component_of, own_metadata
from ckpt_tools.adapters.ecosystems.loader_report import (
    APART,
    EXPORTS,
    NEEDS_BASE,
    AdapterFile,
    Loader,
    LoaderReport,
    Loading,
    RejectedError,
)
from ckpt_tools.adapters.ecosystems.peft.config_rules import Config, rank_of
from ckpt_tools.adapters.ecosystems.peft.files import ROOT
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.integrity import NUMBER, check_adapter, check_base
from ckpt_tools.adapters.read import sidecars
from ckpt_tools.adapters.read.opening import BUNDLED, OpenedAdapter, TensorReader, UnknownTypeError, read_adapter
from ckpt_tools.adapters.settings import TENSOR_ALPHA, assumed_before
from ckpt_tools.checkpoint.entries import Finding, TensorEntry
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.errors import UsageError
from ckpt_tools.options import takes
from ckpt_tools.options.adapters import CheckOptions
from ckpt_tools.results import CheckedResult, as_json, plain
from ckpt_tools.storage.locations import is_directory, open_source
from ckpt_tools.text import counted, escape_name, first_few, natural_key, natural_order

Verdict = Literal["loads", "fails", "unknown"]
"""loads: proven; fails: something is wrong; unknown: nothing is known to be wrong, and not everything was checked."""
_OWN: Mapping[Convention, tuple[Loader, ...]] = {
    "peft": ("peft",),
    "diffusers": ("diffusers",),
    "kohya": ("kohya", "comfyui"),
    "comfyui": ("comfyui",),
    "ai-toolkit": ("comfyui", "diffusers"),
    "diffsynth": ("comfyui", "diffusers"),
    "trainer": ("peft",),
    "gguf": ("llama.cpp",),
    "mlx": ("mlx",),
}
"""Convention → loaders of which one has to take the adapter: kohya's names are ComfyUI's as well, and ai-toolkit writes
the one's or the other's, by the model."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoraCheck(CheckedResult):
    """What was found out about an adapter."""

    path: str  # As the user named it
    identity: Identity | None = None  # What it was read from
    kind: str  # lora, rslora, dora, loha, …; several are joined by "+"
    rank: int | None = None  # The rank that most modules have
    ranks: Mapping[int, int] = field(default_factory=dict)  # Rank → modules
    alpha: Sourced[float] | None = None  # The alpha that most modules have
    alphas: Mapping[float, int] = field(default_factory=dict)  # Alpha → modules
    num_modules: int = 0
    targets: tuple[str, ...] = ()  # Their paths, numbers as *
    convention: str | None = None  # Whose names the file has; None for an adapter that ckpt does not judge
    architecture: str | None = None  # The model family, where it is known
    judges: tuple[Loader, ...]  # The loaders that decide: those that were named, or those of the adapter's own format
    needs_all: bool  # Must all of them take it? Of those of a shared format one is enough
    loaders: tuple[LoaderReport, ...] = ()  # What each loader would make of it, the judges first
    findings: tuple[Finding, ...] = ()  # What is wrong: with the adapter, and for the judges
    not_checked: tuple[str, ...]  # What would need more than was given
    assumed: tuple[str, ...] = ()  # What the export that wrote the file assumed: "use_rslora=false"

    @property
    def verdict(self) -> Verdict:
        """Do the judges take the adapter, whole, as far as was proven?"""
        if any(finding.severity == "error" for finding in self.findings):
            return "fails"
        proven = [report.is_whole and report.is_proven for report in self.loaders if report.loader in self.judges]
        takes = bool(proven) and (all(proven) if self.needs_all else any(proven))
        is_certain = not any(finding.code == "adapter-alpha-differs" for finding in self.findings)
        return "loads" if takes and is_certain else "unknown"

    @property
    def ok(self) -> bool:
        """Is the adapter proven to load, whole?"""
        return self.verdict == "loads"

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        return {
            **as_json(self, "ok verdict identity judges path type=kind rank ranks"),
            "alpha": {"value": None, "source": None} if self.alpha is None else asdict(self.alpha),
            **as_json(self, "alphas num_modules targets convention architecture"),
            "loaders": [_loader_json(report) for report in self.loaders],
            **as_json(self, "not_checked findings"),
        }


def _loader_json(report: LoaderReport) -> dict[str, object]:
    return {
        **as_json(report, "loader loads changes whole=is_whole proven=is_proven factor"),
        "matched_modules": len(report.matched),
        "matched_tensors": report.num_matched,
        "unmatched_tensors": len(report.unmatched),
        "unmatched": plain(report.unmatched[:20]),
        "findings": plain(fold(report.findings)),
    }


@takes(CheckOptions, 'ckpt_tools.check_lora("adapter", base="model").verdict', "'loads'")
def check_lora(options: CheckOptions) -> LoraCheck:
    """Check an adapter: its factors, its names against the base, and what loaders will do with it.

    Raises:
        UsageError: An unknown loader or family.
        UnreadableError: No adapter here, or a damaged source.
    """
    wanted = _loaders(options.loaders)
    architecture = family_named(options.architecture)
    path = os.fspath(options.source)
    try:
        with read_adapter(path, adapter_name=options.adapter, format=options.format, as_part=True) as read:
            if read.adapter.convention != "gguf":  # whose names and shapes llama.cpp's own rules compare
                read = on_base(read, options.base)  # noqa: PLW2901 - the same adapter
            facts = None if options.base is None else _base_for(read.adapter, read_base(options.base))
            family = None if facts is None else facts.family
            found = (architecture,) if architecture else choose_families(read.adapter, base=family)
            return _check(read, path, facts, found, wanted)
    except UnknownTypeError as error:
        nothing = (f"anything: {error.what}",)
        return LoraCheck(path=path, kind="not known", judges=wanted, needs_all=True, not_checked=nothing)


def _loaders(names: Sequence[str]) -> tuple[Loader, ...]:
    for name in names:
        if name not in LOADERS:
            raise UsageError(f"unknown loader {name!r}", hint=f"--for takes {', '.join(LOADERS)}")
    return tuple(dict.fromkeys(names))  # type: ignore[arg-type]  # the literals


def _base_for(adapter: Adapter[TensorEntry], base: BaseModel) -> BaseModel:
    """Return the base as the model that the adapter is loaded into has it."""
    base = as_named(base, adapted_paths(adapter))
    layers = adapter.settings.get("layer_replication")
    if layers is not None and layers.value:
        base = replace(base, shapes=replicated(base.shapes, layers.value))
    return base


@dataclass(slots=True)
class _CheckRun:
    """What was found so far."""

    findings: list[Finding]
    not_checked: list[str]


def _check(
    read: OpenedAdapter,
    path: str,
    base: BaseModel | None,
    families: tuple[ModelFamily, ...],
    wanted: tuple[Loader, ...],
) -> LoraCheck:
    adapter = read.adapter
    run = _CheckRun(list(check_adapter(adapter, read=TensorReader(read.opened).read)), [])
    family = families[0] if len(families) == 1 else None
    if base is None:
        run.not_checked.append("the modules' names and shapes in the base model (--base)")
    elif adapter.convention != "gguf":
        found, not_checked = check_against(adapter, base, family)
        run.findings += [x for x in found if wanted != ("sglang",) or x.code != "adapter-unmatched"]  # by paths' ends
        run.not_checked += not_checked
    run.not_checked += [
        f"{each.text} (assumed by the export that wrote this file). Otherwise: {each.otherwise}"
        for each in assumed_before(adapter)
    ]
    file = _file(read, path, family, base)
    judges = wanted
    reports: tuple[LoaderReport, ...] = ()
    if file is None:
        _say_training(adapter, path, wanted, run)
    else:
        judges = wanted or _own_loaders(adapter.convention, file, is_of_pictures={*families} - {"llm"} != set())
        others = () if wanted or judges[0] in APART else tuple(x for x in LOADERS if x not in (*judges, *APART))
        reports = tuple(simulate(file, loader, families) for loader in (*judges, *others))
        _judge(reports[: len(judges)], run, needs_all=bool(wanted), has_base=base is not None)
    ranks = Counter(module.rank.value for module in adapter.modules if module.rank is not None)
    alphas = Counter(module.alpha.value for module in adapter.modules if module.alpha is not None)
    common = alphas.most_common(1)[0][0] if alphas else None
    alpha = next((m.alpha for m in adapter.modules if m.alpha is not None and m.alpha.value == common), None)
    return LoraCheck(
        path=path,
        identity=read.opened.identity,
        assumed=tuple(each.text for each in assumed_before(adapter)),
        kind="+".join(sorted({family_of(module).kind(module) for module in adapter.modules})),
        rank=ranks.most_common(1)[0][0] if ranks else None,
        ranks=dict(ranks.most_common()),
        alpha=alpha,
        alphas=dict(alphas.most_common()),
        num_modules=len(adapter.modules),
        targets=tuple(sorted({NUMBER.sub("*", module.path) for module in adapter.modules}, key=natural_key)),
        convention=adapter.convention,
        architecture=family,
        judges=judges,
        needs_all=bool(wanted) or file is None,
        loaders=reports,
        findings=fold(run.findings),
        not_checked=tuple(run.not_checked),
    )


def _say_training(adapter: Adapter[TensorEntry], path: str, wanted: Sequence[Loader], run: _CheckRun) -> None:
    what = "no loader reads a training checkpoint: export the adapter first"
    hint = "ckpt export-lora SRC DST --to " + next((EXPORTS.get(each, each) for each in wanted), "peft")
    if adapter.convention == "trainer":  # whose rows have another order
        hint += " --base DIR"
    if wanted:
        run.findings.append(Finding.error(code="loader-format", where=path, what=what, hint=hint))
    else:
        run.not_checked.append(f"loaders: {what} ({hint})")


def _judge(reports: Sequence[LoaderReport], run: _CheckRun, *, needs_all: bool, has_base: bool) -> None:
    """Add what the judges find; of those of a shared format the one that does best speaks."""
    chosen = list(reports)
    if not needs_all:
        chosen = [max(reports, key=lambda report: (report.is_whole, report.loads is None, report.changes))]
    for report in chosen:
        run.findings += report.findings
        unproven = [finding for finding in report.findings if finding.code.startswith(_UNPROVEN)]
        # Of the base model that was not given it is said once, for all loaders.
        run.not_checked += [
            f"{report.loader}: {each.what}" for each in fold(unproven) if has_base or each.code != NEEDS_BASE
        ]
    run.findings = [finding for finding in run.findings if not finding.code.startswith(_UNPROVEN)]


_UNPROVEN = "loader-unchecked"


def _file(read: OpenedAdapter, path: str, family: ModelFamily | None, base: BaseModel | None) -> AdapterFile | None:
    """Return the adapter as a loader finds it; None when it is not in one safetensors file."""
    opened = read.opened
    files = tuple(opened.checkpoint.files)
    if opened.format.is_training or len(files) != 1:
        return None
    directory = opened.source.root
    names = set[str]().union(*sidecars.list_directory(directory)) if is_directory(path) else ()
    return AdapterFile(
        file=os.path.basename(files[0]),
        tensors={entry.fqn: entry for entry in natural_order(opened.checkpoint.tensors, lambda entry: entry.fqn)},
        metadata=opened.metadata,
        config=_config(directory),
        siblings=tuple(sorted(name for name in names if name.endswith(".safetensors") and name != files[0])),
        is_named=not is_directory(path),
        architecture=family,
        base=None if base is None else base.shapes,
        base_class=None if base is None else base.class_name,
        base_type=None if base is None else base.model_type,
        base_config={} if base is None else base.config,
        modules=read.adapter.modules,
    )


def _own_loaders(convention: Convention, file: AdapterFile, *, is_of_pictures: bool) -> tuple[Loader, ...]:
    """Return the loaders of an adapter's own format, by what stands beside its tensors and by their names."""
    if convention in APART.values():
        return _OWN[convention]
    if file.config is not None:
        return ("peft",)
    if file.file == sidecars.DIFFUSERS_FILE or sidecars.DIFFUSERS_KEY in file.metadata:
        return ("diffusers",)
    is_of_lycoris = any(name.endswith((".lora_down.weight", ".alpha")) or ROOT in name for name in file.tensors)
    is_alone = is_of_pictures and file.file != sidecars.PEFT_FILE  # PEFT does not look for it
    if (convention == "peft" and is_alone) or (convention == "diffusers" and is_of_lycoris):
        return _OWN["ai-toolkit"]
    return _OWN[convention]


def _config(directory: str) -> Mapping[str, object] | None:
    if not sidecars.is_there(os.path.join(directory, sidecars.ADAPTER_CONFIG)):
        return None
    with open_source(directory) as source:
        return sidecars.read_json(source, sidecars.ADAPTER_CONFIG)


def fold(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Join findings that differ in their place alone: the first one stands, with how many there are and where."""
    groups: dict[tuple[str, str, str, str | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.severity, finding.what, finding.hint), []).append(finding)
    folded = []
    for group in groups.values():
        first, places = group[0], list(dict.fromkeys(finding.where for finding in group))
        if len(places) == 1:
            folded.append(first)
            continue
        what = f"{first.what} ({len(places)} times: {first_few(places)})"
        folded.append(replace(first, what=what))
    return tuple(folded)


# Are an adapter's modules in the base model, and of the right shape? By the family's names, or by the base's own.

_ENCODER = re.compile(r"(?:text_encoder(?:_\d)?\.|text_encoders\.|lora_te\d?_)")


def check_against(
    adapter: Adapter[TensorEntry], base: BaseModel, family: ModelFamily | None
) -> tuple[list[Finding], list[str]]:
    """Compare an adapter's modules with the base's; return what is wrong, and what could not be checked."""
    modules = parents_of(base.shapes)
    plain = [base_path(module.path) in modules for module in adapter.modules]
    if family == "llm" or (any(plain) if family is None else all(plain)):
        return list(check_base(adapter, base.shapes)), []
    if family is not None:
        return list(_by_tables(adapter, ARCHITECTURES[family], base.shapes)), []
    return _by_own_names(adapter, base.shapes)


def _by_own_names(adapter: Adapter[TensorEntry], base: Shapes) -> tuple[list[Finding], list[str]]:
    """Hold an adapter of a family without tables against the names of the base, with what tools put in front."""
    find = module_finder(base)
    findings: list[Finding] = []
    foreign: list[str] = []
    encoders = 0
    for module in adapter.modules:
        if _ENCODER.match(module.path):
            encoders += 1
            continue
        found = find(module.path)
        if found is None:
            foreign.append(module.path)
        elif (weight := base.get(f"{found}.{module.parameter}")) is not None:
            findings += _shape_of(module, {(weight[0], math.prod(weight[1:]))} if len(weight) > 1 else set())
    not_checked = [f"{encoders} modules of text encoders, which the base model does not contain"] if encoders else []
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
        what = f"the base model has no module of this name ({len(missing)} of {len(adapter.modules)} are not in it)"
        hint = "is it the base that the adapter was trained on?"
        yield Finding.error(code="adapter-unmatched", where=missing[0], what=what, hint=hint)


def _shape_of(module: AdapterModule[TensorEntry], wanted: set[tuple[int, int]]) -> Iterator[Finding]:
    """Hold the factors against the weight, or the weights, that they are for."""
    family, shapes = family_of(module), module.shapes
    have = family.matrix(shapes) if family.is_matrix_sure(shapes) else None
    if have is None or not wanted or have in wanted:
        return
    what = (
        f"the factors are for {list(have)}, but the base model's weight is "
        f"{' or '.join(str(list(each)) for each in sorted(wanted))}"
    )
    hint = "is it the base that the adapter was trained on?"
    yield Finding.error(code="adapter-shape", where=module.path, what=what, hint=hint)


def _shapes_of(each: ModulePlace, base: Shapes) -> Iterator[tuple[int, int]]:
    """Yield (out, in × kernel) of what a name means in the base: fused, or the rows of its parts together."""
    for root in ("", "model.diffusion_model.", f"{each.part.component}."):
        spellings = ([each.native], [each.spelled("alias")], each.parts, each.diffusers)
        ways = [[base.get(f"{root}{path}.weight", ()) for path in paths] for paths in spellings]
        if each.at is not None and len(ways[-1]) > 1:  # the tables do not tell its rows of the fused weight
            ways = [[way[each.at]] for way in ways[2:] if way]
        for weights in ways:
            if weights and all(len(shape) > 1 for shape in weights):
                yield sum(shape[0] for shape in weights), math.prod(weights[0][1:])


# Loaders of adapters, simulated by their key rules: what they map, leave out silently, or refuse.

LOADERS: Mapping[Loader, str] = {
    "peft": "peft.loader:load",
    "diffusers": "diffusers_loader:load",
    "comfyui": "loaders:load_in_comfyui",
    "kohya": "loaders:load_in_kohya",
    "invokeai": "loaders:load_in_invokeai",
    "vllm": "loaders:load_in_vllm",
    "sglang": "loaders:load_in_sglang",
    "llama.cpp": "gguf_mlx:load_in_llama_cpp",
    "mlx": "gguf_mlx:load_in_mlx",
}
"""Loader → its rules: they fill in a `Loading`, and raise `RejectedError` where the loader raises."""


def _rules_of(loader: Loader, name: str) -> Callable[[AdapterFile, Loading], None]:
    if loader != "llama.cpp" and name.endswith(".gguf"):
        raise RejectedError("it does not read GGUF")
    file, _, rules = LOADERS[loader].partition(":")
    module = import_module(f"ckpt_tools.adapters.ecosystems.{file}")
    found: Callable[[AdapterFile, Loading], None] = getattr(module, rules)
    return found


def _is_unknown(file: AdapterFile, loader: Loader) -> bool:
    """Has a family names in this loader that its table does not have, or is it not known?"""
    family = ARCHITECTURES.get(file.architecture or "")
    if file.architecture is None:
        return loader in ("comfyui", "kohya", "invokeai")
    if family is None or family.is_known_elsewhere:
        return False
    is_foreign = loader == "diffusers" and any(name.startswith((*FOREIGN, ROOT)) for name in file.tensors)
    return is_foreign or loader in ("comfyui", "kohya", "invokeai")


def simulate(file: AdapterFile, loader: Loader, families: Sequence[ModelFamily] = ()) -> LoaderReport:
    """Say what a loader would make of an adapter for one of some model families, if it does not matter which."""
    reports = [_simulate(replace(file, architecture=family), loader) for family in families or (file.architecture,)]
    first = reports[0]
    if all(
        (each.loads, each.unmatched, each.findings) == (first.loads, first.unmatched, first.findings)
        for each in reports
    ):
        return first
    return _simulate(replace(file, architecture=None), loader)


def _simulate(file: AdapterFile, loader: Loader) -> LoaderReport:
    loading = Loading()
    target = APART.get(loader) or ("peft" if file.architecture == "llm" else EXPORTS.get(loader, loader))
    hint = f"ckpt export-lora SRC DST --to {target}"
    if loader in ("vllm", "sglang"):
        hint += f"; to use what {loader} does not support, merge it into the base: ckpt merge-lora"
    loads: bool | None = True
    factor = None
    try:
        if _is_unknown(file, loader):
            what = f"how {loader} names the modules of {file.architecture or 'the model family'} is not known to ckpt"
            loading.unchecked(file.file, what, "name the model family with --architecture")
        else:
            _rules_of(loader, file.file)(file, loading)
        factor = _factor_of(file, loader, loading)
    except RejectedError as error:
        loads = False
        loading.used.clear()
        loading.say("loader-rejects", "error", file.file, f"{loader} refuses it: {error}", hint)
    bundled = [name for name in file.tensors if name.startswith(BUNDLED)]
    unmatched = tuple(name for name in file.tensors if name not in loading.used and name not in bundled)
    if loads and bundled and loading.used:
        what = f"it needs {counted(len(bundled), 'tensor')} of textual inversions in a file of their own"
        loading.needs(bundled[0], what)
    if any(finding.code == "loader-unchecked" for finding in loading.findings):
        loads = None
    elif loads and not loading.used:
        what = f"{loader} loads none of the {len(file.tensors)} tensors (a warning at most): nothing changes"
        loading.say("loader-no-op", "error", file.file, what, hint)
    elif loads and unmatched:
        reasons = {loading.ignored.get(name, "no module has that name") for name in unmatched}
        what = f"{loader} skips {len(unmatched)} of {len(file.tensors)} tensors: {'; '.join(sorted(reasons))}"
        loading.say("loader-ignores", "error", unmatched[0], what, hint)
    return LoaderReport(
        loader=loader,
        loads=loads,
        matched=loading.modules,
        num_matched=len(loading.used),
        unmatched=unmatched if loads is not None else (),
        findings=tuple(loading.findings),
        factor=factor,
    )


# The scale that a loader applies to each module, beside the one that was meant.
#
# Source: ComfyUI, comfy/weight_adapter/lora.py (`calculate_weight`); kohya-ss/sd-scripts, networks/lora.py; diffusers
# 0.42, utils/peft_utils.py (`get_peft_kwargs`), loaders/lora_conversion_utils.py; peft 0.21, tuners/lora/layer.py.

_PEFT_DEFAULT = 8  # Alpha of a configuration that says none


def _factor_of(file: AdapterFile, loader: Loader, loading: Loading) -> float | None:
    """Say where a loader applies another scale than was meant; return how many times the meant one, of the worst.

    None where it loads no module whose scale is known.
    """
    factors = []
    for module in file.modules:
        alpha, rank = _numbers(module)
        if not alpha or not rank or not any(entry.fqn in loading.used for entry in module.factors.values()):
            continue
        meant = alpha / (math.sqrt(rank) if module.use_rslora else rank)
        factor = _applied(module, file, loader, loading) / meant
        factors.append(factor)
        if factor and not math.isclose(factor, 1, rel_tol=1e-4):  # of 0 more is said
            source = module.alpha.source if module.alpha is not None else ""
            what = (
                f"{loader} applies {factor:.4g} times the trained change: alpha is {alpha:g} ({source}) for rank "
                f"{rank}, a scale of {meant:.4g}, and {loader} uses {factor * meant:.4g}"
            )
            target = EXPORTS.get(loader, loader)
            hint = f"write the scale where {loader} reads it: ckpt export-lora SRC DST --to {target}"
            loading.misreads(module.target, what, hint)
    return max(factors, key=_distance, default=None)


def _numbers(module: AdapterModule[TensorEntry]) -> tuple[float, int]:
    """Return alpha and rank; 0 for one that is not known, or scales nothing."""
    if module.alpha is None or module.rank is None or not family_of(module).is_scaled:
        return 0, 0
    return module.alpha.value if math.isfinite(module.alpha.value) else 0, module.rank.value


def _distance(factor: float) -> float:
    return abs(math.log(abs(factor))) if factor and math.isfinite(factor) else math.inf


def _applied(module: AdapterModule[TensorEntry], file: AdapterFile, loader: Loader, loading: Loading) -> float:
    if loader in ("peft", "vllm", "sglang"):
        names = ("r", "lora_alpha") if loader == "sglang" else (file.config or ())  # SGLang has one scale for all
        return _configured({name: (file.config or {}).get(name) for name in names}, module.target, module)
    alpha, rank = _numbers(module)
    own = alpha / rank if _has_tensor(module, loading) else 1.0
    return own if loader != "diffusers" else own * _in_diffusers(module, file, loading)


def _has_tensor(module: AdapterModule[TensorEntry], loading: Loading) -> bool:
    """Does the loader read the tensor with a module's alpha?"""
    parts = next(iter(module.factors.values())).fqn.split(".")
    is_there = any(f"{name}.alpha" in loading.used for name in accumulate(parts, "{}.{}".format))
    return is_there and module.alpha is not None and module.alpha.source == TENSOR_ALPHA


def _in_diffusers(module: AdapterModule[TensorEntry], file: AdapterFile, loading: Loading) -> float:
    """Return what diffusers multiplies by beside the alpha of a tensor: by its header, else by the alphas of others."""
    target = next(each for entry in module.factors.values() for each in loading.used.get(entry.fqn, ()))
    component, _, path = target.partition(".")
    if component not in COMPONENTS:
        component, path = component_of(file).removesuffix("."), target
    config = own_metadata(file, f"{component}.")
    if config is not None:
        return _configured(config, path, module)
    if not loading.spreads_alphas or _has_tensor(module, loading):
        return 1.0
    alphas = Counter(_numbers(other)[0] for other in file.modules if _has_tensor(other, loading))
    return alphas.most_common(1)[0][0] / _numbers(module)[1] if alphas else 1.0


def _configured(config: Config, path: str, module: AdapterModule[TensorEntry]) -> float:
    """Return the scale of PEFT's configuration."""
    found, alpha = sidecars.by_pattern(config.get("alpha_pattern"), path, where="alpha_pattern")
    alpha = alpha if found else config.get(family_of(module).alpha_field, _PEFT_DEFAULT)
    rank = rank_of(config, path)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        return math.nan
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
