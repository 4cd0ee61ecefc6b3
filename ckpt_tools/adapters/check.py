"""Is an adapter whole, and will a loader take it and change anything? Headers and the adapter's own bytes."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Sourced
from ckpt_tools.adapters.base import read_base
from ckpt_tools.adapters.integrity import check_structure, check_values
from ckpt_tools.adapters.loaders import LOADERS, AdapterFile, Loader, LoaderReport, TensorHead, simulate
from ckpt_tools.adapters.naming.architecture import ARCHITECTURES, Architecture
from ckpt_tools.adapters.naming.choose import choose_from_headers
from ckpt_tools.adapters.naming.resolve import Place, readings
from ckpt_tools.adapters.payload import TensorReader
from ckpt_tools.adapters.read import OpenedAdapter, read_adapter
from ckpt_tools.adapters.sidecars import ADAPTER_CONFIG, read_json
from ckpt_tools.adapters.target_modules import parents_of
from ckpt_tools.adapters.values import look_at
from ckpt_tools.checkpoint import Finding, Format, TensorEntry
from ckpt_tools.errors import StorageError, UsageError
from ckpt_tools.opening import read_file
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraCheck:
    """What was found out about an adapter."""

    path: str
    """As the user named it."""
    kind: str
    """lora, rslora, dora, loha, …; several are joined by "+"."""
    rank: int | None
    """The rank that most modules have."""
    ranks: Mapping[int, int]
    """Rank → modules."""
    alpha: Sourced[float] | None
    """The alpha that most modules have."""
    alphas: Mapping[float, int]
    """Alpha → modules."""
    num_modules: int
    """Adapted modules."""
    targets: tuple[str, ...]
    """Their paths, numbers as *."""
    convention: str
    """Whose names the file has."""
    architecture: str | None
    """The model family, where it is known."""
    loaders: tuple[LoaderReport, ...]
    """What each loader would make of it."""
    findings: tuple[Finding, ...]
    """What is wrong: with the adapter, and for the loaders that were asked for."""
    not_checked: tuple[str, ...]
    """What would need more than was given."""

    @property
    def ok(self) -> bool:
        """Is nothing wrong?"""
        return not any(finding.severity == "error" for finding in self.findings)


def check_lora(
    source: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    loaders: Sequence[str] = (),
    adapter: str | None = None,
    architecture: str | None = None,
    format: Format | None = None,  # noqa: A002 - the option's name
) -> LoraCheck:
    """Check an adapter: its factors, its names against the base, and what loaders will do with it.

    Args:
        source: Whatever holds an adapter (see `read_adapter`).
        base: The base model: are the adapted modules there, and of the right shape?
        loaders: Of peft, diffusers, comfyui, kohya and vllm: those whose findings count. Without any, all are reported
            and one that takes the adapter is enough.
        adapter: Which one, when there are several.
        architecture: The model family, where names do not tell it.
        format: Overrides what would be detected.

    Raises:
        UsageError: An unknown loader or family.
        UnreadableError: No adapter here, or a damaged source.
    """
    wanted = _loaders(loaders)
    if architecture is not None and architecture not in (*ARCHITECTURES, "llm"):
        raise UsageError(
            f"{architecture!r} is no model family with names", hint=f"one of {', '.join((*ARCHITECTURES, 'llm'))}"
        )
    with read_adapter(os.fspath(source), adapter_name=adapter, format=format) as read:
        model = None if base is None else _without_predictors(read_base(base).shapes, os.fspath(base))
        family = _family(read.adapter, architecture, model)
        findings = list(_integrity(read, model, family))
        not_checked = [] if model is not None else ["modules against the base model (--base)"]
        reports: tuple[LoaderReport, ...] = ()
        file = _file(read, os.fspath(source), family, model)
        if file is None:
            what = "no loader reads a training checkpoint: export the adapter first"
            hint = "ckpt export-lora SRC DST --to " + (next((x for x in wanted if x != "vllm"), "peft"))
            if read.adapter.convention == "torchtitan":  # whose q and k have other rows
                hint = "let the trainer export it (torchtune's checkpointer writes PEFT's format)"
            if wanted:
                where = escape_name(os.fspath(source))
                findings.append(Finding(code="loader-format", severity="error", where=where, what=what, hint=hint))
            else:
                not_checked.append(f"loaders: {what} ({hint})")
        else:
            reports = tuple(simulate(file, loader) for loader in wanted or tuple(LOADERS))
            is_sound = not any(finding.severity == "error" for finding in findings)
            findings += _of_loaders(reports, file, all_count=bool(wanted), is_sound=is_sound)
        return _summary(read.adapter, os.fspath(source), family, reports, findings, not_checked)


def _loaders(names: Sequence[str]) -> tuple[Loader, ...]:
    chosen: list[Loader] = []
    for name in names:
        found = next((loader for loader in LOADERS if loader == name), None)
        if found is None:
            raise UsageError(f"{name!r} is no loader that ckpt knows", hint=f"--for takes {', '.join(LOADERS)}")
        if found not in chosen:
            chosen.append(found)
    return tuple(chosen)


def _without_predictors(shapes: Shapes, path: str) -> Shapes:
    """Leave out layers that predict further tokens: checkpoints hold them behind the others, models do not load them.

    Source: transformers, models/deepseek_v3 and models/glm4_moe, `_keys_to_ignore_on_load_unexpected`.
    """
    if not os.path.isfile(os.path.join(path, "config.json")):
        return shapes
    with Source(path) as source:
        config = read_json(source, "config.json")
    depth = config.get("num_hidden_layers")
    if not config.get("num_nextn_predict_layers") or not isinstance(depth, int):
        return shapes
    layers = {name: _LAYER.search(name) for name in shapes}
    return {name: shapes[name] for name, layer in layers.items() if layer is None or int(layer[1]) < depth}


def _family(adapter: Adapter[TensorEntry], said: str | None, base: Shapes | None) -> str | None:
    if said is not None:
        return said
    return choose_from_headers(adapter, base_names=None if base is None else tuple(base))


def _integrity(read: OpenedAdapter, base: Shapes | None, family: str | None) -> Iterator[Finding]:
    adapter = read.adapter
    tables = ARCHITECTURES.get(family) if base is not None else None  # type: ignore[call-overload]
    is_plain = base is not None and any(module.path in parents_of(base) for module in adapter.modules)
    if base is not None and tables is not None and not is_plain:
        yield from check_structure(adapter)
        yield from _check_against(adapter, tables, base)
    else:
        yield from check_structure(adapter, base=base)
    reader = TensorReader(read.opened)
    yield from check_values(
        adapter,
        {
            (number, role): look_at(reader.read(entry), entry.dtype) if entry.num_elems else None
            for number, module in enumerate(adapter.modules)
            for role, entry in module.factors.items()
        },
    )


def _check_against(adapter: Adapter[TensorEntry], architecture: Architecture, base: Shapes) -> Iterator[Finding]:
    """Yield modules that the base lacks, where names have to go through the tables first."""
    modules = parents_of(base)
    roots = {module.partition(".")[0] for module in modules}
    is_pipeline = any(part.component in roots for part in architecture.parts)
    missing = []
    for module in adapter.modules:
        found = readings(module.path, architecture)
        if found and found[0].part.is_encoder and not is_pipeline:
            continue  # the base is the transformer or the U-Net alone
        paths = {path for each in found for path in (each.native, *each.diffusers)}
        paths |= {f"{each.part.component}.{path}" for each in found for path in each.diffusers}
        paths |= {f"model.diffusion_model.{each.native}" for each in found}
        if not paths & modules:
            missing.append(module.path)
        elif (finding := _misfit(module, found, base)) is not None:
            yield finding
    if missing:
        yield Finding(
            code="adapter-unmatched",
            severity="error",
            where=escape_name(missing[0]),
            what=f"the base model has no module of this name ({len(missing)} of {len(adapter.modules)} are not in it)",
            hint="is it the base that the adapter was trained on?",
        )


def _misfit(module: AdapterModule[TensorEntry], found: Sequence[Place], base: Shapes) -> Finding | None:
    """Hold the factors of a plain low rank against the weight, or the weights, that they are for."""
    factors = {role: factor.shape for role, factor in module.factors.items()}
    if module.family != "lora" or "mid" in factors or not all(len(factors.get(role, ())) > 1 for role in "AB"):
        return None
    have = (factors["B"][0], math.prod(factors["A"][1:]))
    wanted = {shape for each in found for shape in _shapes_of(each, base)}
    if not wanted or have in wanted:
        return None
    return Finding(
        code="adapter-shape",
        severity="error",
        where=escape_name(module.path),
        what=f"A, B are for {list(have)}, and the base model's is {' or '.join(str(list(x)) for x in sorted(wanted))}",
        hint="is it the base that the adapter was trained on?",
    )


def _shapes_of(each: Place, base: Shapes) -> Iterator[tuple[int, int]]:
    """Yield (out, in × kernel) of what a name means in the base: fused, or the rows of its parts together."""
    for root in ("", "model.diffusion_model.", f"{each.part.component}."):
        native = [base.get(f"{root}{each.native}.weight", ())]
        parts = [base.get(f"{root}{path}.weight", ()) for path in each.diffusers]
        ways = [native, parts]
        if each.match.part is not None and len(parts) > 1:  # the tables do not tell its rows of the fused weight
            ways = [[parts[each.match.part]]]
        for weights in ways:
            if weights and all(len(shape) > 1 for shape in weights):
                yield sum(shape[0] for shape in weights), math.prod(weights[0][1:])


def _file(read: OpenedAdapter, path: str, family: str | None, base: Shapes | None) -> AdapterFile | None:
    """Return the adapter as a loader finds it; None when it is not in one safetensors file."""
    opened = read.opened
    files = tuple(opened.checkpoint.files)
    if opened.checkpoint.format not in ("safetensors", "hf") or len(files) != 1:
        return None
    directory = opened.source.root if os.path.isdir(opened.source.root) else os.path.dirname(opened.source.root)
    return AdapterFile(
        file=os.path.basename(files[0]),
        tensors={entry.fqn: TensorHead(shape=entry.shape, dtype=entry.dtype) for entry in opened.checkpoint.tensors},
        metadata=read_file(opened.source, files[0]).header.metadata,
        config=_config(directory),
        siblings=_siblings(directory, files[0]) if os.path.isdir(path) else (),
        is_named=not os.path.isdir(path),
        architecture=family,  # type: ignore[arg-type]  # one of the names, checked above
        base=base,
    )


def _config(directory: str) -> Mapping[str, object] | None:
    if not os.path.lexists(os.path.join(directory, ADAPTER_CONFIG)):
        return None
    with Source(directory) as source:
        return read_json(source, ADAPTER_CONFIG)


def _siblings(directory: str, file: str) -> tuple[str, ...]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except OSError as error:
        raise StorageError(f"cannot list: {error.strerror}", where=escape_name(directory)) from error
    return tuple(sorted(name for name in names if name.endswith(".safetensors") and name != file))


def _of_loaders(
    reports: Sequence[LoaderReport], file: AdapterFile, *, all_count: bool, is_sound: bool
) -> Iterator[Finding]:
    if all_count:
        for report in reports:
            yield from report.findings
    elif not any(report.is_whole for report in reports):
        unknown = [report.loader for report in reports if report.loads is None]
        yield Finding(
            code="loader-none",
            severity="warning" if unknown or not is_sound else "error",  # why has been said already
            where=escape_name(file.file),
            what="no loader takes the adapter as it is, whole"
            + (f"; {', '.join(unknown)} cannot be told" if unknown else ""),
            hint="ckpt export-lora SRC DST --to peft, diffusers, kohya or comfyui",
        )


def _summary(
    adapter: Adapter[TensorEntry],
    path: str,
    family: str | None,
    reports: tuple[LoaderReport, ...],
    findings: Sequence[Finding],
    not_checked: Sequence[str],
) -> LoraCheck:
    ranks = Counter(module.rank.value for module in adapter.modules if module.rank is not None)
    alphas = Counter(module.alpha.value for module in adapter.modules if module.alpha is not None)
    common = alphas.most_common(1)[0][0] if alphas else None
    alpha = next((m.alpha for m in adapter.modules if m.alpha is not None and m.alpha.value == common), None)
    return LoraCheck(
        path=path,
        kind="+".join(sorted({_kind(module) for module in adapter.modules})),
        rank=ranks.most_common(1)[0][0] if ranks else None,
        ranks=dict(ranks.most_common()),
        alpha=alpha,
        alphas=dict(alphas.most_common()),
        num_modules=len(adapter.modules),
        targets=tuple(sorted({_NUMBER.sub("*", module.path) for module in adapter.modules})),
        convention=adapter.convention,
        architecture=family,
        loaders=reports,
        findings=tuple(findings),
        not_checked=tuple(not_checked),
    )


def _kind(module: AdapterModule[TensorEntry]) -> str:
    if module.family != "lora":
        return f"dora-{module.family}" if module.is_dora else module.family
    if module.is_dora:
        return "dora"
    return "rslora" if module.use_rslora else "lora"


def to_json(result: LoraCheck) -> dict[str, object]:
    """Return the JSON document of `ckpt check-lora`."""
    return {
        "ok": result.ok,
        "path": result.path,
        "type": result.kind,
        "rank": result.rank,
        "ranks": {str(rank): count for rank, count in result.ranks.items()},
        "alpha": {
            "value": None if result.alpha is None else result.alpha.value,
            "source": None if result.alpha is None else result.alpha.source,
        },
        "alphas": {str(alpha): count for alpha, count in result.alphas.items()},
        "num_modules": result.num_modules,
        "targets": list(result.targets),
        "convention": result.convention,
        "architecture": result.architecture,
        "loaders": [
            {
                "loader": report.loader,
                "loads": report.loads,
                "changes": report.changes,
                "whole": report.is_whole,
                "matched_modules": len(report.matched),
                "matched_tensors": report.num_matched,
                "unmatched_tensors": len(report.unmatched),
                "unmatched": list(report.unmatched[:20]),
                "findings": [_finding_json(finding) for finding in report.findings],
            }
            for report in result.loaders
        ],
        "not_checked": list(result.not_checked),
        "findings": [_finding_json(finding) for finding in result.findings],
    }


def _finding_json(finding: Finding) -> dict[str, object]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "where": finding.where,
        "what": finding.what,
        "hint": finding.hint,
    }
