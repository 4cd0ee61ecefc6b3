"""The model on the meta device, and the names of a checkpoint. Imports torch: for a process of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import torch
from torch import nn

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.table import format_of
from ckpt_tools.checkpoint.layout import Mesh, Shard
from ckpt_tools.checkpoint.names import is_factor
from ckpt_tools.errors import CkptError, RefusedConfigError, UsageError
from ckpt_tools.fsdp2.names import match_names, settle_names, shapes_of
from ckpt_tools.fsdp2.ties import tied_groups
from ckpt_tools.models.config import ModelConfig
from ckpt_tools.models.recipe import call, find_loss, loss_of
from ckpt_tools.models.recipe_of import recipe_of
from ckpt_tools.preflight.model_comparison import (
    MAX_ELEMS,
    Comparison,
    FoundTensor,
    Kind,
    ModelQuestion,
    ModelTensor,
    ModelView,
    Reads,
    Trial,
    count_reads,
)
from ckpt_tools.preflight.model_facts import ModelFacts, checked_config, read_facts
from ckpt_tools.preflight.names_match import without_peft
from ckpt_tools.sandbox.child import Here, build_in_sandbox
from ckpt_tools.text import escape_name
from ckpt_tools.transfer.placement.place import place_tensors
from ckpt_tools.transfer.placement.rule import Rule
from ckpt_tools.transfer.placement.tp_plan import find_tp_plan, tp_plan_rules

EMBEDDINGS = ("get_input_embeddings", "get_output_embeddings")


def compare(look: ModelQuestion, here: Here) -> ModelView:
    """Describe the model of a config.json, and match a checkpoint's names with it; see `checked_config`."""
    paths = [path for path in (look.config, look.checkpoint) if path is not None]
    with ExitStack() as stack:
        config = checked_config(look.config)
        facts = read_facts(look.config)
        opened = None if look.checkpoint is None else stack.enter_context(open_path(look.checkpoint, as_part=True))
        cuts = [(path, checked_config(path)) for path in look.cuts]
        # All is read. From here on nothing of the model's is opened.
        foreign = tuple(path if os.path.isdir(path) else os.path.dirname(path) for path in paths)
        subject = f"a {facts.architecture or 'model'}"
        with suppress(Exception):  # what is missing or broken is told when it is built
            recipe_of(config.values, config.where)  # which imports the model's class
        build_in_sandbox(here, subject=subject, where=config.where, foreign=foreign)
        return _describe(look, facts, config, opened, cuts)


def _describe(
    look: ModelQuestion,
    facts: ModelFacts,
    config: ModelConfig,
    opened: Opened | None,
    cuts: Sequence[tuple[str, ModelConfig]],
) -> ModelView:
    # Classes and names of modules are those of the plain model, which is none that can be trained from these weights.
    plain = {key: value for key, value in config.values.items() if key != "quantization_config"}
    try:
        with torch.device("meta"):
            model = recipe_of(plain, config.where).build()
        facts = _completed(facts, model)
        recipe_of(config.values, config.where)
    except RefusedConfigError:
        raise
    except UsageError as error:
        return ModelView(facts=facts, why_not=error.what)
    num_elems = _count(model)
    prefix = getattr(model, "base_model_prefix", "")
    comparison = Comparison(
        title=type(model).__name__,
        base_prefix=f"{prefix}." if isinstance(prefix, str) and prefix else "",
        num_elems=num_elems,
        tensors=_tensors(model),
        ties=tied_groups(model),
    )
    reads = None
    if opened is not None:
        comparison, reads = _match(comparison, model, look.mesh, config, opened)
    if cuts and num_elems > MAX_ELEMS:
        comparison = replace(comparison, trial=_try_cuts(cuts, config.where))
    return ModelView(facts=facts, comparison=comparison, reads=reads)


def _completed(facts: ModelFacts, model: nn.Module) -> ModelFacts:
    """Return facts with what the built model shows in place of what the config says."""
    ends = [getattr(getattr(model, name, lambda: None)(), "weight", None) for name in EMBEDDINGS]
    return replace(
        facts,
        blocks=tuple(sorted(getattr(model, "_no_split_modules", None) or ())) or facts.blocks,
        module_classes=tuple(dict.fromkeys(type(module).__name__ for module in model.modules())),
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        tied_embeddings=ends[0] is not None and ends[0] is ends[1],
    )


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _try_cuts(cuts: Sequence[tuple[str, ModelConfig]], where: str) -> Trial:
    """Find the first config that makes a model which is small enough and runs forward and backward by itself."""
    reasons: list[str] = []
    for path, cut in cuts:
        try:
            recipe = recipe_of(cut.values, where)
            with torch.device("meta"):
                num_elems = _count(recipe.build())
            if num_elems > MAX_ELEMS:
                reasons.append(f"with fewer layers it still has {num_elems / 1e6:.0f} M parameters")
                continue
            torch.manual_seed(0)
            model = recipe.build()
            output = call(model, recipe.batch(model, seed=0))
            loss = loss_of(output, find_loss(output))
            torch.autograd.backward([loss])
        except Exception as error:  # noqa: BLE001 - whatever a model that never was does
            what = error.what if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
            reasons.append(f"cut down it fails by itself: {escape_name(what)}")
            continue
        if math.isfinite(loss.item()):
            return Trial(path=path, num_elems=num_elems)
        reasons.append(f"cut down its loss is {loss.item()}")
    return Trial(path=None, why="; ".join(reasons))


def _tensors(model: nn.Module) -> dict[str, ModelTensor]:
    saved = set(model.state_dict(keep_vars=True))
    found: dict[str, ModelTensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = ModelTensor(dtype=_dtype(parameter), shape=tuple(parameter.shape), kind="parameter")
    for name, tensor in model.named_buffers(remove_duplicate=False):
        kind: Kind = "buffer" if name in saved else "transient"
        found[name] = ModelTensor(dtype=_dtype(tensor), shape=tuple(tensor.shape), kind=kind)
    return found


def _dtype(tensor: torch.Tensor) -> str:
    return BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")].name


def _match(
    comparison: Comparison, model: nn.Module, mesh: Mesh | None, config: ModelConfig, opened: Opened
) -> tuple[Comparison, Reads | None]:
    """Return the comparison with what the checkpoint has for the model, and what ranks read of it."""
    adapters = tuple(entry.fqn for entry in opened.checkpoint.tensors if is_factor(entry.fqn))
    comparison = replace(comparison, adapters=adapters)
    plain, original = _without_peft(opened.checkpoint, set(adapters))
    try:
        match = match_names(plain, model, shapes_of(model.state_dict(keep_vars=True)), "auto")
    except UsageError as error:
        return replace(comparison, refused=(error.what, error.hint)), None
    found = {
        name: FoundTensor(
            dtype=whole.dtype.name,
            shape=tuple(whole.shape),
            fqns=tuple(original[source] for source in whole.mosaic.sources),
        )
        for name, whole in match.found.items()
    }
    used = {source for whole in match.found.values() for source in whole.mosaic.sources}
    entries = [entry for entry in plain.tensors if entry.fqn in used]
    reads = _reads(mesh, config.values, opened.checkpoint, entries) if mesh is not None and entries else None
    names = [name for name, tensor in comparison.tensors.items() if name in found or tensor.kind != "transient"]
    told = {name for group in comparison.ties if not found.keys().isdisjoint(group) for name in group}
    absent = [name for name in names if name not in found and name not in told]
    contract = settle_names(model, opened.identity.architecture, match, absent, names)
    left = tuple(original[fqn] for fqn in match.left)
    return replace(comparison, found=found, left=left, contract=contract), reads


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


def _reads(mesh: Mesh, values: Mapping[str, object], checkpoint: Checkpoint, entries: Sequence[TensorEntry]) -> Reads:
    rules: tuple[Rule, ...] = ()
    try:
        if mesh.size("tp") > 1:
            rules = tp_plan_rules(values, [entry.fqn for entry in entries], find_tp_plan(values))
    except CkptError as error:
        return Reads(unknown=error.what)
    try:
        placed = place_tensors([entry for entry in entries if math.prod(entry.shape)], mesh, rules)
    except CkptError as error:
        return Reads(refused=(error.what, error.hint))
    placements = {
        fqn: {a: cut for a, cut in cuts.items() if isinstance(cut, Shard)} for fqn, cuts in placed.placements.items()
    }
    whole_items = format_of(checkpoint).loads_by_dcp
    return Reads(ranks=count_reads(entries, mesh, placements, whole_items=whole_items))
