"""The checkpoint against the config: will it load, whole, into this model on this mesh?"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import Checkpoint, Finding
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.checkpoint.formats.hollow_copy import skeleton
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.step_layouts import MODEL_PART, OPTIMIZER_PART, POLICY_PART, is_model_part
from ckpt_tools.checkpoint.formats.table import format_of
from ckpt_tools.checkpoint.formats.trainer_contracts import OPTIMIZER, describe
from ckpt_tools.checkpoint.infer_mesh import infer_mesh
from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.checkpoint.transform import is_optimizer, strip_wrappers
from ckpt_tools.checks.values import sample
from ckpt_tools.checks.verify import Verification, verify
from ckpt_tools.errors import CkptError, ForeignLayoutError, RefusedConfigError, UnreadableError
from ckpt_tools.models.config import CONFIG_NAME, config_path
from ckpt_tools.preflight.model_comparison import Comparison, ModelQuestion, ModelView, RankReads, Reads
from ckpt_tools.preflight.model_facts import read_facts
from ckpt_tools.preflight.names_match import check_names, group_names, is_native_titan
from ckpt_tools.preflight.spec import ParallelSpec, shard_mesh
from ckpt_tools.results import as_json
from ckpt_tools.sandbox.child import Child
from ckpt_tools.storage.locations import absolute, is_directory, is_file, open_source
from ckpt_tools.text import counted, escape_name
from ckpt_tools.units import format_size

COMPARE = "ckpt_tools.preflight.meta_model:compare"  # What runs in the child
SAMPLE_BYTES = 128 << 20  # Of the smallest tensors, whose values are looked at
_TIED_BYTES = 1 << 16  # of two tied tensors, to see whether they are the same
_SAVES_OPTIMIZER: Mapping[str, str] = {
    "torchtitan": "or load only the weights: set checkpoint.initial_load_path with initial_load_model_only = true",
    "accelerate": "or start over: pass the weights as the model, not as the checkpoint to resume from",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMatch:
    """What is to be said about a checkpoint and a config."""

    path: str
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...] = ()
    verify: Verification | None = None
    view: ModelView = field(default_factory=ModelView)
    mesh: str | None = None
    reads: tuple[RankReads, ...] = ()

    @property
    def comparison(self) -> Comparison | None:
        """The model's tensors and the checkpoint's; None without a model."""
        return self.view.comparison

    @property
    def ok(self) -> bool:
        """True without an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Return it for the JSON document."""
        found = None if self.comparison is None else len(self.comparison.found)
        sizes = {"max_files": "num_files", "max_read_bytes": "read_bytes", "max_needed_bytes": "needed_bytes"}
        most = {key: max((getattr(one, name) for one in self.reads), default=0) for key, name in sizes.items()}
        return as_json(self, "path ok mesh") | {"num_matched": found, "reads": most if self.reads else None}


def check_checkpoint(
    path: str, spec: ParallelSpec, *, model: str | None, resumes: bool = False, cuts: Sequence[str] = ()
) -> CheckpointMatch:
    """Compare a checkpoint with a config; few weights are read. With `resumes` there must be an optimizer's state."""
    # Where accelerate and verl put the model in what they save.
    inside = (os.path.join(path, child) for child in (MODEL_PART, POLICY_PART))
    path = next(filter(is_directory, inside), path)
    try:
        with open_path(path, as_part=True) as opened:
            return _check(opened, path, spec, model, cuts, resumes=resumes)
    except UnreadableError as error:
        view = ModelView() if model is None else look_at_model(model, cuts=cuts)
        if isinstance(error, ForeignLayoutError):  # the trainer's own, and perhaps just right
            unread = f"the checkpoint {escape_name(path)}: {error.what}" + (f" ({error.hint})" if error.hint else "")
            return CheckpointMatch(path=path, findings=(), not_checked=(unread,), view=view)
        finding = Finding.error("checkpoint-unreadable", error.where or path, error.what, error.hint)
        return CheckpointMatch(path=path, findings=(finding,), view=view)


def _check(
    opened: Opened, path: str, spec: ParallelSpec, model: str | None, cuts: Sequence[str], *, resumes: bool
) -> CheckpointMatch:
    checkpoint = opened.checkpoint
    verified = verify(opened, level="structure", num_workers=1, purpose="weights")
    findings = list(verified.findings)
    not_checked: list[str] = []
    if verified.ok:
        strange, unseen = sample(opened, most_bytes=SAMPLE_BYTES)
        findings += strange
        not_checked += filter(None, [unseen])
    if resumes:
        findings += _check_optimizer(checkpoint, path, spec)
    mesh = shard_mesh(spec.mesh)
    saved = _saved_mesh(checkpoint)
    view, reads = ModelView(), Reads()
    if model is None:
        not_checked.append("the checkpoint's names and shapes: there is no config.json of the model (--model DIR)")
    else:
        view = look_at_model(model, checkpoint=path, mesh=mesh, cuts=cuts)
        if view.why_not:
            not_checked.append(f"the checkpoint's names and shapes: {view.why_not}")
    if view.comparison is not None:
        reads = view.reads or reads
        findings += _check_model(opened, view.comparison, path, spec)
        not_checked += _not_compared(view.comparison, view, reads, spec)
        if reads.refused is not None:
            what = f"the checkpoint cannot be split for {mesh}: {reads.refused[0]}"
            findings.append(Finding.warning("checkpoint-mesh", path, what, reads.refused[1]))
        elif mesh is not None and reads.ranks:
            findings += check_mesh(checkpoint, reads.ranks, where=path, saved=saved, mesh=mesh, spec=spec)
    return CheckpointMatch(
        path=path,
        findings=tuple(findings),
        not_checked=tuple(not_checked),
        verify=verified,
        view=view,
        mesh=None if saved is None else str(saved),
        reads=reads.ranks,
    )


def _not_compared(comparison: Comparison, view: ModelView, reads: Reads, spec: ParallelSpec) -> Iterator[str]:
    left = map(strip_wrappers, comparison.left)
    if spec.framework == "torchtitan" and not comparison.found and is_native_titan(left):
        yield "names and shapes: the checkpoint uses torchtitan's names, config.json those of transformers"
    if view.reads is None and comparison.found:
        yield "what each rank reads: the config's mesh is not known"
    elif reads.unknown is not None:
        yield f"what each rank reads: {reads.unknown}"
    if spec.mesh is not None and spec.mesh.size("pp") > 1:
        yield "what each pipeline stage reads: the figures are for a rank with all layers"


def _check_model(opened: Opened, comparison: Comparison, where: str, spec: ParallelSpec) -> Iterator[Finding]:
    checkpoint = opened.checkpoint
    shapes = {entry.fqn: entry.shape for entry in checkpoint.tensors}
    target = shard_mesh(spec.mesh)
    proposed = "dp_shard=N" if target is None else str(target)
    if target is not None and target.size("tp") > 1:
        has_config = any(asset.file == CONFIG_NAME for _, asset in opened.assets)
        proposed += " --tp-plan auto" + ("" if has_config else f" --assets {spec.model or 'MODEL'}")
    yield from check_names(
        comparison, where=where, by_dcp=opened.format.loads_by_dcp, framework=spec.framework, mesh=proposed
    )
    yield from _check_adapters(comparison, shapes, where, spec)
    yield from _check_dtypes(comparison, where, spec)
    yield from _check_ties(opened, comparison, where)


def _check_ties(opened: Opened, comparison: Comparison, where: str) -> Iterator[Finding]:
    """Look whether tensors that the model shares are the same in the checkpoint."""
    entries = {entry.fqn: entry for entry in opened.checkpoint.tensors}
    for group in comparison.ties:
        stored = [comparison.found[name].fqns for name in group if name in comparison.found]
        if len(stored) < 2 or any(len(fqns) != 1 for fqns in stored):
            continue
        first, *others = [opened.resolve(entries[fqns[0]]) for fqns in stored]
        for other in others:
            if first.fqn == other.fqn or not first.chunks or not other.chunks:
                continue
            a, b = first.chunks[0], other.chunks[0]
            if (first.dtype, a.box, a.strides) != (other.dtype, b.box, b.strides):
                continue
            count = min(a.span.nbytes, b.span.nbytes, _TIED_BYTES)
            one, two = (opened.source.read(chunk.span.file, chunk.span.offset, count) for chunk in (a, b))
            names = f"{first.fqn} and {other.fqn}"
            if one != two:
                what = f"{names} differ, but the model ties them: one of the two would be lost"
                hint = 'write "tie_word_embeddings": false in config.json if they were trained separately'
                yield Finding.error("checkpoint-tied", where, what, hint)
            else:
                what = f"{names} are both stored, although the model ties them (their first {count} bytes agree)"
                yield Finding.info("checkpoint-tied", where, what)


def _check_optimizer(checkpoint: Checkpoint, path: str, spec: ParallelSpec) -> Iterator[Finding]:
    """Look for the optimizer's state: in the checkpoint, or next to the model as accelerate saves it."""
    if any(map(is_optimizer, checkpoint.tensors)):
        return
    parent = os.path.dirname(absolute(path))
    for directory in {path, parent} if is_model_part(os.path.basename(path)) else {path}:
        if is_file(os.path.join(directory, OPTIMIZER_PART, METADATA_NAME)):
            return
        if is_directory(directory):
            with open_source(directory) as source:
                if any(describe(name) == OPTIMIZER for name in source.list_files(max_depth=0)):
                    return
    key = spec.keys.get("resume_from", "the config")
    hint = _SAVES_OPTIMIZER.get(spec.framework, "or start over with these weights as the base model")
    what = f"{key} resumes a run, but there is no optimizer state in the checkpoint or beside it"
    advice = f"use a checkpoint that the trainer saved for resuming, {hint}"
    yield Finding.error("checkpoint-no-optimizer", path, what, advice)


def _saved_mesh(checkpoint: Checkpoint) -> Mesh | None:
    if checkpoint.mesh is not None:
        return checkpoint.mesh
    inferred = infer_mesh(checkpoint) if format_of(checkpoint).is_sharded else None
    return None if inferred is None else inferred.mesh


def look_at_model(
    model: str, *, checkpoint: str | None = None, mesh: Mesh | None = None, cuts: Sequence[str] = ()
) -> ModelView:
    """Return what is known of a model and a checkpoint for it; raise RefusedConfigError if it may not be built."""
    try:
        with ExitStack() as stack:
            job = ModelQuestion(
                config=absolute(stack.enter_context(skeleton(model))),
                checkpoint=None if checkpoint is None else absolute(stack.enter_context(skeleton(checkpoint))),
                mesh=mesh,
                cuts=tuple(map(os.path.abspath, cuts)),
            )
            child = stack.enter_context(Child(COMPARE, job, ModelView, does="describes the model", sandboxed=True))
            view = child.result()
    except (UnreadableError, RefusedConfigError):
        raise
    except CkptError as error:
        return ModelView(facts=read_facts(model), why_not=error.what)
    # As the user wrote it, not as the child was told.
    return view if view.facts is None else replace(view, facts=replace(view.facts, where=config_path(model)))


# Dtypes of a checkpoint, and adapters in it, against what a config trains: findings. Pure; no torch

_STORED = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


def _check_dtypes(comparison: Comparison, where: str, spec: ParallelSpec) -> Iterator[Finding]:
    param_dtype, key = spec.param_dtype, spec.keys.get("param_dtype", "the config")
    num_bytes: Counter[str] = Counter()
    packed: list[str] = []
    for name, found in comparison.found.items():
        dtype = BY_NAME[found.dtype]
        num_bytes[found.dtype] += math.prod(found.shape) * dtype.bits // 8
        wanted = comparison.tensors.get(name)
        if wanted is not None and BY_NAME[wanted.dtype].is_float and not dtype.is_float:
            packed.append(name)
    if packed:
        kinds = ", ".join(sorted({comparison.found[name].dtype for name in packed}))
        what = (
            f"tensors stored as {kinds}, but floating-point in the model ({len(packed)} in all): {group_names(packed)}"
        )
        hint = "a quantised checkpoint cannot be trained directly: start from the unquantised one"
        yield Finding.error("checkpoint-dtype", where, what, hint)
    floats = {name: size for name, size in num_bytes.items() if BY_NAME[name].is_float}
    if not floats:
        return
    total = ", ".join(f"{format_size(size)} of {name}" for name, size in sorted(floats.items()))
    computed = _STORED.get(param_dtype or "")
    if computed is not None and {computed, *floats} >= {"F16", "BF16"}:
        what = f"the checkpoint is {total}, but {key} computes in {param_dtype}"
        what += ": a conversion between F16 and BF16 loses range or precision"
        hint = "compute in the dtype of the checkpoint, or start from an F32 one"
        yield Finding.warning("checkpoint-dtype", where, what, hint)
    elif len(floats) > 1:
        yield Finding.info("checkpoint-dtype", where, f"several dtypes are stored: {total}")
    master = _STORED.get(spec.master_dtype or "")
    if master == "F32" and set(floats) & {"F16", "BF16"}:
        yield Finding.info(
            "checkpoint-dtype", where, f"the checkpoint is {total}; the optimizer's copy is F32, twice as large"
        )


def _check_adapters(
    comparison: Comparison, shapes: Mapping[str, Sequence[int]], where: str, spec: ParallelSpec
) -> Iterator[Finding]:
    if not comparison.adapters:
        return
    count = len(comparison.adapters)
    if spec.adapter is None:
        alone = not comparison.found
        problem = (
            f"{'an adapter, not a model' if alone else 'the model and an adapter in one'}: tensors such as "
            f"{escape_name(comparison.adapters[0])} ({count} in all); without adapter training they would be ignored"
        )
        yield Finding.error("checkpoint-adapter", where, problem, f"merge it first: ckpt merge-lora BASE {where} NEW")
        return
    rank, key = spec.adapter.rank, spec.keys.get("adapter", "the rank of the adapter")
    ranks = {
        min(shapes[fqn]) for fqn in comparison.adapters if fqn in shapes and len(shapes[fqn]) == 2 and "lora_A" in fqn
    }
    if rank is not None and ranks and ranks != {rank}:
        what = f"the adapter in the checkpoint has rank {', '.join(map(str, sorted(ranks)))}, but {key} is {rank}"
        yield Finding.error("checkpoint-adapter", where, what, f"set {key} to the rank of the checkpoint")
    elif not comparison.found:
        yield Finding.info("checkpoint-adapter", where, f"an adapter without the base model (tensors: {count})")


# How the ranks of a run read a checkpoint: files and bytes, and what would make them fewer. Pure; no torch.

_MANY_BYTES = 2.0  # bytes read for a byte that is kept, from which on a reshard is proposed
_MANY_FILES = 16


def check_mesh(
    checkpoint: Checkpoint,
    reads: tuple[RankReads, ...],
    *,
    where: str,
    saved: Mesh | None,
    mesh: Mesh,
    spec: ParallelSpec,
) -> Iterator[Finding]:
    """Yield how the ranks of the run read the checkpoint, and what would make that cheaper."""
    if not format_of(checkpoint).is_sharded and spec.framework != "torchtitan":
        yield _whole_read(checkpoint, where, mesh, spec)
        return
    ranks = len(checkpoint.files)
    if format_of(checkpoint).has_views and ranks != (world := spec.world_size or mesh.world_size):
        what = f"{ranks} ranks saved one file each, but the run has {world} ranks: each rank loads its own file"
        way = f"resume on {ranks} ranks; or start from the weights: ckpt gather {where} NEW"
        yield Finding.error("checkpoint-mesh", where, what, way)
        return
    files = max(one.num_files for one in reads)
    read = max(one.read_bytes for one in reads)
    needed = max(one.needed_bytes for one in reads)
    factor = sum(one.read_bytes for one in reads) / max(1, sum(one.needed_bytes for one in reads))
    came = f"saved for {saved}, " if saved is not None else ""
    what = (
        f"{came}read by {mesh}: each rank reads {'one file' if files == 1 else f'up to {files} files'}, "
        f"{format_size(read)} to keep {format_size(needed)}"
    )
    hint = None
    if format_of(checkpoint).loads_by_dcp and (factor >= _MANY_BYTES or files >= _MANY_FILES) and saved != mesh:
        plan = f" --tp-plan auto --assets {spec.model or 'MODEL'}" if mesh.size("tp") > 1 else ""
        hint = f"for a faster load: ckpt reshard {where} NEW --mesh {mesh}{plan}"
    yield Finding.info("checkpoint-mesh", where, what, hint)


def _whole_read(checkpoint: Checkpoint, where: str, mesh: Mesh, spec: ParallelSpec) -> Finding:
    """Return what it means that every rank calls from_pretrained."""
    size = format_size(checkpoint.total_bytes)
    files = counted(len(checkpoint.files), "file")
    if spec.cpu_ram_efficient_loading:
        what = f"the first rank reads all {size} ({files}) and sends every rank its shard"
        return Finding.info("checkpoint-mesh", where, what)
    world = spec.world_size or mesh.world_size
    total = format_size(checkpoint.total_bytes * world)
    key = spec.keys.get("cpu_ram_efficient_loading")
    problem = f"each of {world} ranks reads all {size} ({files}): {total} in total"
    hint = None if key is None else f"set {key}: true to let only the first rank read"
    return Finding.info("checkpoint-mesh", where, problem, hint)
