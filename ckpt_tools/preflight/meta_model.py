"""The model on the meta device, beside the names of a checkpoint. Imports torch: for a process of its own.

`compare` is what `match.look_at_model` calls in a child, and reads the answer of.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpt_tools.description.checkpoint import Checkpoint, TensorEntry
from ckpt_tools.description.dtypes import BY_TORCH_NAME
from ckpt_tools.description.layout import Shard, parse_mesh
from ckpt_tools.errors import CkptError, RefusedConfigError, UsageError
from ckpt_tools.formats.opening import Opened, open_path
from ckpt_tools.formats.table import format_of
from ckpt_tools.fsdp2.names import match_names
from ckpt_tools.fsdp2.ties import tied_groups
from ckpt_tools.placement import Rule, find_tp_plan, place_tensors, tp_plan_rules
from ckpt_tools.preflight.comparison import facts_to_json
from ckpt_tools.preflight.model_classes import build_on_meta
from ckpt_tools.preflight.model_facts import ModelFacts, complete, read_facts, read_values
from ckpt_tools.preflight.names_match import without_peft
from ckpt_tools.preflight.reads import count_reads, reads_to_json
from ckpt_tools.processes.child import build_behind_walls
from ckpt_tools.smoke.hf_recipe import HfRecipe
from ckpt_tools.smoke.recipe import call, loss_of
from ckpt_tools.text import escape_name

_ADAPTER = re.compile(
    r"(^|[._])(lora_(A|B|E|down|up|embedding_[AB]|magnitude_vector|mid)|hada_|lokr_|oft_|boft_|dora_)"
)


def compare(job: Mapping[str, Any]) -> dict[str, object]:
    """Describe the model of a config.json, and hold a checkpoint's names against it.

    Args:
        job: "config": the file or its directory; "checkpoint": a path or None; "mesh": the config's mesh or None;
            "cuts": smaller configs, tried in order when the model has more than "max_elems" parameters.

    Returns:
        "facts" of the model for the rules, and "model", or "unbuilt" with the reason. Of the model: "title",
        "base_prefix", "num_elems", "tensors" (name → dtype, shape, kind: parameter, buffer or transient, a buffer that
        is never saved), "ties" and "trial". Of the checkpoint: "found" (name of the model → dtype, shape and FQNs),
        "left" (FQNs that the model does not have), "adapters" (FQNs), and "reads".

    Raises:
        UnreadableError: No config, or the checkpoint cannot be opened.
        RefusedConfigError: Nothing may be built of the config.
    """
    paths = [path for path in (job["config"], job.get("checkpoint")) if path is not None]
    with ExitStack() as stack:
        facts = read_facts(job["config"])
        values, where = read_values(job["config"])
        opened = stack.enter_context(open_path(job["checkpoint"])) if len(paths) > 1 else None
        cuts = [(path, read_values(path)[0]) for path in job.get("cuts") or ()]
        # All is read. From here on nothing of the model's is opened.
        foreign = tuple(path if os.path.isdir(path) else os.path.dirname(path) for path in paths)
        build_behind_walls(job, subject=f"a {escape_name(facts.architecture or 'model')}", where=where, foreign=foreign)
        facts = complete(facts, build_on_meta(values, where=where))
        return _describe(job, facts, values, opened, cuts)


def _describe(
    job: Mapping[str, Any],
    facts: ModelFacts,
    values: Mapping[str, object],
    opened: Opened | None,
    cuts: Sequence[tuple[str, Mapping[str, object]]],
) -> dict[str, object]:
    told = facts_to_json(facts)
    try:
        with torch.device("meta"):
            model = HfRecipe(values, facts.where).build()
    except RefusedConfigError:
        raise
    except UsageError as error:
        return {"facts": told, "unbuilt": error.what}
    num_elems = _count(model)
    described: dict[str, object] = {
        "title": type(model).__name__,
        "base_prefix": _base_prefix(model),
        "num_elems": num_elems,
        "tensors": _tensors(model),
        "ties": tied_groups(model),
    }
    if opened is not None:
        described |= _match(model, job, values, opened)
    if cuts and num_elems > job["max_elems"]:
        described["trial"] = _try_cuts(cuts, facts.where, job["max_elems"])
    return {"facts": told, "model": described}


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _try_cuts(cuts: Sequence[tuple[str, Mapping[str, object]]], where: str, max_elems: int) -> dict[str, object]:
    """Find the first config that makes a model which is small enough and runs forward and backward by itself."""
    reasons: list[str] = []
    for path, values in cuts:
        try:
            recipe = HfRecipe(values, where)
            with torch.device("meta"):
                num_elems = _count(recipe.build())
            if num_elems > max_elems:
                reasons.append(f"with fewer layers it still has {num_elems / 1e6:.0f} M parameters")
                continue
            torch.manual_seed(0)
            model = recipe.build()
            loss = loss_of(call(model, recipe.batch(model, seed=0)))
            torch.autograd.backward([loss])
        except Exception as error:  # noqa: BLE001 - whatever a model that never was does
            what = error.what if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
            reasons.append(f"cut down it fails by itself: {escape_name(what)}")
            continue
        if math.isfinite(loss.item()):
            return {"path": path, "num_elems": num_elems}
        reasons.append(f"cut down its loss is {loss.item()}")
    return {"path": None, "why": "; ".join(reasons)}


def _base_prefix(model: nn.Module) -> str:
    """Return what transformers adds to, or takes from, the names of a file by itself."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if isinstance(name, str) and name else ""


def _tensors(model: nn.Module) -> dict[str, object]:
    saved = set(model.state_dict(keep_vars=True))
    found: dict[str, object] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = {"dtype": _dtype(parameter), "shape": list(parameter.shape), "kind": "parameter"}
    for name, tensor in model.named_buffers(remove_duplicate=False):
        kind = "buffer" if name in saved else "transient"
        found[name] = {"dtype": _dtype(tensor), "shape": list(tensor.shape), "kind": kind}
    return found


def _dtype(tensor: torch.Tensor) -> str:
    return BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")].name


def _match(model: nn.Module, job: Mapping[str, Any], values: Mapping[str, object], opened: Opened) -> dict[str, object]:
    adapters = [entry.fqn for entry in opened.checkpoint.tensors if _ADAPTER.search(entry.fqn)]
    plain, original = _without_peft(opened.checkpoint, set(adapters))
    names = tuple(model.state_dict(keep_vars=True))
    try:
        wholes, left = match_names(plain, model, names, "auto")
    except UsageError as error:
        return {"refused": {"what": error.what, "hint": error.hint}, "adapters": adapters}
    found = {
        name: {
            "dtype": whole.dtype.name,
            "shape": list(whole.shape),
            "fqns": [original[piece.entry.fqn] for piece in whole.pieces],
        }
        for name, whole in wholes.items()
    }
    used = {piece.entry.fqn for whole in wholes.values() for piece in whole.pieces}
    entries = [entry for entry in plain.tensors if entry.fqn in used]
    return {
        "found": found,
        "left": [original[fqn] for fqn in left],
        "adapters": adapters,
        "reads": _reads(job, values, opened.checkpoint, entries) if entries else None,
    }


def _without_peft(checkpoint: Checkpoint, adapters: set[str]) -> tuple[Checkpoint, dict[str, str]]:
    """Return the base model inside a PEFT model's state dict, and its names → the checkpoint's."""
    original: dict[str, str] = {}
    tensors: list[TensorEntry] = []
    for entry in checkpoint.tensors:
        if entry.fqn in adapters:
            continue
        name = without_peft(entry.fqn)
        if name in original:  # a module that is trained whole is there twice
            continue
        path = entry.path
        if path and isinstance(path[-1], str):
            path = (*path[:-1], without_peft(path[-1]))
        original[name] = entry.fqn
        tensors.append(entry if name == entry.fqn else replace(entry, fqn=name, path=path))
    return replace(checkpoint, tensors=tuple(tensors)), original


def _reads(
    job: Mapping[str, Any], values: Mapping[str, object], checkpoint: Checkpoint, entries: Sequence[TensorEntry]
) -> dict[str, object] | None:
    if job.get("mesh") is None:
        return None
    mesh = parse_mesh(job["mesh"])
    try:
        rules = _tp_rules(values, entries) if mesh.size("tp") > 1 else ()
    except CkptError as error:
        return {"unknown": error.what}
    try:
        placed = place_tensors([entry for entry in entries if math.prod(entry.shape)], mesh, rules)
    except CkptError as error:
        return {"refused": {"what": error.what, "hint": error.hint}}
    placements = {fqn: {a: cut for a, cut in cuts.items() if isinstance(cut, Shard)} for fqn, cuts in placed.items()}
    whole_items = format_of(checkpoint).loads_by_dcp
    return reads_to_json(count_reads(entries, mesh, placements, whole_items=whole_items))


def _tp_rules(values: Mapping[str, object], entries: Sequence[TensorEntry]) -> tuple[Rule, ...]:
    return tp_plan_rules(values, [entry.fqn for entry in entries], find_tp_plan(values))
