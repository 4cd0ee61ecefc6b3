"""Take an adapter out of whatever holds it, and write it for an ecosystem."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_tools.adapters import settings
from ckpt_tools.adapters.adapter import Adapter, Fields, Sourced, Target, some_modules
from ckpt_tools.adapters.architectures import candidates
from ckpt_tools.adapters.architectures.architecture import ModelFamily
from ckpt_tools.adapters.architectures.choose import family_named, is_native
from ckpt_tools.adapters.base.model import BaseModel, refuse_trainers_names
from ckpt_tools.adapters.base.reading import base_of, on_base
from ckpt_tools.adapters.ecosystems import to_target
from ckpt_tools.adapters.ecosystems.output import Item, Output, conversion_of, staged, with_training, write
from ckpt_tools.adapters.ecosystems.peft import config_rules as rules
from ckpt_tools.adapters.ecosystems.peft.files import config_text, from_one_model, peft_names, renested
from ckpt_tools.adapters.ecosystems.peft.infer_config import infer_config, live_settings, parse_overrides
from ckpt_tools.adapters.families import dora
from ckpt_tools.adapters.families.family import InexpressibleError
from ckpt_tools.adapters.integrity import Values, check_adapter, check_structure, check_values, look_at
from ckpt_tools.adapters.read.opening import OpenedAdapter, TensorReader, load, read_adapter
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, PEFT_FILE
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import Finding, TensorEntry
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.formats.step_layouts import note_reading
from ckpt_tools.checkpoint.formats.table import check_replaceable
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.convert.job import DTYPES, Conversion, check_separate
from ckpt_tools.errors import UsageError
from ckpt_tools.options import takes
from ckpt_tools.options.adapters import ExportOptions
from ckpt_tools.results import CheckedResult, as_json
from ckpt_tools.storage.run_leases import leased
from ckpt_tools.storage.staging import check_destination
from ckpt_tools.text import escape_name

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array

_NOTHING = Output(file="", items=(), metadata={}, documents={})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Export(CheckedResult):
    """What an export did, or would do."""

    conversion: Conversion
    config: Mapping[str, Sourced[object]]
    """The configuration, every value with its source; what is known of it for targets that have none."""
    findings: tuple[Finding, ...]  # What is wrong with the adapter; nothing is written when one of them is an error
    assumed: tuple[str, ...] = ()  # Fields of the configuration that nothing says: "use_rslora=false"

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        return self.conversion.to_json() | as_json(self, "ok config assumed findings")


Factor = Any  # A `TensorEntry`, whose bytes are moved, or an `Array` that a conversion made


@dataclass(slots=True, kw_only=True)
class _ExportRun:
    """One export under way."""

    options: ExportOptions
    architecture: ModelFamily | None
    read: OpenedAdapter
    reader: TensorReader
    model: BaseModel | None  # The base model, when it was given or is in the source
    start: float
    notes: list[str] = field(default_factory=list)
    assumed: tuple[settings.Assumption, ...]  # What nothing says of the adapter
    seen: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Name of an item → the module and the role that its bytes are of, where they still are to be looked at."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def has_error(self) -> bool:
        """Is there a reason not to write?"""
        return any(finding.severity == "error" for finding in self.findings)


@takes(ExportOptions, 'ckpt_tools.export_lora("adapter", "exported").ok', "True")
def export_lora(options: ExportOptions) -> Export:
    """Export an adapter; reads its tensors and no others.

    With `dry_run`, values are not checked.

    Raises:
        UsageError: An unknown setting on which the result depends, or a target that cannot express the adapter.
        UnreadableError: No adapter here, or a damaged source.
        DestinationExistsError: The destination exists.
    """
    start = time.monotonic()
    to_target.target_of(options.to)
    family_named(options.architecture)
    if options.dtype not in DTYPES:
        raise UsageError(f"{options.dtype!r} is not a dtype", hint=f"--dtype takes {', '.join(DTYPES)}")
    target = os.fspath(options.destination)
    reading = read_adapter(
        os.fspath(options.source),
        adapter_name=options.adapter,
        format=options.format,
        include=options.include,
        exclude=options.exclude,
        settings={**live_settings(options.live_config or {}), **parse_overrides(options.config)},
        as_part=options.as_part,
    )
    with leased(options.source, is_wanted=not options.dry_run), reading as read:
        check_separate(read.opened, target)
        check_destination(target, overwrite=options.overwrite)
        if options.overwrite:
            check_replaceable(target)
        rules.refuse_foreign_shapes(read.adapter)
        _refuse_lower_rank(read.adapter, options.svd_rank)
        return write_adapter(options, on_base(read, options.base), TensorReader(read.opened), start)


def _refuse_lower_rank(adapter: Adapter[TensorEntry], svd_rank: int | None) -> None:
    """Refuse a rank below that of what needs no approximation: it would be written as it is."""
    wider = [m for m in adapter.modules if m.family == "lora" and m.rank and svd_rank and m.rank.value > svd_rank]
    if wider:
        highest = max(module.rank.value for module in wider if module.rank)
        what = (
            f"--svd-rank {svd_rank} is below the rank of {some_modules(wider)}, up to {highest}; it approximates only"
        )
        hint = f"lower the ranks of LoRA first: ckpt resize-lora SRC DST --rank {svd_rank}"
        raise UsageError(f"{what} what the format cannot express", where="--svd-rank", hint=hint)


def write_adapter(options: ExportOptions, read: OpenedAdapter, reader: TensorReader, start: float) -> Export:
    """Write an adapter, whose factors are the source's tensors or arrays, for an ecosystem; what is read is counted."""
    ecosystem = to_target.target_of(options.to)
    placed, component = read.adapter, None
    if options.to == "peft":
        is_diffusion = bool(candidates([module.path for module in placed.modules]))
        placed, component = from_one_model(placed, is_diffusion=is_diffusion)
    read = read._replace(adapter=placed)
    model, is_base_proven = base_of(read, options.base)
    whole = read.adapter if model is None else settings.settle_parameters(read.adapter, model.shapes)
    whole = settings.with_alpha(renested(whole) if whole.omitted else whole, options.alpha)
    run = _ExportRun(
        options=options,
        architecture=family_named(options.architecture),
        read=read,
        reader=reader,
        model=model,
        start=start,
        assumed=settings.assumptions(whole, is_base_proven=is_base_proven),
    )
    if read.opened.step is not None:
        run.notes.append(note_reading(read.opened.step))
    if whole.left_out:
        run.notes.append("left out: " + ", ".join(whole.left_out))
    if component:
        run.notes.append(f"the modules are those of {component!r} in a pipeline: load the adapter there")
    run.findings += settings.findings_of(run.assumed, strict=options.strict)
    if (doubt := rules.doubt_about(whole)) is not None:
        run.notes.append(doubt)
    has_model_names = options.to in ("peft", "gguf", "mlx")
    if has_model_names:
        whole = _on_its_model(run, whole)
    run.findings += check_structure(whole, base=model.shapes if model and has_model_names else None, repairs=True)
    if run.has_error:
        return _export(run, _NOTHING, {})
    output, known = _for_peft(run, whole) if options.to == "peft" else _for_others(run, whole, ecosystem)
    output = replace(output, metadata={**output.metadata, **settings.header_of(run.assumed)})
    known = {**known, **settings.sourced(run.assumed)}
    if run.has_error or options.dry_run:
        return _export(run, output, known)
    return _publish(run, whole, output, known)


# For PEFT: names, and nothing else where that is enough


def _on_its_model(run: _ExportRun, adapter: Adapter[TensorEntry]) -> Adapter[Factor]:
    """Return the adapter under the module paths of the model that PEFT would put it on."""
    base = run.model
    refuse_trainers_names(adapter, is_proven=run.options.base is not None)
    if adapter.convention in ("kohya", "comfyui") or is_native(adapter):
        if base is not None and (named := to_target.under_base_names(adapter, base.shapes)) is not None:
            return named
        if run.architecture is None and not candidates([module.path for module in adapter.modules]):
            what = "the names are neither the model's own nor those of a diffusion model that ckpt has tables for"
            hint = "pass the base model, from which the names are derived: --base DIR"
            raise UsageError(what, where=adapter.modules[0].path, hint=hint)
        loaded = _loaded(run, adapter)
        run.findings += check_adapter(loaded, repairs=True)
        if run.has_error:
            return loaded
        family = base.family if base else None
        return to_target.through_diffusers(loaded, run.notes, run.architecture, run.options.svd_rank, family)
    return adapter


def _for_peft(run: _ExportRun, adapter: Adapter[Factor]) -> tuple[Output, Fields]:
    base, base_model = run.model, run.options.base_model
    try:
        config = infer_config(adapter, base=base, base_model=base_model)
    except InexpressibleError:
        rules.refuse_variants(adapter)
        # Not as it is; perhaps as a LoRA.
        loaded = _loaded(run, adapter)
        run.findings += check_adapter(loaded)
        if run.has_error:
            return _NOTHING, {}
        adapter = to_target.as_loras(loaded, run.notes, run.options.svd_rank, base.shapes if base else {})
        config = infer_config(adapter, base=base, base_model=base_model)
    items = []
    for name, number, role in peft_names(adapter):
        module = adapter.modules[number]
        factor = module.factors[role]
        shape = module.shapes[role]
        items.append(_item(run, name, factor, dora.peft_shape(module.path, shape) if role == "magnitude" else shape))
        run.seen[name] = (number, role)
    documents = {ADAPTER_CONFIG: config_text(config)}
    return Output(file=PEFT_FILE, items=items, metadata={"format": "pt"}, documents=documents), config


def _loaded(run: _ExportRun, adapter: Adapter[Factor]) -> Adapter[Array]:
    """Return the adapter with its bytes, which may be there."""
    factors = (factor for module in adapter.modules for factor in module.factors.values())
    is_read = not any(isinstance(factor, TensorEntry) for factor in factors)
    return adapter if is_read else load(adapter, run.read.opened, run.reader)


def _item(run: _ExportRun, name: str, factor: Factor, shape: tuple[int, ...]) -> Item:
    if isinstance(factor, TensorEntry):
        stored, read = factor.dtype, functools.partial(run.reader.read, factor)
    else:
        from ckpt_tools.transfer.arrays import bytes_of, dtype_of

        stored, read = dtype_of(factor), functools.partial(bytes_of, factor)
    asked = run.options.dtype
    dtype = BY_NAME[asked.upper()] if asked != "keep" and stored.is_float else stored
    return Item(name=name, shape=shape, dtype=dtype, stored=stored, read=read)


# For the others: names by tables, and arithmetic


def _for_others(run: _ExportRun, adapter: Adapter[Factor], to: Target) -> tuple[Output, Fields]:
    rules.refuse_variants(adapter)
    rules.refuse_carried(adapter, "written for libraries other than PEFT", "--to peft")
    loaded = _loaded(run, adapter)
    run.findings += check_adapter(loaded, repairs=True)
    known = to_target.summary(adapter, run.options.base_model)
    if run.has_error:
        return _NOTHING, known
    written = to_target.write_names(
        loaded,
        to,
        base=run.model,
        weights=functools.partial(_base_weights, run),
        architecture=run.architecture,
        svd_rank=run.options.svd_rank,
        notes=run.notes,
    )
    run.notes += written.notes
    items = [_item(run, name, tensor, tuple(tensor.shape)) for name, tensor in written.tensors.items()]
    output = Output(file=written.file, items=items, metadata=written.metadata, documents=written.documents)
    return with_training(output, run.read.opened.metadata) if to in ("kohya", "comfyui") else output, known


@contextmanager
def _base_weights(run: _ExportRun) -> Iterator[tuple[Mapping[str, TensorEntry], TensorReader]]:
    """Lend the base's tensors, by the names that a plain model gives them, and their reader."""
    if run.options.base is None:
        yield run.read.adapter.base_tensors, run.reader
        return
    with open_path(os.fspath(run.options.base)) as opened:
        yield plain_names(opened.checkpoint), TensorReader(opened)


# Writing


def _publish(run: _ExportRun, adapter: Adapter[Factor], output: Output, config: Fields) -> Export:
    progress, destination = run.options.progress, os.fspath(run.options.destination)
    total = sum(item.entry.nbytes for item in output.items)
    advance = progress(total) if progress is not None else None
    values: dict[tuple[int, str], Values | None] = {}

    def see(item: Item, content: memoryview) -> None:
        if item.name in run.seen:
            values[run.seen[item.name]] = look_at(content, item.stored)
        if advance is not None:
            advance(item.entry.nbytes)

    with staged(destination, output, overwrite=run.options.overwrite) as staging:
        write(output, staging, see=see)
        if values:
            run.findings += check_values(adapter, values)
        run.read.opened.source.check_unchanged()
        if run.has_error:
            return _export(run, output, config)
        staging.publish()
        if staging.left_behind is not None:
            run.notes.append(f"the old destination could not be removed: {escape_name(staging.left_behind)}")
    return _export(run, output, config, published=True)


def _export(run: _ExportRun, output: Output, config: Fields, *, published: bool = False) -> Export:
    where, dry_run, notes = os.fspath(run.options.destination), run.options.dry_run, run.notes
    return Export(
        conversion=conversion_of(
            output, run.read.opened, run.reader, where, run.start, notes, dry_run=dry_run, published=published
        ),
        config=config,
        findings=tuple(run.findings),
        assumed=tuple(each.text for each in run.assumed),
    )
