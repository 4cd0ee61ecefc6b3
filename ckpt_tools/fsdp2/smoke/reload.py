"""Reload what was saved: on the same ranks, and by a world of another size."""

from __future__ import annotations

import math

import torch
from torch import nn

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.fsdp2 import load_optimizer
from ckpt_tools.fsdp2.agree import share
from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.fsdp2.mesh import TP_AXIS
from ckpt_tools.fsdp2.smoke.blueprint import Blueprint
from ckpt_tools.fsdp2.smoke.checks import differing_states, differing_tensors, varying_buffers
from ckpt_tools.fsdp2.smoke.losses import tolerances_of
from ckpt_tools.fsdp2.smoke.messages import Saved
from ckpt_tools.fsdp2.smoke.phases import apply_sharding, evaluate
from ckpt_tools.fsdp2.smoke.reference import make_optimizer
from ckpt_tools.fsdp2.smoke.report import ReloadResult
from ckpt_tools.fsdp2.smoke.run import Run
from ckpt_tools.text import first_few

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
    varying = varying_buffers(run.model)
    if varying:
        run.note(
            f"{len(varying)} buffers are not the same on all ranks ({first_few(varying)}): the checkpoint has "
            "rank 0's, and only rank 0 compared them after the reload"
        )
    run.report(
        *(
            Finding.error("wrong-reload", name, "not bitwise what it was when it was saved", _HINT)
            for name in differing_tensors(run.model, model)
            if not (run.rank and name in varying)
        )
    )
    optimizer = make_optimizer(model, foreach=False if run.setting.has_tp else None)
    load_optimizer(model, optimizer, run.saved.path)
    wrong = differing_states(run.optimizer, optimizer)
    if wrong:
        run.error("wrong-reload", "the optimizer", f"{wrong} tensors of its state are not bitwise what they were")
    # The first model has done its part; a second one that is loaded needs its memory.
    return _judge(run, "reload_same_world", model, run.saved)


def other_world(run: Run, *, saved: Saved) -> str:
    """Reload on the ranks of this world, which are not those that saved."""
    recipe = run.setting.recipe_of(saved.num_layers)
    recipe.keeps_dropout &= saved.tp == 1
    run.loss_at = saved.loss_at
    run.blueprint = Blueprint(setting=run.setting, recipe=recipe, source=saved.source)
    run.model = _load_saved(run, saved)
    return _judge(run, "reload_other_world", run.model, saved)


def _judge(run: Run, fact: str, model: nn.Module, saved: Saved) -> str:
    """Compare the loss with that of the save, and report both.

    Every rank computes the same batch with the same whole parameters, in the same order: on a CPU the losses are the
    same number. Under another tensor-parallel cut, and on GPUs, partial sums may be added in another order.
    """
    value = evaluate(run, model)
    bitwise = value == saved.loss
    is_same_cut = saved.tp == run.setting.mesh.size(TP_AXIS)
    tolerance = 0.0 if is_same_cut and run.device.type == "cpu" else tolerances_of(run).loss
    ok = bitwise or abs(value - saved.loss) <= tolerance * max(1.0, abs(saved.loss))
    # Rank 0 decides for all: running a model is collective, and only its buffers are those of the checkpoint.
    if not share(ok) and ((run.has_drawn and not is_same_cut) or share(evaluate(run, model) != value)):
        run.note(
            f"the loss after the reload on {run.setting.mesh} is not compared: two runs of this model do not agree"
        )
        return f"{run.setting.mesh}: loss {value:.6f}, not compared"
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
