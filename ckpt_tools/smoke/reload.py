"""Reload what was saved: on the same ranks, and by a world of another size."""

from __future__ import annotations

import math

import torch
from torch import nn

from ckpt_tools.fsdp2 import load_optimizer
from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.smoke.blueprint import Blueprint
from ckpt_tools.smoke.checks import MAX_FINDINGS, differing_states, differing_tensors
from ckpt_tools.smoke.phases import apply_sharding, evaluate, tolerances_of
from ckpt_tools.smoke.reference import make_optimizer
from ckpt_tools.smoke.report import ReloadResult
from ckpt_tools.smoke.run import Run

_HINT = "does the model keep state that is in no parameter and no buffer?"


def load_saved(run: Run, path: str) -> nn.Module:
    """Build the model anew, shard it, and load what was saved."""
    model = run.blueprint.build()
    apply_sharding(run, model)
    run.blueprint.load_saved(model, path)
    run.report(*audit(model, phase="loaded", plan=run.plan))
    return model


def same_world(run: Run) -> str:
    """Reload on the same ranks: every byte of parameters and optimizer state, and the loss."""
    model = load_saved(run, run.saved_path)
    for name in differing_tensors(run.model, model)[:MAX_FINDINGS]:
        run.error("wrong-reload", name, "not bitwise what it was when it was saved", _HINT)
    optimizer = make_optimizer(model, foreach=False if run.setting.has_tp else None)
    load_optimizer(model, optimizer, run.saved_path)
    wrong = differing_states(run.optimizer, optimizer)
    if wrong:
        run.error("wrong-reload", "the optimizer", f"{wrong} tensors of its state are not bitwise what they were")
    # The first model has done its part; a second one that is loaded needs its memory.
    value = evaluate(run, model)
    return judge(run, "reload_same_world", value, run.saved_loss, is_exact=True)


def other_world(run: Run, path: str, saved_loss: float, *, is_exact: bool) -> str:
    """Reload on the ranks of this world, which are not those that saved."""
    run.model = load_saved(run, path)
    value = evaluate(run, run.model)
    return judge(run, "reload_other_world", value, saved_loss, is_exact=is_exact)


def judge(run: Run, fact: str, value: float, saved: float, *, is_exact: bool) -> str:
    """Compare the loss with that of the save, and report both.

    Every rank computes the same batch with the same whole parameters, in the same order: on a CPU the losses are the
    same number. Under another tensor-parallel cut, and on GPUs, partial sums may be added in another order.
    """
    bitwise = value == saved
    tolerance = 0.0 if is_exact and run.device.type == "cpu" else tolerances_of(run).loss
    ok = bitwise or abs(value - saved) <= tolerance * max(1.0, abs(saved))
    if run.rank == 0:
        result = ReloadResult(ok=ok, mesh=str(run.setting.mesh), loss=value, saved_loss=saved, bitwise=bitwise)
        if math.isfinite(value) and math.isfinite(saved):
            run.journal.fact(fact, result)
        if not ok:
            run.error("wrong-reload", "the loss", f"{value!r} after the reload, {saved!r} when it was saved", _HINT)
    _free(run.device)
    return f"{run.setting.mesh}: loss {value:.6f}, {'bitwise the same' if bitwise else f'saved {saved:.6f}'}"


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rebuild(run: Run, source: str, num_layers: int | None) -> str:
    """Build the model that another world has saved."""
    recipe = run.setting.recipe
    if num_layers is not None:
        recipe = recipe.shallower(num_layers) or recipe
    run.blueprint = Blueprint(setting=run.setting, recipe=recipe, source=source)
    return recipe.title
