"""Will it fit: a spec as what `ckpt estimate` is asked, and the answer as findings."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.layout import FSDP_AXIS, Mesh
from ckpt_tools.estimate import Estimate, EstimateOptions, run
from ckpt_tools.estimate.model_sizes import OPTIMIZERS
from ckpt_tools.preflight.plain_values import as_truth, find_value, is_variable, words_of
from ckpt_tools.preflight.spec import ParallelSpec, shard_mesh, strategy_on
from ckpt_tools.sandbox.child import Child
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_device, format_size

_DTYPES = ("bf16", "f16", "f32")
_DEFAULT_SEQ_LEN = 2048
_DEFAULT_RANK = 16
_BLOCK = re.compile(r"([^.]+\.)*?\d+(?=\.)")  # the first numbered module that a parameter is in
_LESS_STATE = re.compile(r"8bit|4bit|fp8|paged|adafactor|lion|muon|galore|apollo|came|prodigy|schedule", re.IGNORECASE)
_OTHER_STATE = re.compile(r"galore|apollo|came|prodigy|schedule|grokadamw|stable", re.IGNORECASE)
_SCHEDULES: Mapping[str, str] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "interleavedzerobubble": "interleaved-zero-bubble",
    "zbvzerobubble": "zbv",
}
"""PyTorch's name in small letters → estimate's. Source: `torch.distributed.pipelining.schedules.get_schedule_class`."""
_ONE_GROUP = "every rank gathers the whole model at once, but the estimate assumes one block at a time"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """What is estimated for a spec, and in what that differs from it; or why nothing is."""

    options: EstimateOptions | None
    notes: tuple[str, ...] = ()
    why_not: str = ""
    is_upper: bool = False  # The run needs less than is counted: what does not fit here may fit
    assumed: tuple[str, ...] = ()  # What the config does not say, and more of which would need more
    is_part: bool = False
    """Others share the devices with what is counted: the rollout, the reference and the critic with the actor."""


class _EstimateNotes(list[str]):
    """What differs between a spec and what is estimated for it, for people."""

    is_upper = False

    def less(self, what: str) -> None:
        """Note something of which too much is counted."""
        self.append(f"{what}: the run needs less")
        self.is_upper = True


def savers_of(framework: str, values: Mapping[str, object] | None) -> tuple[str, ...]:
    """Return the options of a config with which the run needs less than an estimate counts."""
    found = {name: find_value(values, name) for name in words_of(framework, "savers")}
    return tuple(
        name
        for name, value in found.items()
        if is_variable(value) or (str(value) not in ("1", "None") if name.endswith("num_chunks") else as_truth(value))
    )


def ask(
    spec: ParallelSpec,
    *,
    model: str,
    gpu_memory: int | None,
    max_positions: int | None = None,
    savers: Sequence[str] = (),
    is_fixed: bool = False,  # Has the user said how many ranks there are?
) -> MemoryQuestion:
    """Return what to estimate for a spec; `gpu_memory` is in bytes, `max_positions` counts where no length is given."""
    whole, why_not = spec.mesh, _why_not(spec)
    if whole is None or why_not:
        return MemoryQuestion(options=None, why_not=why_not)
    notes = _EstimateNotes()
    for name in savers:
        notes.less(f"{escape_name(name)} is not counted")
    seq_len = spec.seq_len or min(_DEFAULT_SEQ_LEN, max_positions or _DEFAULT_SEQ_LEN)
    assumed = ([] if spec.seq_len else [f"samples of {seq_len} tokens"]) + ([] if spec.batch_size else ["one sample"])
    if assumed:
        notes.append(f"{' and '.join(assumed)} per rank: assumed, because the config does not set it")
    sharded = shard_mesh(whole) or whole
    experts = spec.axes.get("ep", 1) if whole.size("ep") == 1 else 1
    if experts > 1 and (sharded.size(FSDP_AXIS) * whole.size("tp") % experts or spec.engine not in ("fsdp1", "fsdp2")):
        notes.append(
            f"all experts are counted on every rank: ep={experts} does not divide the ranks that FSDP shards over"
        )
        experts = 1
    has_tp, has_stages = whole.size("tp") > 1, whole.size("pp") > 1
    batch = spec.batch_size or 1
    mesh, lora = _mesh(spec, sharded), _lora(spec, notes)
    computed = _dtype(spec.param_dtype or spec.master_dtype, "f32", "computation", notes)
    options = EstimateOptions(
        model=model,
        mesh=str(mesh),
        world_size=mesh.world_size if is_fixed else None,
        strategy=strategy_on(spec, _renamed(spec, sharded)),
        activation_checkpointing=spec.activation_checkpointing,
        selective_checkpointing=_selects(spec, notes),
        gpu_memory=gpu_memory,
        lora=lora,
        quantize=_quantize(spec, lora, notes),
        offload=spec.offload_params,
        offload_optimizer=spec.offload_optimizer and not spec.offload_params,
        sequence_parallel=has_tp and spec.sequence_parallel,
        loss_parallel=has_tp and spec.loss_parallel,
        schedule=_SCHEDULES.get((spec.schedule or "").lower(), "1f1b") if has_stages else "1f1b",
        micro_batches=max(1, batch // spec.micro_batch) if has_stages else None,
        expert_parallel=max(1, experts),
        seq_len=seq_len,
        batch_size=batch,
        param_dtype=computed,
        reduce_dtype=_dtype(spec.reduce_dtype, computed, "gradients", notes),
        master_dtype=_dtype(spec.master_dtype, "f32", "parameters", notes),
        frozen_dtype=_dtype(spec.master_dtype, computed, "frozen parameters", []),
        optimizer=_optimizer(spec, notes),
    )
    is_part = spec.keys.get("model", "").startswith("actor_rollout_ref.")
    if is_part:
        notes.append("only the actor is counted, although the rollout, the reference and a critic share its devices")
    return MemoryQuestion(
        options=options, notes=tuple(notes), is_upper=notes.is_upper, assumed=tuple(assumed), is_part=is_part
    )


def _why_not(spec: ParallelSpec) -> str:
    if spec.engine == "deepspeed":
        return "DeepSpeed's memory is not estimated"
    if spec.engine == "other":
        return "the model is distributed by neither FSDP nor DDP"
    if spec.mesh is None:
        why = "its axes do not fit the ranks" if spec.world_size is not None else "pass --world-size"
        return f"the mesh is not known: {why}"
    if spec.engine in ("fsdp1", "fsdp2") and not spec.wraps_blocks:
        return f"the blocks are not wrapped: {_ONE_GROUP}"
    if spec.mesh.size("pp") == 1:
        return ""
    if spec.schedule is None:
        return "how this trainer splits a model into pipeline stages is not known"
    is_known = spec.schedule.lower() in _SCHEDULES
    return "" if is_known else f"the schedule {escape_name(spec.schedule)} is not known"


def blocks_too_small(spec: ParallelSpec, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return why no estimate holds for wrapping by number of parameters, or nothing."""
    least = spec.wrap_min_num_params
    if least is None or spec.engine not in ("fsdp1", "fsdp2"):
        return ""
    blocks: Counter[str] = Counter()
    for name, shape in shapes.items():
        block = _BLOCK.match(name)
        if block is not None:
            blocks[block[0]] += math.prod(shape)
    largest = max(blocks.values(), default=None)
    if largest is None or largest >= least:
        return ""
    return f"no block has {least:,} parameters (the largest has {largest:,}), so none is wrapped: {_ONE_GROUP}"


def _mesh(spec: ParallelSpec, sharded: Mesh) -> Mesh:
    """Return the axes that an estimate takes: those of `sharded`, but cp, ep and pp as they are."""
    whole = spec.mesh or sharded
    axes = [(name, whole.size(name)) for name, _ in sharded.axes if name != "tp"]
    axes += [(name, whole.size(name)) for name in ("cp", "ep", "pp", "tp") if whole.size(name) > 1]
    return _renamed(spec, Mesh(tuple(axes)))


def _renamed(spec: ParallelSpec, mesh: Mesh) -> Mesh:
    if spec.engine in ("ddp", "none") and mesh.size(FSDP_AXIS) > 1:
        return Mesh(tuple(("dp_replicate" if name == FSDP_AXIS else name, size) for name, size in mesh.axes))
    return mesh


def _selects(spec: ParallelSpec, notes: _EstimateNotes) -> bool:
    if spec.selective_checkpointing not in (None, "op"):
        notes.less(f"checkpointing of some activations ({escape_name(spec.selective_checkpointing)}) is not counted")
    return spec.selective_checkpointing == "op"


def _dtype(value: str | None, default: str, what: str, notes: list[str]) -> str:
    if value is None or value in _DTYPES:
        return value or default
    notes.append(f"{what} in {escape_name(value)} is counted as bf16")
    return "bf16"


def _lora(spec: ParallelSpec, notes: list[str]) -> int | None:
    if spec.adapter is None:
        return None
    if spec.adapter.kind != "lora":
        notes.append(f"the adapter ({escape_name(spec.adapter.kind)}) is counted as LoRA")
    if spec.adapter.rank is None:
        notes.append(f"adapters of rank {_DEFAULT_RANK} are assumed")
    return spec.adapter.rank or _DEFAULT_RANK


def _quantize(spec: ParallelSpec, lora: int | None, notes: _EstimateNotes) -> str | None:
    if spec.quantize is None:
        return None
    if spec.quantize == "nf4" and lora is not None:
        return "nf4"
    notes.less(f"weights quantised to {escape_name(spec.quantize)} are counted as unquantised")
    return None


def _optimizer(spec: ParallelSpec, notes: _EstimateNotes) -> str:
    name = (spec.optimizer or "adamw").lower()
    bits = "-8bit" if "8bit" in name else "-4bit" if "4bit" in name else "-fp8" if "fp8" in name else ""
    kind = next((kind for kind in ("adamw", "lion", "muon", "adafactor", "rmsprop", "adagrad") if kind in name), None)
    if kind is None and name.startswith(("adam", "sgd")) and not _LESS_STATE.search(name):
        kind = "adamw" if name.startswith("adam") else "sgd"
    if _OTHER_STATE.search(name):
        kind = None
    found = f"{'paged-' if 'paged' in name else ''}{kind}{bits}"
    if kind is not None and found in OPTIMIZERS:
        return found
    tell = notes.less if _LESS_STATE.search(name) else notes.append
    tell(f"the state of {escape_name(spec.optimizer or '')} is counted as AdamW's")
    return "adamw"


def start_estimate(question: MemoryQuestion) -> AbstractContextManager[Child[Estimate] | None]:
    """Start the estimate, while other checks are made; leaving the context ends it."""
    if question.options is None:
        return nullcontext()
    return run.start_estimate(question.options)


def doubt_of(estimate: Estimate, question: MemoryQuestion) -> str:
    """Return why an estimate does not say whether the run fits, although it says whether what was counted does."""
    if estimate.fits and question.assumed:
        return f"it fits with {' and '.join(question.assumed)} per rank, but the config does not set them"
    if estimate.fits and question.is_part:
        return "the actor alone fits, but shares its devices with the rollout, the reference and a critic"
    if estimate.fits is False and question.is_upper:
        return "the estimate does not fit, but the run needs less (see the notes)"
    return ""


def check_memory(estimate: Estimate, spec: ParallelSpec) -> tuple[Finding, ...]:
    """Return what an estimate means for the run: an error when it does not fit."""
    if estimate.fits is not False or estimate.gpu_memory is None:
        return ()
    found = min(estimate.cases, key=lambda one: one.needed)
    advice = estimate.advice
    if advice is not None:
        hint = f"{in_own_words(advice.what, spec)}: then it needs {format_size(advice.estimate.needed)} and fits"
    else:
        hint = f"none of the {len(estimate.proposals)} changes tried fits: use more ranks, or a smaller model"
    named = (spec.keys.get(name) for name in ("strategy", "mesh", "axes.dp_shard", "world_size"))
    key = next(filter(None, named), "memory")
    what = (
        f"{found.case.label} on {found.case.mesh} needs {format_size(found.needed)} per rank "
        f"({format_size(found.per_rank.peak)} at the peak plus a margin of {format_size(found.margin.total)}), "
        f"but a device has {format_device(estimate.gpu_memory)}"
    )
    return (Finding.error("memory-does-not-fit", key, what, hint),)


_PHRASES: Mapping[str, tuple[str, str]] = {
    "--activation-checkpointing": ("activation_checkpointing", "checkpoint activations"),
    "--strategy full_shard": (
        "reshard_after_forward",
        "shard parameters, gradients and optimizer state over all ranks",
    ),
    "--lora": ("adapter", f"train LoRA adapters of rank {_DEFAULT_RANK}"),
    "--quantize nf4": ("quantize", "quantise the frozen weights to nf4"),
    "--offload": ("offload_params", "offload parameters to host memory"),
}


def in_own_words(change: str, spec: ParallelSpec) -> str:
    """Return a change that an estimate proposes (options of `ckpt estimate`) in the words of the config."""
    parts = []
    rest = change
    for option, (name, phrase) in _PHRASES.items():
        if option in rest:
            rest = rest.replace(option, " ")
            if name == "reshard_after_forward" and spec.engine != "fsdp2":
                parts.append("use FSDP2, full_shard")
            else:
                parts.append(phrase + "".join(f" ({written})" for written in words_of(spec.framework, name)))
    words = rest.split()
    for option, value in pairwise(words):
        if option == "--seq-len":
            key = spec.keys.get("seq_len")
            parts.append(f"shorten samples to {value} tokens" + (f" ({key})" if key else ""))
        elif option == "--mesh":
            parts.append(f"use more ranks: {value}")
    return " and ".join(parts) or change
