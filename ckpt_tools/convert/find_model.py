"""The model in a checkpoint, and its tensors by other names than those that they have there."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile, zip_longest

from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats import safetensors
from ckpt_tools.checkpoint.formats.blob_contents import check_sealed
from ckpt_tools.checkpoint.formats.manifest import Origin
from ckpt_tools.checkpoint.formats.opening import Opened, read_document
from ckpt_tools.checkpoint.names.apply_mosaic import ZEROS_FILE
from ckpt_tools.checkpoint.transform import find_model, is_optimizer, rename, strip_prefix, strip_wrappers
from ckpt_tools.checks.diff import without_zeros
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.models.config import CONFIG_NAME, MAX_CONFIG_BYTES
from ckpt_tools.models.conventions import check_settings, refuse_lost
from ckpt_tools.models.output_names import AssetList, Named, Naming, claim_of, name_back, name_hub, name_live
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import escape_name, first_few
from ckpt_tools.transfer.placement.plain_yaml import load_yaml
from ckpt_tools.transfer.plan import check_complete
from ckpt_tools.transfer.read import read_blocks

_RUN_CONFIG = "run_config.yaml"  # What Megatron-Bridge notes of a run, in a step


def model_in(opened: Opened, strip: str, notes: list[str]) -> tuple[Checkpoint, dict[str, str]]:
    """Return the model's tensors under their plain names, and {plain name: name in the source}.

    `strip` is what `--strip-prefix` says; what is left out is added to `notes`.
    """
    checkpoint, prefix = opened.checkpoint, ""
    if strip == "none" or (strip == "auto" and not opened.format.is_training):
        model = replace(checkpoint, blobs=())
        new_name: Callable[[str], str] = str
    elif strip == "auto":
        model, prefix = find_model(checkpoint)
        if opened.format.has_views and (root := _only_state_dict(model)):
            notes.append(f"took {escape_name(root)!r} as the model, the only state dict (--strip-prefix chooses)")
            return model_in(opened, root, notes)
        recorded = opened.origin.prefix if opened.origin is not None else opened.root
        if recorded and all(entry.fqn.startswith(recorded) for entry in model.tensors):
            prefix = recorded  # what `shard --prefix` put there need not be guessed
        stripped = strip_prefix((strip_wrappers(entry.fqn) for entry in model.tensors), prefix)

        def new_name(fqn: str) -> str:
            return stripped(strip_wrappers(fqn))

        if prefix:
            notes.append(f"stripped the prefix {escape_name(prefix)!r} (--strip-prefix none keeps it)")
    else:
        prefix = strip if strip.endswith(".") else strip + "."
        inside = tuple(entry for entry in checkpoint.tensors if entry.fqn.startswith(prefix))
        if not inside:
            hint = "`ckpt inspect SRC` shows the prefixes; `ckpt gather SRC DST` finds the model's"
            raise UsageError(f"no tensor begins with {prefix!r}", hint=hint)
        model = replace(checkpoint, tensors=inside, blobs=())
        new_name = strip_prefix((entry.fqn for entry in inside), prefix)
    check_sealed(opened, prefix)
    notes += omitted(checkpoint, model)
    if not model.tensors:
        hint = "`ckpt inspect SRC --tensors` lists what it holds; `ckpt gather --strip-prefix PFX` extracts a part"
        raise UnreadableError("the checkpoint holds no model tensors", where=checkpoint.root, hint=hint)
    renamed = rename(model, new_name)
    names = {new.fqn: old.fqn for new, old in zip(renamed.tensors, model.tensors, strict=True)}
    return renamed, names


def _only_state_dict(model: Checkpoint) -> str:
    """Return the keys of a state dict that lies under no trainer's key; "" where there is none."""
    paths = [entry.path for entry in model.tensors]
    depth = sum(takewhile(bool, (len(set(keys)) == 1 for keys in zip(*paths, strict=False))))
    dotted = {path[: depth + 1] for path in paths if len(path) > depth + 1 and "." in str(path[-1])}
    found = sorted(".".join(map(str, path)) for path in dotted)
    if len(found) > 1:
        hint = f"choose one: `ckpt gather SRC DST --strip-prefix {found[0]}`; or `--strip-prefix none` for all"
        raise UsageError(f"the file holds {len(found)} state dicts: {first_few(found, 6)}", where=model.root, hint=hint)
    is_flat = all(len(path) == depth + 1 for path in paths if path[: depth + 1] not in dotted)
    return found[0] if found and is_flat else ""


def omitted(checkpoint: Checkpoint, model: Checkpoint, *, changed: bool = False) -> list[str]:
    """Say what of `checkpoint` is not in `model`, whose weights may have been `changed`."""
    kept = {entry.fqn for entry in model.tensors}
    omitted = [entry for entry in checkpoint.tensors if entry.fqn not in kept]
    others = [entry.fqn for entry in omitted if not is_optimizer(entry)]
    notes, why = [], ": it belongs to the weights before they changed" if changed else ""
    if len(omitted) > len(others):
        notes.append(f"left out {len(omitted) - len(others)} tensors of optimizer state{why}")
    if others:
        roots = dict.fromkeys(str(e.path[0]) for e in omitted if len(e.path) > 1 and not is_optimizer(e))
        of = f" (of {first_few(list(roots), 6)}; --strip-prefix takes one)" if len(roots) > 1 and not changed else ""
        notes.append(f"left out {len(others)} tensors that are not the model's: {first_few(others)}{of}")
    if checkpoint.blobs:
        names = [blob.fqn for blob in checkpoint.blobs]
        notes.append(f"left out {len(names)} non-tensor items: {first_few(names)}")
    return notes


def with_zeros(opened: Opened, named: Named) -> Opened:
    """Return a checkpoint with what is in no file of it, and written as zeros."""
    spans = (chunk.span for entry in named.checkpoint.tensors for chunk in entry.chunks)
    file = VirtualFile.of(bytes(max((span.nbytes for span in spans if span.file == ZEROS_FILE), default=0)))
    return replace(opened, source=VirtualSource(opened.source, {ZEROS_FILE: file})) if file.nbytes else opened


def name_again(
    opened: Opened, naming: Naming, notes: list[str], choose: str = "choose the weights ({})"
) -> tuple[Named, str]:
    """Return a sharded model's tensors by other names, and the prefix that their own have.

    The way leads over the hub's names: by the map that the manifest records, else by what the names say themselves.
    What is decided is added to `notes`. `choose` says where options choose tensors.
    """
    model, names = model_in(opened, "auto", notes)
    checkpoint = opened.checkpoint
    if len(model.tensors) < len(checkpoint.tensors) or checkpoint.blobs:
        others = {e.fqn for e in checkpoint.tensors} | {blob.fqn for blob in checkpoint.blobs}
        others -= set(names.values())
        what = f"only a model's weights can be renamed, but the source also holds {first_few(sorted(others), 3)}"
        hint = f"{choose.format(_choosing(names.values(), others))}, or keep the names of the whole state"
        raise UsageError(what, where=opened.source.root, hint=hint)
    assets = opened.assets
    origin = opened.origin
    if origin is not None and origin.map is not None:
        first = name_back(model, tensors_of(origin), assets, origin.map, Naming(), opened.resolve)
    else:
        first = name_hub(model, assets, naming if naming.names == "hub" else Naming(), opened.resolve)
    first = leave_out(first, model, opened)
    warnings = differences(first, opened, assets, notes)
    notes += warnings
    once = tuple(entry for entry in first.checkpoint.tensors if entry.fqn not in first.aliases)
    second = name_live(replace(first.checkpoint, tensors=once), assets, naming, opened.resolve)
    whole = {middle: names[own] for middle, own in first.sources.items()}
    apart = {entry.fqn: entry for entry in as_stored(first.apart, names)}
    apart |= {whole[e.fqn]: replace(e, fqn=whole[e.fqn]) for e in second.apart if e.fqn in whole}
    sources = {fqn: whole[middle] for fqn, middle in second.sources.items() if middle in whole}
    notes += [note for note in (second.note or first.note,) if note]
    roots = {own.removesuffix(plain) for plain, own in names.items()}
    named = replace(second, sources=sources, apart=tuple(apart.values()), note="")
    return named, roots.pop() if len(roots) == 1 else ""


def shown_again(opened: Opened, naming: Naming, prefix: str = "") -> dict[str, list[str]]:
    """Return what `name_again` calls the model's tensors, as far as the whole has such names."""
    found: dict[str, list[str]] = {}
    with suppress(UsageError, UnreadableError):
        model = replace(find_model(opened.checkpoint)[0], blobs=())
        named, root = name_again(replace(opened, checkpoint=model), naming, [])
        for fqn, own in named.sources.items():
            found.setdefault(own, []).extend((fqn, prefix + root + fqn))
    return found


def _choosing(model: Collection[str], others: Collection[str]) -> str:
    """Return options that leave the others out: by their roots, and by the name of TransformerEngine's state."""
    roots = {fqn.partition(".")[0] for fqn in model}
    apart = {root for fqn in others if (root := fqn.partition(".")[0]) not in roots}
    companions = [fqn for fqn in others if fqn.partition(".")[0] in roots]
    if len(apart) > 4 or not all("_extra_state" in fqn for fqn in companions):
        return "--include 'model.**'"
    globs = [f"{root}**" for root in sorted(apart)] + ["**_extra_state**"] * bool(companions)
    return " ".join(f"--exclude {shlex.quote(glob)}" for glob in globs)


def tensors_of(origin: Origin) -> list[TensorEntry]:
    """Return what the files hold that the manifest remembers."""
    heads = origin.headers.items()
    parsed = (safetensors.parse_header(text.encode(), file=name, file_nbytes=None) for name, text in heads)
    return [entry for head in parsed for entry in head.tensors]


def as_stored(apart: Iterable[TensorEntry], names: Mapping[str, str]) -> tuple[TensorEntry, ...]:
    """Return tensors by the names that they have in the source."""
    return tuple(replace(entry, fqn=names.get(entry.fqn, entry.fqn)) for entry in apart)


def leave_out(named: Named, model: Checkpoint, opened: Opened) -> Named:
    """Leave out zeros; refuse what the hub has no place for, and names of one tensor, or copies, of other bytes."""
    named = without_zeros(named, opened)
    refuse_lost(named.lost, where=opened.source.root)
    entries = {entry.fqn: entry for entry in model.tensors}
    for alias, name in named.aliases.items():
        if not is_same(entries[alias], entries[name], opened, tied=True):
            what = f"{alias!r} and {name!r} are one tensor in the config, but differ in the checkpoint"
            hint = f"is tie_word_embeddings in {CONFIG_NAME} what was trained? `ckpt gather --names live` keeps both"
            raise UsageError(what, where=opened.source.root, hint=hint)
    check_copies(named, opened)
    return named


def differences(named: Named, opened: Opened, assets: AssetList, notes: list[str]) -> tuple[str, ...]:
    """Say where config.json is not what the trainer notes of the model that was named anew; errors as `check_settings`.

    That nothing was noted, so that config.json is believed, is added to `notes`.
    """
    claim = claim_of(assets) if named.apart and opened.format.keeps_order else None
    if claim is None:
        return ()
    found = dict(opened.settings) or _run_config(opened)
    if not found:
        notes.append(f"the step has no settings that ckpt reads: {CONFIG_NAME} was trusted, including heads and norms")
    return check_settings(found, claim.config)


def _run_config(opened: Opened) -> dict[str, object]:
    """Return the settings that Megatron-Bridge keeps, by Megatron-LM's names; {} where there are none to be read."""
    companions = next((source for source, asset in opened.assets if asset.file == _RUN_CONFIG), None)
    if companions is None:
        return {}
    try:
        run = load_yaml(read_document(companions, _RUN_CONFIG, MAX_CONFIG_BYTES).decode(), full=True)
    except (ValueError, UnreadableError):
        return {}
    model = run.get("model") if isinstance(run, dict) else None
    if not isinstance(model, dict):
        return {}
    is_grouped = isinstance(model.get("num_query_groups"), int)
    return {**model, "group_query_attention": is_grouped, "norm_epsilon": model.get("layernorm_epsilon")}


def check_copies(named: Named, opened: Opened) -> None:
    """Refuse to leave out a copy of rows whose bytes are others."""
    for one, other in named.copies:
        if one.num_elems and not is_same(one, other, opened, tied=True):
            names = first_few(dict.fromkeys([one.fqn, other.fqn]))
            what = f"{names}: copies of the same rows in the map, but they differ"
            where = opened.source.root
            raise UsageError(what, where=where, hint="they were trained apart, or the map is of another model")


def is_same(one: TensorEntry, other: TensorEntry, opened: Opened, tied: bool) -> bool:
    """Are the bytes the same? Tensors of one value everywhere (zeros, ones) prove nothing unless the names are tied."""
    for entry in (one, other):
        check_complete(entry)
    if [(c.box, c.span) for c in one.chunks] == [(c.box, c.span) for c in other.chunks]:
        return True  # two names of one item
    itemsize = max(1, one.dtype.num_bytes(1))
    left, right = (read_blocks(opened.resolve(entry), opened.source) for entry in (one, other))
    first: bytes | None = None
    varies = False
    for pair in zip_longest(left, right):
        if None in pair or pair[0][1] != pair[1][1]:
            return False
        content = pair[0][1]
        first = bytes(content[:itemsize]) if first is None else first
        varies = varies or content != memoryview(first * (len(content) // itemsize))
    return varies or (tied and first is not None)
