"""Losses of the ranks and of the reference: what they are held to, and where no reference can follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ckpt_tools.fsdp2.agree import gather, share
from ckpt_tools.fsdp2.smoke import draws
from ckpt_tools.fsdp2.smoke.reference import Reference
from ckpt_tools.fsdp2.smoke.run import Run
from ckpt_tools.fsdp2.smoke.values import explain_loss
from ckpt_tools.models.recipe import Batch, call

SEED = 20
"""Of the batches; each data-parallel rank adds its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """How far results may be from the reference."""

    loss: float
    """Absolute for losses up to 1, relative beyond."""
    gradient: float
    """Relative, see `checks.GRADIENT_FLOOR`."""


def tolerances_of(run: Run) -> Tolerances:
    """Return what results are held to.

    float32: ranks add up partial sums in another order than one process, which costs some units in the last place
    (2^-24 = 6e-8 each). bfloat16 and float16: products are rounded to 2^-9 and 2^-12 wherever tensor parallelism cuts
    them, and gradients once more when ranks average them; a gradient passes several such roundings.
    """
    precision = run.setting.policy.precision
    dtypes = {parameter.dtype for parameter in run.model.parameters() if parameter.is_floating_point()}
    dtypes |= {dtype for dtype in (precision.param_dtype, precision.reduce_dtype) if dtype is not None}
    if torch.bfloat16 in dtypes:
        return Tolerances(loss=1e-2, gradient=5e-2)
    if torch.float16 in dtypes:
        return Tolerances(loss=5e-3, gradient=3e-2)
    return Tolerances(loss=1e-6, gradient=1e-5)


def base_model(run: Run) -> nn.Module:
    """Return the model without adapters."""
    return run.model.get_base_model() if run.setting.options.lora else run.model  # type: ignore[operator]


def batch_of(run: Run, index: int) -> Batch:
    """Return the batch of a data-parallel rank: the same in every process and for every mesh."""
    return run.blueprint.recipe.batch(base_model(run), SEED + index)


def loss(run: Run) -> str:
    """Compare the loss with the reference's."""
    mean = mean_loss(run.loss)
    run.losses.append(mean)
    run.journal.fact("losses", run.losses)  # on every rank: its watchdog sees it go on
    if not math.isfinite(mean):
        report_not_finite(run, 0, mean)
        return f"{mean}"
    if not run.has_reference:
        return f"{mean:.6f}, not compared"
    expected, why_not = 0.0, ""
    if run.rank == 0:
        run.reference = Reference(run.blueprint, run.device, run.loss_at)
        expected = reference_loss(run, 0)
        if not is_close(run, mean, expected):
            why_not = _why_incomparable(run, run.reference, expected)
        if not why_not:
            check_loss(run, "the first step", mean, expected)
    expected, why_not = share((expected, why_not))
    if why_not:
        run.note(f"losses and gradients are not compared: {why_not}")
        run.reference, run.has_reference = None, False
        return f"{mean:.6f}, not compared"
    return f"{mean:.6f}, the reference {expected:.6f}"


def report_not_finite(run: Run, step: int, value: float) -> None:
    """Say where a loss that is not finite comes from, and what the unsharded model makes of the batches. Collective."""
    what = f"the loss of step {step + 1} is {value}"
    if run.has_reference:
        if run.rank == 0 and run.reference is None:
            run.reference = Reference(run.blueprint, run.device, run.loss_at)
        what += f" (unsharded: {share(reference_loss(run, step)):.6g})"
    draws.seed(run.dp_index, step)
    finding = explain_loss(run.model, what, lambda: call(run.model, run.batch))
    if run.rank == 0:
        run.report(finding)


def _why_incomparable(run: Run, reference: Reference, expected: float) -> str:
    """Say why no reference can follow this model, "" when one can."""
    if run.setting.has_tp and run.has_drawn:
        return "forward draws random numbers, and under tp every rank draws for its own part of a layer"
    reference.forget()
    again = reference_loss(run, 0)
    if is_close(run, again, expected):
        return ""
    return (
        f"two runs of the unsharded model on one batch with the same seeds give {expected:.9g} and {again:.9g}: "
        "it draws from a generator of its own, or remembers its calls outside of its buffers"
    )


def reference_loss(run: Run, step: int) -> float:
    """Run the reference on every rank's batch; rank 0 only. Leaves its gradients there."""
    if run.reference is None:
        return math.nan
    batches = [batch_of(run, index) for index in range(run.setting.dp_size)]
    found = run.reference.losses(batches, step)
    return sum(found) / len(found)


def mean_loss(own: torch.Tensor | None) -> float:
    """Return the mean over data-parallel ranks. Collective."""
    values = gather(math.nan if own is None else float(own.detach()))
    return sum(values) / len(values)


def is_close(run: Run, value: float, expected: float) -> bool:
    """Are two losses the same within what rounding explains?"""
    if math.isnan(value) and math.isnan(expected):  # "not-finite" says that
        return True
    return _difference(value, expected) <= tolerances_of(run).loss


def _difference(value: float, expected: float) -> float:
    return abs(value - expected) / max(1.0, abs(expected))


def check_loss(run: Run, where: str, value: float, expected: float) -> None:
    """Report on rank 0, which has both, a loss that is not the reference's."""
    if run.rank:
        return
    run.reference_losses.append(expected)
    run.fact("reference_losses", run.reference_losses)
    if not is_close(run, value, expected):
        allowed = f"{_difference(value, expected):.1e} off, allowed {tolerances_of(run).loss:.0e}"
        what = f"{value:.9g}, the unsharded reference has {expected:.9g} ({allowed})"
        run.error("wrong-loss", where, what, "does every rank run the whole of forward, and nothing outside of it?")
