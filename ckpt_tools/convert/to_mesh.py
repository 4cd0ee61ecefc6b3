"""Jobs that end in a DCP checkpoint for a mesh: `shard` and `reshard`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.dcp_placing import place
from ckpt_tools.checkpoint.formats.dcp_safetensors import notes_on_loading, place_sharded
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.globs import NameIndex, Names
from ckpt_tools.checkpoint.layout import Layout, Placement, Shard, parse_mesh
from ckpt_tools.checkpoint.transform import is_optimizer, rename, select, strip_wrappers
from ckpt_tools.convert.check_names import warn_of_ties
from ckpt_tools.convert.find_model import name_again, shown_again, with_zeros
from ckpt_tools.convert.job import Job, cast_target, check_whole, notes_on, shown_names
from ckpt_tools.errors import UsageError
from ckpt_tools.models.config import config_beside
from ckpt_tools.models.output_names import Named, Naming
from ckpt_tools.options.common import MeshOptions
from ckpt_tools.options.convert import ConvertOptions
from ckpt_tools.storage.locations import open_source
from ckpt_tools.storage.source import read_named_file
from ckpt_tools.text import first_few
from ckpt_tools.transfer.placement.place import cut_entry, parse_rules, parse_set, place_tensors
from ckpt_tools.transfer.placement.rule import Rule
from ckpt_tools.transfer.placement.tp_plan import auto_plan, tp_plan_rules

_Own = Mapping[str, str]
_MAX_RULES_BYTES = 16 << 20


def find_layout(opened: Opened, checkpoint: Checkpoint, options: MeshOptions, sources: _Own | None = None) -> Layout:
    """Apply mesh and rules to the tensors of `checkpoint`, by their names there and in the source.

    Optimizer state that no rule names is placed like its parameter.
    """
    rules = [parse_set(text) for text in options.set]
    mesh = options.mesh
    if options.rules is not None:
        path = os.fspath(options.rules)
        rule_set = parse_rules(_read_text(path), where=path, world_size=options.world_size)
        rules += rule_set.rules
        mesh = mesh or rule_set.mesh
    if mesh is None:
        raise UsageError("no mesh is given", hint="add for example --mesh dp_shard=8")
    mesh = parse_mesh(mesh, world_size=options.world_size)
    if options.assets is not None and options.tp_plan is None:
        raise UsageError("--assets only provides the config.json for --tp-plan, not given", hint="add --tp-plan auto")
    if options.tp_plan is not None:
        if options.tp_plan != "auto":
            raise UsageError(f"{options.tp_plan!r} is not a plan", hint="--tp-plan takes auto")
        own = nullcontext(opened.asset_source or opened.source)
        with own if options.assets is None else open_source(os.fspath(options.assets)) as companions:
            config = config_beside(companions)
        if config is None:
            hint = "pass --assets DIR with the model's directory, or write the rules yourself with --rules"
            raise UsageError("--tp-plan auto needs the model's config.json", where=companions.root, hint=hint)
        plan = auto_plan(config.values, os.path.abspath(companions.root))
        rules += tp_plan_rules(config.values, [entry.fqn for entry in checkpoint.tensors], plan)
    names = shown_names(checkpoint.tensors, sources or {})
    layout = place_tensors(checkpoint.tensors, mesh, rules, uneven=options.tp_uneven, names=names)
    like_parameters = _like_parameters(checkpoint.tensors, rules, names, layout.placements)
    return replace(layout, placements={**layout.placements, **like_parameters})


def _notes(layout: Layout) -> Iterator[str]:
    if layout.kept_whole:
        axes = "×".join(dict.fromkeys(axis for found in layout.kept_whole.values() for axis in found))
        names = first_few(list(layout.kept_whole), 4)
        yield f"replicated on {axes}, which does not divide them (--tp-uneven replicate): {names}"


def _warnings(layout: Layout) -> Iterator[str]:
    """Say that no rule cuts along tp, and which parameters stock PyTorch does not load into what transformers has cut.

    Source: PyTorch 2.13, whose `DTensor.__create_chunk_list__` describes a `_StridedShard` by its first offset and its
    size, as if it were one run; transformers 5.23 redistributes these tensors before it saves or loads.
    """
    size, is_cut = layout.mesh.size("tp"), any(isinstance(p.get("tp"), Shard) for p in layout.placements.values())
    if size > 1 and not is_cut:
        text = f"nothing is cut along tp: each of its {size} ranks has every tensor as if there were no tp"
        yield f"{text}. --tp-plan auto cuts by the model's own plan; --set and --rules by yours"
    elif layout.packed:
        names = first_few(list(layout.packed), 4)
        yield (
            f"packed tensors ({names}): a model that transformers cuts with tp_plan='auto' has a part of each of their "
            "matrices on every rank, and dcp.load reads other rows into them, without an error. Load with "
            "ckpt_tools.fsdp2.load_checkpoint, or redistribute them to Shard before dcp.load and back after it"
        )


def _other_in_ranks(named: Named, layout: Layout, names: Mapping[str, str]) -> Iterator[str]:
    """Warn of tensors that transformers joins or splits along the dim that tp cuts.

    It cuts what lies in the files, and joins the parts: a rank has other rows than the DTensor in the live model says,
    and whatever loads by that (dcp.load, load_checkpoint) gives it others than `from_pretrained`. Two matrices that lie
    side by side are what a packed style is for.

    Source: transformers 5.23, where `DtensorShardOperation` comes before the conversions of `core_model_loading`.
    """
    spans = {(c.span.file, c.span.offset, c.span.nbytes) for entry in named.apart for c in entry.chunks}
    found = []
    for entry in named.checkpoint.tensors:
        fqn = names.get(entry.fqn)
        cut = None if fqn is None else layout.placements[fqn].get("tp")
        if entry.fqn in named.sources or not isinstance(cut, Shard) or layout.mesh.size("tp") == 1:
            continue
        starts = {chunk.box.offsets[cut.dim] for chunk in entry.chunks}
        is_whole = all((c.span.file, c.span.offset, c.span.nbytes) in spans for c in entry.chunks)
        if fqn in layout.packed:  # it cuts each matrix in one run where experts lie one by one, else in several
            others = [dim for dim in range(len(entry.shape)) if dim != cut.dim]
            one_by_one = all(any(c.box.sizes[d] < entry.shape[d] for d in others) for c in entry.chunks)
            meant = one_by_one and starts == {0, entry.shape[cut.dim] // 2}
        else:
            meant = len(starts) == 1
        if not (is_whole and meant):
            found.append(entry.fqn)
    if found:
        yield (
            f"transformers joins or splits {first_few(found, 4)} along the dim that tp cuts, after it has cut them: "
            "its ranks have other rows there than any checkpoint gives them. Load these by from_pretrained"
        )


def _like_parameters(
    tensors: Iterable[TensorEntry],
    rules: Sequence[Rule],
    names: Names,
    placements: Mapping[str, Mapping[str, Placement]],
) -> dict[str, Mapping[str, Placement]]:
    """Return the placements of optimizer state, taken from the parameter that its FQN contains."""
    entries = tuple(tensors)
    states = {entry.fqn for entry in entries if is_optimizer(entry)}
    if not states:
        return {}
    index = NameIndex(names)
    ruled = set().union(*(rule.find(index) for rule in rules))
    parameters: dict[str, TensorEntry] = {}
    for entry in entries:
        if entry.fqn not in states:
            parts = strip_wrappers(entry.fqn).split(".")
            for start in range(min(3, len(parts))):  # with and without a root such as `model.`
                parameters.setdefault(".".join(parts[start:]), entry)
    found: dict[str, Mapping[str, Placement]] = {}
    for entry in entries:
        if entry.fqn not in states or entry.fqn in ruled:
            continue
        parts = strip_wrappers(entry.fqn).split(".")[:-1]  # without exp_avg
        for start in range(len(parts)):
            parameter = parameters.get(".".join(parts[start:]))
            if parameter is not None and parameter.shape == entry.shape:
                found[entry.fqn] = placements[parameter.fqn]
                break
    return found


def _read_text(path: str) -> str:
    hint = "--rules takes a YAML file"
    content = read_named_file(path, what="the rules", max_bytes=_MAX_RULES_BYTES, refusal=UsageError, hint=hint)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the rules are not UTF-8 text: {error}", where=path, hint=hint) from None


def _find_layout(opened: Opened, checkpoint: Checkpoint, named: Named, options: MeshOptions, names: _Own) -> Layout:
    """Return `find_layout`; a plan that does not fit the names is refused with the reason why they were kept."""
    try:
        return find_layout(opened, checkpoint, options, names)
    except UsageError as error:
        is_of_plan = type(error) is UsageError and options.tp_plan is not None
        if not is_of_plan or named.map is not None or not named.note:
            raise
        raise UsageError(f"{error.what} ({named.note})", where=error.where, hint=error.hint) from error


def sharding_job(
    opened: Opened, options: ConvertOptions, *, named: Named | None = None, root: str = "", layout: Layout | None = None
) -> Job:
    """Return the job that writes `opened`, cut as `options` say.

    `named` has its tensors by other names; `root` is a prefix that the names had without being part of them.
    """
    origin, notes = opened.origin, notes_on(opened)
    if named is None:
        named = Named.as_it_is(opened.checkpoint)
        prefix = options.prefix
        origin = None if origin is None else replace(origin, prefix=prefix + origin.prefix)
    else:
        opened, prefix = with_zeros(opened, named), options.prefix + root
        origin = None if origin is None else replace(origin, prefix=prefix, map=named.map)
        notes += [named.note] if named.note else []
    shown = {fqn: (prefix + fqn, source) for fqn, source in named.sources.items()}
    chosen = select(named.checkpoint, include=options.include, exclude=options.exclude, also=shown)
    renamed = rename(chosen, lambda fqn: prefix + fqn) if prefix else chosen
    kept = {old.fqn: new.fqn for new, old in zip(renamed.tensors, chosen.tensors, strict=True)}
    names = {new: named.sources.get(old, "") for old, new in kept.items()}
    layout = layout or _find_layout(opened, renamed, named, options, names)
    source = replace(renamed, tensors=tuple(map(opened.resolve, opened.ahead(renamed.tensors))))
    aliases = {prefix + alias: kept[fqn] for alias, fqn in named.aliases.items() if fqn in kept}
    in_safetensors = options.serialization == "safetensors"
    if in_safetensors:  # where two names cannot have one item, each has its own bytes
        entries = {entry.fqn: entry for entry in source.tensors}
        copies = (replace(entries[fqn], fqn=alias, path=()) for alias, fqn in aliases.items())
        source = replace(source, tensors=(*source.tensors, *copies))
        own = {alias: layout.placements[fqn] for alias, fqn in aliases.items()}
        layout = replace(layout, placements={**layout.placements, **own})
        names |= {alias: names[fqn] for alias, fqn in aliases.items()}
        aliases = {}
    target, cast = cast_target(opened, source, options.dtype, options.dtype_for, names, opened.own_assets)
    notes += cast
    origin = origin if target is source and chosen is named.checkpoint else None
    check_whole(opened, opened.own_assets, source.tensors, names, named.apart, bool(origin and not in_safetensors))
    cells = {entry.fqn: cut_entry(entry, layout.mesh, layout.placements[entry.fqn]).cells for entry in target.tensors}
    heads: Mapping[str, bytes] = {}
    if in_safetensors:
        placed, heads = place_sharded(target.tensors, cells, source.blobs)
        notes += notes_on_loading(target.tensors, os.fspath(options.destination))
    else:
        placed = place(target.tensors, cells, source.blobs)
    ties = warn_of_ties(chosen.tensors, opened.assets, opened)
    return Job(
        opened=opened,
        source=source,
        target=placed,
        destination=os.fspath(options.destination),
        heads=heads,
        assets=opened.assets,
        dtype=options.dtype,
        names=names,
        aliases=aliases,
        apart=named.apart,
        origin=origin,
        mesh=layout.mesh,
        placements=layout.placements,
        notes=[*notes, *_notes(layout)],
        warnings=(*_warnings(layout), *ties, *(_other_in_ranks(named, layout, kept) if options.tp_plan else ())),
    )


def resharding_job(opened: Opened, options: ConvertOptions, naming: Naming) -> Job:
    """Return the job that writes `opened`, cut as `options` say, and by the names of `naming` if it asks for some."""
    if naming.names == "auto":
        return sharding_job(opened, options)
    notes: list[str] = []
    also = shown_again(opened, naming, options.prefix) if options.include or options.exclude else {}
    chosen = select(opened.checkpoint, include=options.include, exclude=options.exclude, also=also)
    if chosen is not opened.checkpoint:
        check_whole(opened, opened.own_assets, chosen.tensors, {})
        opened = replace(opened, checkpoint=chosen, origin=None)
    named, root = name_again(opened, naming, notes)
    if opened.companions:  # of a step that the result is not
        notes.append(f"left out the files beside the weights: {first_few([asset.file for asset in opened.companions])}")
        opened = replace(opened, companions=())
    job = sharding_job(opened, replace(options, include=(), exclude=()), named=named, root=root)
    job.notes += notes
    return job
