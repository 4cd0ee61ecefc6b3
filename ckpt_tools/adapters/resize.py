"""Another rank for a LoRA, by the singular values of its factors; names, scale and everything else stay."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import SAVED, TOKENS, Adapter, AdapterModule, Sourced, some_modules
from ckpt_tools.adapters.ecosystems.output import Item, Output, conversion_of, staged, with_training, write
from ckpt_tools.adapters.ecosystems.peft.infer_config import infer_config
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.integrity import check_adapter
from ckpt_tools.adapters.low_rank import LoraResult, ModuleLoss, RankRule, svd_of_product
from ckpt_tools.adapters.read.opening import OpenedAdapter, TensorReader, load, read_adapter
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, DIFFUSERS_KEY, read_json
from ckpt_tools.adapters.settings import with_alpha
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.convert.job import check_separate
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.options import takes
from ckpt_tools.options.adapters import ResizeLoraOptions
from ckpt_tools.storage.staging import check_destination
from ckpt_tools.text import counted, first_few

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array

_PAIRS = (("A", "B"), ("A_embedding", "B_embedding"))
_FIELDS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")  # Of PEFT's configuration
_KEPT = (SAVED, TOKENS, "full")  # Families without a rank
_HASHES = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")


@takes(ResizeLoraOptions, 'ckpt_tools.resize_lora("adapter", "smaller", rank=1).ok', "True")
def resize_lora(options: ResizeLoraOptions) -> LoraResult:
    """Lower the rank of a LoRA, LoCon or DoRA to what approximates it best; the scale of every module stays.

    The product of the factors is never made: memory is the adapter's. A DoRA keeps its magnitudes.

    Raises:
        UsageError: A rank that is not lower, or factors that are no LoRA's.
        UnreadableError: No adapter here, or a damaged one.
        DestinationExistsError: The destination exists.
    """
    start, target = time.monotonic(), os.fspath(options.destination)
    if options.rank is None and options.rank_by is None:
        raise UsageError("the new rank is not given", hint="--rank N, or --rank-by fro --threshold 0.9")
    rule = RankRule.of(options, 1 << 30)
    with read_adapter(os.fspath(options.source)) as read:
        check_separate(read.opened, target)
        check_destination(target, overwrite=options.overwrite)
        if read.opened.format.is_training or len(read.opened.checkpoint.files) != 1:
            what = "resize-lora reads a PEFT directory or one safetensors file"
            raise UsageError(what, where=os.fspath(options.source), hint="ckpt export-lora SRC DIR; then resize DIR")
        given, reader = with_alpha(read.adapter, options.alpha), TensorReader(read.opened)
        _refuse_others(given, rule)
        loaded = load(given, read.opened, reader)
        if broken := next((each for each in check_adapter(loaded) if each.severity == "error"), None):
            raise UsageError(broken.what, where=broken.where, hint=broken.hint or "`ckpt check-lora SRC` says more")
        pairs = [_resized(module, rule, options.dtype) for module in loaded.modules]
        losses = tuple(loss for _, loss in pairs if loss is not None)
        kept = sum(loss.method == "kept" for loss in losses)
        if kept == len(losses):
            raise UsageError("every module keeps its rank: nothing to resize", hint="ask for a lower --threshold")
        made = loaded.with_modules(module for module, _ in pairs)
        output = _output(read, given, made, reader)
        if not options.dry_run:
            _publish(options, output, made)
    notes = [f"{counted(kept, 'module')} had no higher rank and keep it"] if kept else []
    here = read.opened.source.list_files(max_depth=0) if output.documents else ()
    others = {*here} - {output.file, *output.documents}
    notes += [f"not copied: {first_few(sorted(others))}"] if others else []
    if any(module.is_dora for module in made.modules):
        notes.append("DoRA: the loss is that of B·A; the magnitudes stay")
    conversion = conversion_of(output, read.opened, reader, target, start, notes, dry_run=options.dry_run)
    return LoraResult(conversion=conversion, modules=losses)


def _refuse_others(adapter: Adapter[TensorEntry], rule: RankRule) -> None:
    """Refuse factors that are no plain pair, and a rank that none exceeds."""
    ranked = [module for module in adapter.modules if module.family not in _KEPT]
    for module in ranked:
        is_pair = module.family == "lora" and any(set(pair) <= module.factors.keys() for pair in _PAIRS)
        if not is_pair or "mid" in module.factors or module.parameter != "weight":
            kind = "stacked experts" if module.parameter != "weight" else "a Tucker core"
            what = f"LoRA with {kind}" if module.family == "lora" else family_of(module).title
            hint = "write it as LoRA, where that can be: ckpt export-lora SRC DIR --to diffusers --svd-rank N"
            raise UsageError(f"resize-lora does not support {what}", where=module.path, hint=hint)
    highest = max((family_of(each).rank(each) or 0 for each in ranked), default=0)  # type: ignore[arg-type]  # shapes
    if not highest:
        raise UsageError("the adapter has no modules with a rank", hint="`ckpt check-lora SRC` says what it is")
    if rule.by is None and rule.most >= highest:
        what = f"--rank {rule.most} is not below the rank of any module: the highest is {highest}"
        raise UsageError(what, where="--rank", hint="a higher rank would add zeros alone")


def _resized(
    module: AdapterModule[Array], rule: RankRule, asked: str
) -> tuple[AdapterModule[Array], ModuleLoss | None]:
    """Return a module with its new factors, and what they lose."""
    import numpy as np

    from ckpt_tools.transfer.arrays import numpy_dtype

    if module.family in _KEPT:
        return module, None
    roles = next(pair for pair in _PAIRS if set(pair) <= module.factors.keys())
    stored = [module.factors[role] for role in roles]
    down, up = (f.reshape(f.shape[0], -1).astype(float) for f in stored)
    outer, sizes, inner = svd_of_product(up, down)
    size, scale = float(np.linalg.norm(sizes)), family_of(module).scale(module)
    rank, old = rule.choose(sizes, size), len(down)
    roots = np.sqrt(sizes[:rank])
    made = [down, up] if rank >= old else [roots[:, None] * inner[:rank], outer[:, :rank] * roots]
    rank = len(made[0])
    kinds = [f.dtype if asked == "keep" else numpy_dtype(BY_NAME[asked.upper()]) for f in stored]
    new = [f.astype(kind) for f, kind in zip(made, kinds, strict=True)]
    lacking = np.concatenate((up, -new[1].astype(float)), 1), np.concatenate((down, new[0].astype(float)))
    error = float(np.linalg.norm(svd_of_product(*lacking)[1])) * abs(scale)
    loss = ModuleLoss(
        path=module.path,
        rank=rank,
        rank_before=old,
        norm=size * abs(scale),
        error=error,
        method="svd" if rank < old else "kept",
    )
    shapes = (rank, *stored[0].shape[1:]), (len(up), rank, *stored[1].shape[2:])
    factors = {role: f.reshape(shape) for role, f, shape in zip(roles, new, shapes, strict=True)}
    alpha = Sourced(scale * (math.sqrt(rank) if module.use_rslora else rank), "the same scale")
    known = Sourced(rank, f"A has {rank} rows")
    changed = module if rank >= old else replace(module, rank=known, alpha=alpha)
    return replace(changed, factors={**module.factors, **factors}), loss


# The same file with other factors


def _output(read: OpenedAdapter, given: Adapter[TensorEntry], made: Adapter[Array], reader: TensorReader) -> Output:
    """Return the source's tensors under their names, with new factors and alphas."""
    from ckpt_tools.transfer.arrays import bytes_of, dtype_of

    entries = {entry.fqn: entry for entry in read.opened.checkpoint.tensors}
    arrays: dict[str, Array] = {}
    for before, after in zip(given.modules, made.modules, strict=True):
        arrays |= {entry.fqn: after.factors[role] for role, entry in before.factors.items()}
        if before.alpha is not None and before.alpha.source == "tensor alpha" and after.alpha is not None:
            entry = _alpha_beside(next(iter(before.factors.values())).fqn, entries)
            arrays[entry.fqn] = _scalar(after.alpha.value, entry)
    items = []
    for fqn, entry in entries.items():
        array = arrays.get(fqn)
        dtype, shape = (entry.dtype, entry.shape) if array is None else (dtype_of(array), tuple(array.shape))
        content = functools.partial(reader.read, entry) if array is None else functools.partial(bytes_of, array)
        items.append(Item(name=fqn, shape=shape, dtype=dtype, stored=dtype, read=content))
    has_config = any(found.source == ADAPTER_CONFIG for found in read.adapter.settings.values())
    documents = {}
    if has_config:
        config = {**read_json(read.opened.source, ADAPTER_CONFIG), **_ranks(made)}
        documents[ADAPTER_CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    header = read.opened.metadata
    (file,) = read.opened.checkpoint.files
    output = Output(file=os.path.basename(file), items=items, metadata=_header(header, made), documents=documents)
    return with_training(output, {}) if header.keys() & set(_HASHES) else output


def _alpha_beside(fqn: str, entries: Mapping[str, TensorEntry]) -> TensorEntry:
    path = fqn
    while path := path.rpartition(".")[0]:
        if f"{path}.alpha" in entries:
            return entries[f"{path}.alpha"]
    raise CkptError("the alpha of a module is not where ckpt can replace it", where=fqn)


def _scalar(value: float, entry: TensorEntry) -> Array:
    """Return a number in the type that it had, or float32 where that has no such number."""
    import numpy as np

    from ckpt_tools.transfer.arrays import numpy_dtype

    kept = np.full(entry.shape, value).astype(numpy_dtype(entry.dtype))
    return kept if (kept == value).all() else np.full(entry.shape, value, np.float32)


def _ranks(adapter: Adapter[Array]) -> dict[str, object]:
    """Return the fields of PEFT's configuration that say ranks and alphas."""
    config = infer_config(adapter)
    return {name: config[name].value for name in _FIELDS}


def _header(header: Mapping[str, str], made: Adapter[Array]) -> dict[str, str]:
    """Return a header with the new ranks and alphas wherever it has the old ones."""
    found = {key: value for key, value in header.items() if key not in _HASHES}
    pairs = {(each.rank.value, each.alpha.value) for each in made.modules if each.rank and each.alpha}
    for key, numbers in zip(("ss_network_dim", "ss_network_alpha"), map(set, zip(*pairs, strict=True)), strict=True):
        if key in found:
            found[key] = f"{numbers.pop():.12g}" if len(numbers) == 1 else "Dynamic"  # as sd-scripts writes
    if DIFFUSERS_KEY in found:  # whose fields stand behind the component's name
        document = json.loads(found[DIFFUSERS_KEY])
        for prefix in [key.removesuffix("r") for key in document if key.rpartition(".")[2] == "r"]:
            inside = [replace(m, path=m.path[len(prefix) :]) for m in made.modules if m.path.startswith(prefix)]
            if inside:
                own = replace(made.with_modules(inside), settings={})
                document |= {f"{prefix}{name}": value for name, value in _ranks(own).items()}
        found[DIFFUSERS_KEY] = json.dumps(document)
    return found


def _publish(options: ResizeLoraOptions, output: Output, made: Adapter[Array]) -> None:
    """Write, and read the scales again: a place that says the old one would change every output."""
    with staged(os.fspath(options.destination), output, overwrite=options.overwrite) as staging:
        write(output, staging, see=lambda _item, _content: None)
        directory = staging.directory
        with read_adapter(directory if output.documents else os.path.join(directory, output.file)) as read:
            written = read.adapter
        wrong = [m for m, found in zip(made.modules, written.modules, strict=True) if not _has_scale(found, m)]
        if wrong:
            what = f"the scale of {some_modules(wrong)} stands where ckpt cannot change it; nothing is published"
            hint = "write it with alphas first: ckpt export-lora SRC DIR; then resize DIR"
            raise CkptError(what, where=wrong[0].path, hint=hint)
        staging.publish()


def _has_scale(found: AdapterModule[TensorEntry], made: AdapterModule[Array]) -> bool:
    if made.family in _KEPT:
        return True
    scale = family_of(found).scale(found) if found.alpha is not None else math.nan  # type: ignore[arg-type]  # shapes
    return math.isclose(scale, family_of(made).scale(made), rel_tol=1e-6)
