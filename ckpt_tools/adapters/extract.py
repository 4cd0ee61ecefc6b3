"""A LoRA out of two models: the nearest product to what was trained, tensor by tensor."""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import SAVED, Adapter, AdapterModule, Sourced
from ckpt_tools.adapters.base.slots import stacked_experts
from ckpt_tools.adapters.base.tied import EMBEDDINGS, HEADS
from ckpt_tools.adapters.ecosystems.to_target import target_of
from ckpt_tools.adapters.export import write_adapter
from ckpt_tools.adapters.low_rank import LeftOut, LoraResult, ModuleLoss, RankRule, nearest, norm_of
from ckpt_tools.adapters.read.opening import OpenedAdapter, TensorReader, to_array
from ckpt_tools.adapters.read.sidecars import base_config
from ckpt_tools.checkpoint.dtypes import BY_NAME, DType
from ckpt_tools.checkpoint.entries import Finding, TensorEntry
from ckpt_tools.checkpoint.formats.blob_contents import revealed
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.step import may_be_repository
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.checks.diff import match_names
from ckpt_tools.convert.job import check_separate
from ckpt_tools.errors import CkptError, UnreadableError, UsageError
from ckpt_tools.models.output_names import name_known
from ckpt_tools.options import takes
from ckpt_tools.options.adapters import ExportOptions, ExtractLoraOptions
from ckpt_tools.storage.staging import check_destination
from ckpt_tools.text import counted, first_few
from ckpt_tools.transfer.quantised.decoded import dequantised, is_quantised

if TYPE_CHECKING:
    from torch import Tensor

    from ckpt_tools.transfer.arrays import Array

_USUAL, _MOST = 8, 128  # Rank that nobody asked for, and the highest with --rank-by
_ROOT = "model.diffusion_model."  # Of the denoiser in a single file
_NO_LORA = {
    "bias": r".*\.bias",
    "no module's weight": r"(?!.*\.weight$).*",
    "experts": r".*\.experts\..*",
    "router": r".*(?:mlp|moe|feed_forward)\.gate\.weight|.*\brouter\b.*",
    "embedding": rf"(?:.*\.)?(?:{'|'.join(EMBEDDINGS)}|wpe|embed_positions|\w*embeddings?|relative_\w*bias)\.weight",
}
"""Why a tensor gets no factors → names."""
_CONV1D = ("c_attn", "c_proj", "c_fc")  # Layers of GPT-2, whose weights are (in, out)
_SLICE_ELEMS = 1 << 22


class EqualModelsError(CkptError):
    """The two models are equal: there is nothing to extract."""

    exit_code = 3
    code = "equal"


@dataclass(slots=True, kw_only=True)
class _Run:
    """One extraction under way."""

    options: ExtractLoraOptions
    rule: RankRule
    readers: tuple[TensorReader, TensorReader]  # Of the base, and of the tuned model
    is_conv1d: bool  # Are weights stored as (in, out), as GPT-2's are?
    modules: list[AdapterModule[Array]] = field(default_factory=list)
    losses: list[ModuleLoss] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    num_equal: int = 0


@takes(ExtractLoraOptions, 'ckpt_tools.extract_lora("model", "tuned", "lora").ok', "True")
def extract_lora(options: ExtractLoraOptions) -> LoraResult:
    """Extract a LoRA from a base model and the model that was trained from it.

    Computed in float32, tensor by tensor; the loss of every module is that of its factors as they are written. Memory:
    the largest tensor in float32, and the adapter. What differs and is not in the adapter is listed in `left_out`.

    Raises:
        UsageError: Models of other shapes, or a target that cannot express a module.
        EqualModelsError: Nothing differs.
        UnreadableError: A model is incomplete or damaged, or holds NaN or infinity.
        DestinationExistsError: The destination exists.
    """
    start, target = time.monotonic(), os.fspath(options.destination)
    rule = RankRule.of(options, _MOST if options.rank_by else _USUAL)
    target_of(options.to)
    check_destination(target, overwrite=options.overwrite)
    if options.device != "cpu":
        _check_gpu()
    paths = [_place(os.fspath(path), options.component) for path in (options.base, options.tuned)]
    with ExitStack() as stack:
        opened = [stack.enter_context(open_path(path)) for path in paths]
        for each in opened:
            check_separate(each, target)
        base, tuned = (_named(each, opened[0], options.names) for each in opened)
        ours, theirs = (s.entries for s in match_names(base, tuned, options.names, options.include, options.exclude))
        both = [fqn for fqn in ours if fqn in theirs]
        _refuse_other_models(ours, theirs, both)
        is_conv1d = any(fqn.endswith(".c_attn.weight") and e.shape[-1] > e.shape[0] for fqn, e in ours.items())
        run = _Run(options=options, rule=rule, readers=(TensorReader(base), TensorReader(tuned)), is_conv1d=is_conv1d)
        run.left_out += [LeftOut(fqn, None, "only in BASE") for fqn in ours if fqn not in theirs]
        run.left_out += [LeftOut(fqn, None, "only in TUNED") for fqn in theirs if fqn not in ours]
        progress = options.progress
        advance = progress(sum(s[fqn].nbytes for fqn in both for s in (ours, theirs))) if progress else None
        reasons = dict.fromkeys((r.entry.fqn for slot in stacked_experts(ours).values() for r in slot.rows), "experts")
        if base_config(base).get("tie_word_embeddings") is True:
            reasons |= dict.fromkeys((f"{head}.weight" for head in HEADS), "tied to the embedding")
        if any(fqn.startswith(_ROOT) for fqn in both):
            reasons |= dict.fromkeys((fqn for fqn in both if not fqn.startswith(_ROOT)), "beside the denoiser")
        for fqn in both:
            _see(run, fqn, ours[fqn], theirs[fqn], reasons.get(fqn))
            if advance is not None:
                advance(ours[fqn].nbytes + theirs[fqn].nbytes)
        if run.num_equal == len(ours) == len(theirs):
            what = f"the two models are equal: {counted(run.num_equal, 'tensor')}"
            raise EqualModelsError(what, where=os.fspath(options.tuned), hint="was one model given twice?")
        findings = (*_swapped(options, *opened), *_lost(run))
        if not run.losses:
            what = "no linear layer or convolution differs: a LoRA cannot hold the change"
            raise UsageError(what, where=first_few([each.fqn for each in run.left_out]), hint="ckpt diff BASE TUNED")
        return _write(run, paths[0], tuned, start, findings)


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU that PyTorch can use", hint="leave it out")


# Two models by the same names


def _place(path: str, component: str | None) -> str:
    return os.path.join(path, component) if component and component != "." and may_be_repository(path) else path


def _named(opened: Opened, base: Opened, names: str) -> Opened:
    """Return a model of plain floats under the names that adapters have: a plain model's, the hub's for a library's."""
    opened = revealed(opened)
    opened = dequantised(opened, "keep") if is_quantised(opened) else opened
    tensors = tuple(replace(entry, fqn=fqn) for fqn, entry in plain_names(opened.checkpoint).items())
    checkpoint = replace(opened.checkpoint, tensors=tensors)
    known = name_known(checkpoint, [*opened.own_assets, *base.own_assets], names, opened.resolve)
    return replace(opened, checkpoint=checkpoint if known is None else known.checkpoint)


def _refuse_other_models(ours: Mapping[str, TensorEntry], theirs: Mapping[str, TensorEntry], both: list[str]) -> None:
    other = [fqn for fqn in both if ours[fqn].shape != theirs[fqn].shape]
    if other:
        shown = [f"{fqn} is {list(ours[fqn].shape)} in BASE and {list(theirs[fqn].shape)} in TUNED" for fqn in other]
        what = f"{counted(len(other), 'tensor')} of other shapes: {first_few(shown)}"
        raise UsageError(what, where=other[0], hint=f"is it the same model? To leave it out: --exclude '{other[0]}'")
    if not both:
        raise UsageError("no tensor has the same name in both models", hint="ckpt diff BASE TUNED --keys-only")


def _swapped(options: ExtractLoraOptions, base: Opened, tuned: Opened) -> Iterator[Finding]:
    """Yield what says that BASE was made from TUNED, by config.json."""
    paths = os.fspath(options.base), os.fspath(options.tuned)
    says = [str(base_config(each).get("_name_or_path") or "") for each in (base, tuned)]
    places = [
        name and (name == path.removeprefix("hf://") or os.path.realpath(name) == os.path.realpath(path))
        for name, path in zip(says, paths[::-1], strict=True)
    ]
    if places[0] and not places[1]:
        what = f"BASE's config.json says that it was made from {says[0]}, which is TUNED: are the two swapped?"
        severity = Finding.error if options.strict else Finding.warning
        yield severity("swapped", paths[0], what, "ckpt extract-lora BASE TUNED DST: the adapter turns BASE into TUNED")


# Tensor by tensor


def _see(run: _Run, fqn: str, one: TensorEntry, other: TensorEntry, reason: str | None) -> None:
    """Add what became of a tensor: a module, or what is left out."""
    reader, tuned = run.readers
    if not (one.dtype.is_float and other.dtype.is_float):
        is_same = one.dtype == other.dtype and reader.read(one) == tuned.read(other)
        run.num_equal += is_same
        run.left_out += [] if is_same else [LeftOut(fqn, None, "not floating-point")]
        return
    change = _change(run, one, other)
    norm = norm_of(change)
    if not math.isfinite(norm):
        what = "NaN or infinity in one of the models: no difference is known"
        raise UnreadableError(what, where=fqn, hint="`ckpt verify --level values` finds it; or --exclude it")
    if not norm:
        run.num_equal += 1
        return
    path, _, leaf = fqn.rpartition(".")
    path = "diffusion_model." + path.removeprefix(_ROOT) if path.startswith(_ROOT) else path
    why = reason or next((why for why, names in _NO_LORA.items() if re.fullmatch(names, fqn)), None)
    if why is None and (change.ndim < 2 or (change.ndim > 2 and change.shape[1] == 1)):
        why = "norm or vector" if change.ndim < 2 else "depthwise convolution"
    if why is None:
        _add(run, path, change, _written(run, one.dtype), norm)
    elif run.options.full and leaf in ("weight", "bias") and reason is None and why != "experts":
        run.modules.append(_whole(run, path, leaf, change, one, other))
    else:
        run.left_out.append(LeftOut(fqn, norm, why))


def _change(run: _Run, one: TensorEntry, other: TensorEntry) -> Tensor:
    """Return TUNED − BASE in float32, rows of the base a few at a time."""
    import torch

    def read(reader: TensorReader, entry: TensorEntry, box: Box) -> Tensor:
        found = torch.empty(box.sizes)
        reader.read_into(entry, box, BY_NAME["F32"], found.numpy().reshape(-1).view("u1").data)
        return found

    shape = one.shape
    change = read(run.readers[1], other, Box((0,) * len(shape), shape))
    step = max(1, _SLICE_ELEMS * (shape or (1,))[0] // max(change.numel(), 1))
    for at in range(0, shape[0], step) if shape else (0,):
        box = Box((at, *(0 for _ in shape[1:])), (min(step, shape[0] - at), *shape[1:])) if shape else Box((), ())
        (change[at : at + step] if shape else change).sub_(read(run.readers[0], one, box))
    return change


def _add(run: _Run, path: str, change: Tensor, dtype: DType, norm: float) -> None:
    """Add the factors of a module, rounded as they are written, and what they lose."""
    import torch

    from ckpt_tools.transfer.arrays import numpy_dtype

    matrix = change.reshape(len(change), -1).to(run.options.device)
    if run.is_conv1d and path.rpartition(".")[2] in _CONV1D:
        matrix = matrix.T
    up, down, method = nearest(matrix, run.rule, norm)
    up, down = (factor.to(getattr(torch, str(dtype.torch_name))) for factor in (up, down))
    if not (up.isfinite().all() and down.isfinite().all()):
        raise UsageError(f"the factors are too large for {dtype.name}", where=path, hint="--dtype f32")
    rank, kernel = len(down), change.shape[2:]
    error = norm_of(matrix.addmm_(up.float(), down.float(), alpha=-1))
    run.losses.append(ModuleLoss(path=path, rank=rank, norm=norm, error=error, method=method))
    factors = {
        role: factor.float().cpu().numpy().astype(numpy_dtype(dtype)).reshape(shape)
        for role, factor, shape in (
            ("A", down, (rank, *change.shape[1:]) if kernel else down.shape),
            ("B", up, (*up.shape, *(1 for _ in kernel))),
        )
    }
    known, alpha = Sourced(rank, f"A has {rank} rows"), Sourced(float(rank), "extracted: alpha = rank")
    run.modules.append(AdapterModule(path=path, family="lora", factors=factors, rank=known, alpha=alpha))


def _written(run: _Run, stored: DType) -> DType:
    """Return the dtype of what is written: the base's, where factors can have it."""
    asked = run.options.dtype.upper()
    return BY_NAME[asked if asked != "KEEP" else stored.name if stored.name in ("BF16", "F16") else "F32"]


def _whole(
    run: _Run, path: str, leaf: str, change: Tensor, one: TensorEntry, other: TensorEntry
) -> AdapterModule[Array]:
    """Return a tensor as it is: PEFT replaces the base's, others add the difference."""
    from ckpt_tools.transfer.arrays import numpy_dtype

    if run.options.to == "peft":
        return AdapterModule(path=path, family=SAVED, factors={leaf: to_array(run.readers[1], other)})
    factor = change.numpy().astype(numpy_dtype(_written(run, one.dtype)))
    return AdapterModule(path=path, family="full", factors={"diff" if leaf == "weight" else "diff_b": factor})


# What is lost, and writing


def _lost(run: _Run) -> Iterator[Finding]:
    """Yield what of the change the adapter does not hold."""
    if run.left_out:
        kinds = Counter(each.why for each in run.left_out)
        shown = ", ".join(f"{count} {why}" for why, count in kinds.items())
        where = first_few([each.fqn for each in run.left_out])
        severity = Finding.error if run.options.strict else Finding.warning
        hint = None if run.options.full else "--full writes embeddings, norms and biases as they are"
        yield severity("left-out", where, f"what differs in {shown} is not in the adapter", hint)


def _write(run: _Run, base: str, tuned: Opened, start: float, findings: tuple[Finding, ...]) -> LoraResult:
    """Write the adapter as `export_lora` does."""
    options, source = run.options, "extracted from two models"
    said = {"use_rslora": False, "init_lora_weights": True, "alpha_pattern": {}}
    said |= {"fan_in_fan_out": True} if run.is_conv1d else {}
    adapter: Adapter[Array] = Adapter(
        modules=tuple(sorted(run.modules, key=lambda module: module.path)),
        convention="comfyui" if any(m.path.startswith("diffusion_model.") for m in run.modules) else "peft",
        settings={name: Sourced(value, source) for name, value in said.items()},
    )
    is_refused = any(each.severity == "error" for each in findings)
    how = ExportOptions(
        options.tuned,
        options.destination,
        to=options.to,
        base=base,
        base_model=options.base_model,
        architecture=options.architecture,
        overwrite=options.overwrite,
        dry_run=options.dry_run or is_refused,
    )
    read = OpenedAdapter(replace(tuned, metadata={}, step=None), adapter)  # type: ignore[arg-type]  # of arrays
    export = write_adapter(how, read, run.readers[1], start)
    bytes_read = sum(reader.bytes_read for reader in run.readers)
    return LoraResult(
        conversion=replace(export.conversion, bytes_read=bytes_read),
        modules=tuple(run.losses),
        left_out=tuple(run.left_out),
        config=export.config,
        findings=(*findings, *export.findings),
    )
