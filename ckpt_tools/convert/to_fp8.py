"""A job that writes full safetensors, made into one that writes the weights of linear layers as 8-bit floats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats import hf
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.convert.job import Job, shown_names, with_config
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.models.config import CONFIG_NAME, config_in
from ckpt_tools.models.output_names import AssetList
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import first_few
from ckpt_tools.transfer.quantised.decoded import KEY, settings_beside, without_key
from ckpt_tools.transfer.quantised.encoded import BLOCK, SCALE, Chosen, Encoder, choose, peak_bytes

_METHOD = "fp8"
_PACKED = (_METHOD, "mxfp4", "bitsandbytes", "gptq", "awq")
"""Methods that store bytes or integers, if only beside the weights; others know states without any."""
_STACKED = "not quantised: experts that are stored in one tensor"
_EXPERTS = re.compile(r"\.experts\.|moe\.\w+\.weight$")


def quantised_job(job: Job, *, keep: Sequence[str], max_file_nbytes: int, num_workers: int) -> Job:
    """Return the job that writes what `job` would, quantised as transformers' `FineGrainedFP8Config` does it.

    `job` writes an HF directory by the hub's names; tensors that a glob of `keep` matches stay as they are.
    """
    targets = {entry.fqn: entry for entry in job.target.tensors}
    sources = [entry for entry in job.source.tensors if entry.fqn in targets]
    settings = _settings_before(job, sources)
    chosen = choose(sources, keep, shown_names(sources, job.names))
    if not chosen.weights:
        what = "; ".join(("--quantize fp8 found no linear layer to quantise", *_reasons(chosen)))
        hint = "only language models with the hub's names are supported (docs/guides/export-a-model.md)"
        raise UsageError(what, where=job.opened.source.root, hint=hint)
    encoder = Encoder(job.opened.source)
    files: dict[str, VirtualFile] = {}
    read: list[TensorEntry] = []
    written: list[TensorEntry] = []
    for entry in sources:
        if entry.fqn in chosen.weights:
            stored, made = encoder.encode(entry)
            files |= made
            read += stored
            written += stored
        else:
            read.append(entry)
            written.append(targets[entry.fqn])
    arranged = hf.arrange(written, max_file_nbytes=max_file_nbytes)
    placed, heads = hf.place(arranged)
    order = {entry.fqn: number for number, entry in enumerate(written)}
    in_order = tuple(sorted(placed.tensors, key=lambda entry: order[entry.fqn]))  # a scale right after its weight
    stacked = [entry.fqn for entry in sources if len(entry.shape) == 3 and _EXPERTS.search(entry.fqn)]
    encoded = [entry for entry in sources if entry.fqn in chosen.weights]
    names = dict(job.names) | {fqn: "" for entry in encoded for fqn in (entry.fqn, entry.fqn + SCALE)}
    by_name = {entry.fqn: entry for entry in job.opened.checkpoint.tensors}
    own = [by_name[name] for entry in encoded if (name := job.names.get(entry.fqn, entry.fqn)) in by_name]
    return replace(
        job,
        opened=replace(job.opened, source=VirtualSource(job.opened.source, files)),
        source=replace(job.source, tensors=tuple(read)),
        target=replace(placed, tensors=in_order),
        heads=heads,
        documents=hf.documents(arranged),
        assets=_with_config(job.assets, chosen),
        names=names,
        apart=(*job.apart, *map(job.opened.resolve, own)),
        recipe=digest_bytes(repr([(e.fqn, job.names.get(e.fqn), e.dtype.name, e.chunks) for e in encoded]).encode()),
        made={"quantised": {"method": _METHOD, "block": [BLOCK, BLOCK], "tensors": len(encoded)}},
        edit_bytes=peak_bytes(encoded, num_workers),
        notes=[*job.notes, *_notes(chosen, sources, settings)],
        warnings=(*job.warnings, *([f"{_STACKED}: {first_few(stacked)}"] if stacked else [])),
    )


def warn_of_settings(job: Job) -> None:
    """Warn where config.json says that weights are quantised, and those that a job writes are not."""
    source = _source_of_config(job.assets)
    try:
        settings = None if source is None else settings_beside(source)
    except UnreadableError:
        return  # carried along as it is, which `check_names` says
    if settings is None or settings.get("quant_method") not in _PACKED:
        return
    if all(entry.dtype.is_float for entry in job.target.tensors):
        text = f"{CONFIG_NAME} has a {KEY}, but the weights are not quantised: loaders would misread them. "
        text += f"Remove it from {CONFIG_NAME}, or quantise the weights too (--quantize fp8)"
        job.warnings = (*job.warnings, text)


def _source_of_config(assets: AssetList) -> Source | None:
    return next((source for source, asset in assets if asset.file == CONFIG_NAME), None)


def _settings_before(job: Job, tensors: Sequence[TensorEntry]) -> Mapping[str, object] | None:
    """Return the `quantization_config` of a release that the weights were trained from, if there is one."""
    source, where = _source_of_config(job.assets), job.opened.source.root
    if source is None:
        what = f"--quantize needs the model's {CONFIG_NAME}, which tells loaders how the weights are quantised"
        raise UsageError(what, where=where, hint="add --assets DIR, with the model's config and tokenizer")
    settings = settings_beside(source)
    if stored := [e.fqn for e in tensors if e.dtype.name.startswith("F8") or e.fqn.endswith(SCALE)]:
        what = f"the weights are quantised already: {first_few(stored)}"
        raise UsageError(what, where=where, hint="add --dequantize to decode them first")
    if settings is not None and settings.get("quant_method") != _METHOD:
        what = f"{CONFIG_NAME} says that the weights are quantised: {settings.get('quant_method')!r}"
        way_on = f"add --dequantize if they are; otherwise remove {KEY} from {CONFIG_NAME}"
        raise UsageError(what, where=where, hint=way_on)
    return settings


def _with_config(assets: AssetList, chosen: Chosen) -> AssetList:
    """Return the assets with a config that says how the weights are quantised."""
    source = _source_of_config(assets)
    if source is None:
        return assets
    values = without_key(config_in(source).values)
    values[KEY] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": list(chosen.kept),
        "quant_method": _METHOD,
        "weight_block_size": [BLOCK, BLOCK],
    }
    return with_config(assets, values)


def _notes(chosen: Chosen, tensors: Sequence[TensorEntry], before: Mapping[str, object] | None) -> list[str]:
    num_elems = sum(entry.num_elems for entry in tensors)
    share = sum(entry.num_elems for entry in tensors if entry.fqn in chosen.weights) / max(1, num_elems)
    what = f"quantised {len(chosen.weights)} tensors ({share:.0%} of the elements) to 8-bit floats (E4M3) in "
    what += f"{BLOCK}×{BLOCK} blocks; {CONFIG_NAME} lists the modules that are not quantised"
    notes = [what, *_reasons(chosen)]
    if before is not None:
        notes.append(f"replaced the {KEY} that {CONFIG_NAME} had")
    return notes


def _reasons(chosen: Chosen) -> list[str]:
    groups = (
        (f"whose shape is not a multiple of {BLOCK}×{BLOCK}", chosen.uneven),
        ("named by --keep-precision", chosen.asked),
        ("that loaders fuse with one of these", chosen.joined),
    )
    return [f"not quantised: {len(names)} linear layers {why} ({first_few(names)})" for why, names in groups if names]
