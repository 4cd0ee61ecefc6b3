"""Reload what was saved: on the same ranks, and by a world of another size."""

from __future__ import annotations

import math

import torch
from torch import nn

from ckpt_tools.fsdp2 import load_optimizer
from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.fsdp2.mesh import TP_AXIS
from ckpt_tools.smoke.blueprint import Blueprint
from ckpt_tools.smoke.checks import MAX_FINDINGS, differing_states, differing_tensors
from ckpt_tools.smoke.messages import Saved
from ckpt_tools.smoke.phases import apply_sharding, evaluate, tolerances_of
from ckpt_tools.smoke.reference import make_optimizer
from ckpt_tools.smoke.report import ReloadResult
from ckpt_tools.smoke.run import Run

_HINT = "does the model keep state that is in no parameter and no buffer?"


def _load_saved(run: Run, saved: Saved) -> nn.Module:
    """Build the model anew, shard it, and load what was saved."""
    model = run.blueprint.build()
    apply_sharding(run, model)
    run.blueprint.load_saved(model, saved.path)
    run.report(*audit(model, phase="loaded", plan=run.plan))
    return model


def same_world(run: Run) -> str:
    """Reload on the same ranks: every byte of parameters and optimizer state, and the loss."""
    model = _load_saved(run, run.saved)
    for name in differing_tensors(run.model, model)[:MAX_FINDINGS]:
        run.error("wrong-reload", name, "not bitwise what it was when it was saved", _HINT)
    optimizer = make_optimizer(model, foreach=False if run.setting.has_tp else None)
    load_optimizer(model, optimizer, run.saved.path)
    wrong = differing_states(run.optimizer, optimizer)
    if wrong:
        run.error("wrong-reload", "the optimizer", f"{wrong} tensors of its state are not bitwise what they were")
    # The first model has done its part; a second one that is loaded needs its memory.
    return _judge(run, "reload_same_world", evaluate(run, model), run.saved)


def other_world(run: Run, *, saved: Saved) -> str:
    """Reload on the ranks of this world, which are not those that saved."""
    recipe = run.setting.recipe_of(saved.num_layers)
    run.blueprint = Blueprint(setting=run.setting, recipe=recipe, source=saved.source)
    run.model = _load_saved(run, saved)
    return _judge(run, "reload_other_world", evaluate(run, run.model), saved)


def _judge(run: Run, fact: str, value: float, saved: Saved) -> str:
    """Compare the loss with that of the save, and report both.

    Every rank computes the same batch with the same whole parameters, in the same order: on a CPU the losses are the
    same number. Under another tensor-parallel cut, and on GPUs, partial sums may be added in another order.
    """
    bitwise = value == saved.loss
    is_exact = saved.tp == run.setting.mesh.size(TP_AXIS) and run.device.type == "cpu"
    tolerance = 0.0 if is_exact else tolerances_of(run).loss
    ok = bitwise or abs(value - saved.loss) <= tolerance * max(1.0, abs(saved.loss))
    if run.rank == 0:
        result = ReloadResult(ok=ok, mesh=str(run.setting.mesh), loss=value, saved_loss=saved.loss, bitwise=bitwise)
        if math.isfinite(value) and math.isfinite(saved.loss):
            run.journal.fact(fact, result)
        if not ok:
            what = f"{value!r} after the reload, {saved.loss!r} when it was saved"
            run.error("wrong-reload", "the loss", what, _HINT)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return f"{run.setting.mesh}: loss {value:.6f}, {'bitwise the same' if bitwise else f'saved {saved.loss:.6f}'}"
