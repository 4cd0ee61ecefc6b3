"""A job that writes full safetensors, made into one that writes the weights of linear layers as 8-bit floats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.conversions.job import Job
from ckpt_tools.description.checkpoint import Asset, TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import hf
from ckpt_tools.models.config import CONFIG_NAME, config_in
from ckpt_tools.models.naming import AssetList
from ckpt_tools.quantised.encoded import SCALE, Encoder, peak_bytes
from ckpt_tools.quantised.linears import BLOCK, Chosen, choose
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import first_few

KEY = "quantization_config"
_METHOD = "fp8"
_EXPERTS = re.compile(r"\.experts\.|moe\.\w+\.weight$")


def quantised_job(job: Job, *, keep: Sequence[str], max_file_nbytes: int, num_workers: int) -> Job:
    """Return the job that writes what `job` would, quantised as transformers' `FineGrainedFP8Config` does it.

    Args:
        job: Writes an HF directory, by the hub's names.
        keep: Globs of tensors that stay as they are.
        max_file_nbytes: Largest file.
        num_workers: Threads that will run it.

    Raises:
        UsageError: It is quantised already, has no config.json, or none of its tensors is one to quantise.
    """
    targets = {entry.fqn: entry for entry in job.target.tensors}
    sources = [entry for entry in job.source.tensors if entry.fqn in targets]
    settings = _settings_before(job, sources)
    chosen = choose(sources, keep)
    if not chosen.weights:
        raise UsageError(
            "--quantize fp8 finds no linear layer that it could quantise" + "; ".join(("", *_reasons(chosen))),
            where=job.opened.source.root,
            hint="it takes language models by the hub's names; see docs/guides/convert.md",
        )
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
        recipe=repr([(entry.fqn, job.names.get(entry.fqn), entry.dtype.name, entry.chunks) for entry in encoded]),
        edit_bytes=peak_bytes(encoded, num_workers),
        notes=[*job.notes, *_notes(chosen, sources, settings)],
        warnings=(*job.warnings, *_warnings(sources)),
    )


def _settings_before(job: Job, tensors: Sequence[TensorEntry]) -> Mapping[str, object] | None:
    """Return the `quantization_config` of a release that the weights were trained from, if there is one.

    Raises:
        UsageError: No config, or weights that are still quantised.
    """
    source = next((source for source, asset in job.assets if asset.file == CONFIG_NAME), None)
    where = job.opened.source.root
    if source is None:
        what = f"--quantize needs the model's {CONFIG_NAME}, which tells loaders how the weights are quantised"
        raise UsageError(what, where=where, hint="--assets DIR, with the model's config and tokenizer")
    values = config_in(source).values
    inner = values.get("text_config")
    settings = values.get(KEY) or (inner.get(KEY) if isinstance(inner, Mapping) else None)
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    stored = [e.fqn for e in tensors if e.dtype.name.startswith("F8") or e.fqn.endswith((SCALE, "activation_scale"))]
    if stored or method not in (None, _METHOD):
        what = f"{first_few(stored)}: quantised already" if stored else f"{CONFIG_NAME} says {method!r} already"
        raise UsageError(what, where=where, hint="add --dequantize to decode it first, or leave out --quantize")
    return settings if isinstance(settings, Mapping) else None


def _with_config(assets: AssetList, chosen: Chosen) -> AssetList:
    """Return the assets with a config that says how the weights are quantised."""
    changed = []
    for source, asset in assets:
        if asset.file != CONFIG_NAME:
            changed.append((source, asset))
            continue
        values = dict(config_in(source).values)
        if isinstance(inner := values.get("text_config"), Mapping):
            values["text_config"] = {key: value for key, value in inner.items() if key != KEY}
        values[KEY] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": list(chosen.kept),
            "quant_method": _METHOD,
            "weight_block_size": [BLOCK, BLOCK],
        }
        text = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
        changed.append(
            (VirtualSource(source, {CONFIG_NAME: VirtualFile.of(text)}), Asset(file=CONFIG_NAME, nbytes=len(text)))
        )
    return changed


def _notes(chosen: Chosen, tensors: Sequence[TensorEntry], before: Mapping[str, object] | None) -> list[str]:
    num_elems = sum(entry.num_elems for entry in tensors)
    share = sum(entry.num_elems for entry in tensors if entry.fqn in chosen.weights) / max(1, num_elems)
    what = f"quantised {len(chosen.weights)} tensors, {share:.0%} of the elements, to 8-bit floats (E4M3)"
    what += f" in blocks of {BLOCK}×{BLOCK}; {CONFIG_NAME} says so, and which modules stay"
    notes = [what, *_reasons(chosen)]
    if before is not None:
        notes.append(f"{KEY} of the given {CONFIG_NAME} was of a model quantised before, and is replaced")
    return notes


def _warnings(tensors: Sequence[TensorEntry]) -> list[str]:
    stacked = [entry.fqn for entry in tensors if len(entry.shape) == 3 and _EXPERTS.search(entry.fqn)]
    if not stacked:
        return []
    return [f"experts that lie in one tensor are not quantised, and stay as they are: {first_few(stacked)}"]


def _reasons(chosen: Chosen) -> list[str]:
    groups = (
        (f"of no whole number of {BLOCK}×{BLOCK} blocks", chosen.uneven),
        ("by --keep-precision", chosen.asked),
        ("with layers that loaders join them with", chosen.joined),
    )
    return [f"{len(names)} linear layers stay as they are, {why}: {first_few(names)}" for why, names in groups if names]
