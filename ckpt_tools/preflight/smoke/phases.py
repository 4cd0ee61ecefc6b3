"""The phases from the built model to the saved checkpoint, in the order of `report.PHASES`. Every one is collective."""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.names import group_names, origins_of
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2 import LoadReport, clip_grad_norm, load_optimizer, save_checkpoint, shard_model
from ckpt_tools.fsdp2.audit import audit
from ckpt_tools.fsdp2.collective import from_rank0, gather, share
from ckpt_tools.fsdp2.compare_ranks import compare_ranks
from ckpt_tools.fsdp2.internals import alone
from ckpt_tools.fsdp2.mesh import TP_AXIS
from ckpt_tools.fsdp2.watch import watch
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.models.recipe import Batch, call, find_loss, loss_of
from ckpt_tools.preflight.smoke import blueprint as blueprints, checks, rng
from ckpt_tools.preflight.smoke.blueprint import Blueprint, other_tensors
from ckpt_tools.preflight.smoke.checks import explain_loss
from ckpt_tools.preflight.smoke.launcher import free_memory
from ckpt_tools.preflight.smoke.messages import SavedWorld
from ckpt_tools.preflight.smoke.rank_run import RankRun, Skipped
from ckpt_tools.preflight.smoke.reference import Reference, make_optimizer, on_device
from ckpt_tools.preflight.smoke.report import RankMemory, ReloadResult
from ckpt_tools.text import escape_name, first_few
from ckpt_tools.units import format_number, format_size

NORM_TOLERANCE = 1e-4  # Relative, of the norm of all gradients
MAX_NORM = 0.1  # Gradients are clipped to this norm, which untrained models exceed


def build(run: RankRun) -> str:
    """Decide how much of the model is tried, and build it on meta."""
    fit = from_rank0(
        lambda: blueprints.find_fit(
            run.setting,
            num_copies=run.world_size,
            is_local=run.device.type == "cpu" and run.is_local,
            free_bytes=run.setting.options.memory_bytes or free_memory(run.device),
            workdir=run.directory,
        )
    )
    run.has_reference = fit.has_reference
    run.num_layers = fit.num_layers
    recipe = run.setting.recipe_of(fit.num_layers)
    run.note(*fit.notes)
    if not recipe.keeps_dropout:
        run.note("dropout is off: under tp every rank draws for its own part of a layer, which no reference can repeat")
    source = run.setting.options.source
    source = None if source is None else os.path.abspath(source)
    if source is None:
        source = os.path.join(run.directory, "random")
        from_rank0(partial(blueprints.write_random, recipe, source))
        run.note("no checkpoint is loaded: the weights are random")
    run.blueprint = Blueprint(setting=run.setting, recipe=recipe, source=source, on_cpu=bool(fit.why_cpu))
    run.model = _build(run, fit.why_cpu)
    run.report(*audit(run.model, phase="built"))
    run.report(*compare_ranks(run.model))
    count = sum(parameter.numel() for parameter in run.model.parameters())
    run.fact("model", recipe.title)
    return f"{recipe.title}, {_millions(count)} parameters"


def _build(run: RankRun, why_cpu: str) -> nn.Module:
    """Build the model, on the CPU of every rank where meta makes another one or none; and say so."""
    options, begun = run.setting.options, time.perf_counter()
    model = run.blueprint.build_base()
    if not why_cpu and options.build == "auto" and options.factory and (why_cpu := other_tensors(model, run.blueprint)):
        run.blueprint = replace(run.blueprint, on_cpu=True)
        model = run.blueprint.build_base()
    if why_cpu and options.quantize is not None:
        hint = "drop --quantize, or change what the model does in __init__"
        raise UsageError(f"--quantize needs a model that is built on meta: {why_cpu}", where="--quantize", hint=hint)
    if why_cpu:
        size = format_size(sum(parameter.nbytes for parameter in model.parameters()))
        run.note(f"built on the CPU of every rank ({size}, {time.perf_counter() - begun:.1f} s): {why_cpu}")
    return run.blueprint.adapted(model)


def _millions(count: int) -> str:
    if count < 1e5:
        return str(count)
    return f"{count / 1e6:.1f} M" if count < 1e9 else f"{count / 1e9:.1f} B"


def apply_sharding(run: RankRun, model: nn.Module) -> None:
    """Shard `model` as the setting says."""
    recipe = run.blueprint.recipe
    base = model.get_base_model() if run.setting.options.lora else model  # type: ignore[operator]
    run.plan = shard_model(
        model,
        run.device_mesh,
        run.setting.policy,
        blocks=recipe.blocks(base),
        forward_methods=recipe.forward_methods(base),
        tp_plan=recipe.tp_plan(base) if run.setting.has_tp else None,
    )
    if run.setting.has_tp and not run.plan.tp_styles:
        raise UsageError(
            "the tensor-parallel plan shards nothing in this model",
            where=f"--mesh {run.setting.mesh}",
            hint="leave tp out; adapters are not sharded" if run.setting.options.lora else "leave tp out of the mesh",
        )


def shard(run: RankRun) -> str:
    """Turn parameters into DTensors."""
    apply_sharding(run, run.model)
    run.report(*audit(run.model, phase="sharded", plan=run.plan))
    run.report(*compare_ranks(run.model))
    units = len(run.plan.blocks) if run.plan else 0
    return f"{run.setting.policy.strategy}, {units} blocks and the root"


def load(run: RankRun) -> str:
    """Load the checkpoint; names that do not fit are findings."""
    report = run.blueprint.load(run.model)
    title = ""
    if run.rank == 0:
        _report_names(run, report)
        run.note(*report.notes)
        if not report.missing and run.setting.options.source is not None:
            naming = checks.judge_names(run.model, run.blueprint)
            title = f"; {naming.title}"
            run.note(*filter(None, [naming.note]))
            if naming.finding is not None:  # an error of the checkpoint: what ckpt has loaded of it can be tried
                run.journal.finding(naming.finding)
    strange = checks.strange_weights(run.model)
    constant = checks.constant_weights(run.model) if run.setting.options.source is not None else {}
    if run.rank == 0:
        run.report(*strange, *checks.unlearned_weights(run.model, run.blueprint, constant))
    total = sum(gather(report.loaded_bytes))
    if not total:  # quantising needs whole layers
        return f"read, quantised and sent by rank 0{title}"
    return f"{format_size(total)} read by {run.world_size} ranks{title}"


def _report_names(run: RankRun, report: LoadReport) -> None:
    """Report names that do not fit: one by one, or, where hardly any does, whose they are."""
    num_names = len(run.model.state_dict(keep_vars=True))
    if 2 * len(report.missing) > num_names and (owners := origins_of(report.unexpected)):
        run.report(checks.foreign_names(report.missing, num_names, owners[0], run.setting))
        return
    for code, names, what in (
        ("missing-tensor", report.missing, "the checkpoint does not contain it"),
        ("unexpected-tensor", () if run.blueprint.recipe.is_cut else report.unexpected, "the model does not have it"),
    ):
        hint = "check that the config belongs to this checkpoint: `ckpt inspect --tensors`"
        run.report(*(Finding.error(code, name, what, hint) for name in names))


def compare(run: RankRun) -> str:
    """Hold every shard against the bytes of the source."""
    findings, count, nbytes = checks.compare_with_source(run.model, run.blueprint)
    run.report(*findings)
    run.fact("tolerances", tolerances_of(run))
    total = sum(gather(nbytes))
    what = f"{count} tensors, {format_size(total)} on all ranks, compared with the source"
    return what if run.setting.options.quantize is None else f"{what}; quantised ones by the loss"


def states(run: RankRun) -> str:
    """Make the optimizer; audit the model, and compare it over ranks, before the first forward."""
    # PyTorch's fused loops take no parameters of different meshes at once.
    run.optimizer = make_optimizer(run.model, foreach=False if run.setting.has_tp else None)
    run.report(*audit(run.model, phase="loaded", plan=run.plan, optimizer=run.optimizer))
    run.report(*compare_ranks(run.model))
    return "placements, ties, buffers, optimizer, equal on all ranks"


def forward(run: RankRun) -> str:
    """Run the first forward under the watch."""
    traces = os.path.join(run.directory, "traces") if run.is_local else None
    run.watch = run.resources.enter_context(watch(run.model, traces=traces))
    run.batch = on_device(batch_of(run, run.dp_index), run.device, None)
    run.note(*run.blueprint.recipe.notes_on(run.batch))
    rng.seed(run.dp_index, 0)
    before, begun = rng.state(), run.count_collectives()
    output = call(run.model, run.batch)
    run.has_drawn, run.talks = rng.state() != before, run.count_collectives() > begun
    run.loss_at = find_loss(output, run.setting.options.loss or getattr(base_model(run), "fsdp_loss", None))
    if run.loss_at is None:
        run.note("the model returns no loss: the mean square of its outputs is used")
    run.loss = loss_of(output, run.loss_at)
    run.report(*audit(run.model, phase="forward", plan=run.plan, optimizer=run.optimizer))
    shapes = {name: value.shape for name, value in run.batch.items() if isinstance(value, torch.Tensor)}
    shape = ", ".join(f"{name} {'×'.join(map(str, dims))}" for name, dims in shapes.items())
    return f"{shape} per rank"


def backward(run: RankRun) -> str:
    """Run backward under the watch."""
    if run.loss is None:
        raise RuntimeError("there was no forward")
    rng.seed(run.dp_index, 0)
    run.loss.backward()  # type: ignore[no-untyped-call]
    run.loss = None
    found = audit(run.model, phase="backward", plan=run.plan, optimizer=run.optimizer)
    # A part that runs and is not used is healthy: LLaVA takes the features of the last vision layer but one.
    unused = [each for each in found if (each.code, each.severity) == ("no-gradient", "warning")]
    run.report(*(each for each in found if each not in unused))
    run.report(*compare_ranks(run.model))
    if run.watch is not None:
        run.report(*run.watch.findings)
    trainable = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    without = [strip_wrappers(name) for name, parameter in trainable.items() if parameter.grad is None]
    if without:
        names = first_few(group_names(without, None), 4)
        run.note(f"{len(without)} of {len(trainable)} trainable parameters got no gradient from this batch: {names}")
    run.note(*(f"no gradient, though their modules ran: {each.what}" for each in unused))
    frozen = sum(not parameter.requires_grad for parameter in run.model.parameters())
    return f"{len(trainable) - len(without)} gradients" + (f", {frozen} parameters frozen" if frozen else "")


def gradients(run: RankRun) -> str:
    """Compare every gradient with the reference's."""
    run.resources.close()  # the watch has seen one whole step
    if not run.has_reference:
        raise Skipped("there is no reference")
    tolerance = tolerances_of(run).gradient
    expected = None if run.reference is None else run.reference.gradients()
    errors = checks.compare_gradients(run.model, expected, tolerance)
    run.report(*errors.findings)
    if errors.rounded:
        kinds = first_few(group_names(errors.rounded, None), 4)
        what = f"{len(errors.rounded)} gradients are so small that they are compared within the rounding of the largest"
        run.note(f"{what}: {kinds}")
    run.fact("max_grad_error", errors.worst)
    run.fact("grad_errors", errors.errors)
    off = f"{format_number(errors.worst, 2)} off ({escape_name(errors.worst_name)})"
    worst = off if errors.worst else "equal to the last bit"
    return f"{errors.compared} compared, the worst {worst}" if errors.worst else f"{errors.compared} compared, {worst}"


def clip(run: RankRun) -> str:
    """Clip, and compare the norm before and after."""
    norm = float(clip_grad_norm(run.model, MAX_NORM))
    after = float(clip_grad_norm(run.model, math.inf))
    # Ranks add up millions of squares in other groups than one process: float32 keeps some 5 digits of such a sum.
    tolerance = max(tolerances_of(run).gradient, NORM_TOLERANCE)
    if run.reference is not None:
        expected = run.reference.clip(MAX_NORM)
        if not abs(norm - expected) <= tolerance * max(expected, 1e-12):
            run.error(
                "wrong-norm",
                "the gradients",
                f"their norm must be {expected:.6g} (reference), got {norm:.6g}",
                "check that the norm covers every rank's shard exactly once",
            )
    if run.rank == 0 and not after <= MAX_NORM * (1 + tolerance):
        run.error("wrong-clip", "the gradients", f"their norm is {after:.6g} after clipping to {MAX_NORM}")
    return f"norm {norm:.6g} → {after:.6g}"


def step(run: RankRun) -> str:
    """Take the optimizer's step, and the steps after it; measure memory after the first."""
    run.optimizer.step()
    run.report(*audit(run.model, phase="stepped", plan=run.plan, optimizer=run.optimizer))
    _measure(run)
    run.optimizer.zero_grad(set_to_none=True)
    if run.reference is not None:
        run.reference.step()
    took: list[float] = []
    for number in range(2, run.setting.options.steps + 1):
        begun = time.perf_counter()
        rng.seed(run.dp_index, number - 1)
        own = loss_of(call(run.model, run.batch), run.loss_at)
        rng.seed(run.dp_index, number - 1)
        own.backward()  # type: ignore[no-untyped-call]
        mean = mean_loss(own)
        run.losses.append(mean)
        run.journal.fact("losses", run.losses)  # on every rank: its watchdog sees it go on
        if not math.isfinite(mean):
            report_not_finite(run, number - 1, mean)
            break
        clip_grad_norm(run.model, MAX_NORM)
        run.optimizer.step()
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)  # on other ranks with the wait for rank 0's reference
        run.fact("step_seconds", round(statistics.median(took), 6))
        run.optimizer.zero_grad(set_to_none=True)
        if run.has_reference:
            expected = reference_loss(run, number - 1)
            check_loss(run, f"step {number}", mean, expected)
        if run.reference is not None:
            run.reference.clip(MAX_NORM)
            run.reference.step()
    return f"{len(run.losses)} steps, loss {' → '.join(f'{value:.4f}' for value in run.losses)}"


def _measure(run: RankRun) -> None:
    parameters = list(run.model.parameters())
    state = [
        value for values in run.optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)
    ]
    memory = RankMemory(
        rank=run.rank,
        params=checks.local_bytes(iter(parameters)),
        grads=checks.local_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer=checks.local_bytes(iter(state)),
        peak=max([torch.cuda.max_memory_allocated(), *run.held.values()])
        if run.device.type == "cuda"
        else peak_rss_bytes(),
    )
    run.journal.fact("memory", memory)


def evaluate(run: RankRun, model: nn.Module) -> float:
    """Return the loss of one batch, the same on every rank and mesh; leave buffers as they are. Collective."""
    batch = on_device(batch_of(run, 0), run.device, None)
    buffers = rng.take_buffers(model)
    rng.seed(0, 0)
    before, begun = rng.state(), run.count_collectives()
    with torch.set_grad_enabled(run.needs_gradients):
        value = float(loss_of(call(model, batch), run.loss_at).detach())
    run.has_drawn, run.talks = rng.state() != before, run.talks or run.count_collectives() > begun
    rng.put_buffers(model, buffers)
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if callable(reshard):
            reshard()
    return value


def save(run: RankRun) -> str:
    """Save model and optimizer as a training run would."""
    path = os.path.join(run.directory, "saved")
    reference = run.reference
    run.needs_gradients = share(reference is not None and reference.needs_gradients(batch_of(run, 0)))
    if run.needs_gradients:
        run.note("forward takes gradients itself: it is evaluated with them on")
    run.saved = SavedWorld(
        path=path,
        loss=evaluate(run, run.model),
        source=run.blueprint.source,
        num_layers=run.num_layers,
        tp=run.setting.mesh.size(TP_AXIS),
        loss_at=run.loss_at,
        on_cpu=run.blueprint.on_cpu,
        talks=run.talks,
        needs_gradients=run.needs_gradients,
    )
    save_checkpoint(run.model, run.optimizer, path)
    dist.barrier()
    run.fact("saved", run.saved)
    files = [os.path.join(path, name) for name in os.listdir(path)]
    total = sum(os.path.getsize(path) for path in files)
    return f"{format_size(total)} in {len(files)} files"


_HINT = "check whether the model keeps state outside its parameters and buffers"


def _load_saved(run: RankRun, saved: SavedWorld) -> nn.Module:
    """Build the model anew, shard it, and load what was saved."""
    model = run.blueprint.build()
    apply_sharding(run, model)
    run.blueprint.load_saved(model, saved.path)
    run.report(*audit(model, phase="loaded", plan=run.plan))
    return model


def reload_same_world(run: RankRun) -> str:
    """Reload on the same ranks: every byte of parameters and optimizer state, and the loss."""
    model = _load_saved(run, run.saved)
    varying = checks.varying_buffers(run.model)
    if varying:
        run.note(
            f"{len(varying)} buffers differ between ranks ({first_few(varying)}): the checkpoint has "
            "rank 0's, and only rank 0 compared them after the reload"
        )
    run.report(
        *(
            Finding.error("wrong-reload", name, "it differs bitwise from the saved one", _HINT)
            for name in checks.differing_tensors(run.model, model)
            if not (run.rank and name in varying)
        )
    )
    optimizer = make_optimizer(model, foreach=False if run.setting.has_tp else None)
    load_optimizer(model, optimizer, run.saved.path)
    wrong = checks.differing_states(run.optimizer, optimizer)
    if wrong:
        run.error("wrong-reload", "the optimizer", f"{wrong} tensors of its state differ bitwise from the saved ones")
    # The first model has done its part; a second one that is loaded needs its memory.
    return _judge(run, "reload_same_world", model, run.saved)


def reload_other_world(run: RankRun, *, saved: SavedWorld) -> str:
    """Reload on the ranks of this world, which are not those that saved."""
    recipe = run.setting.recipe_of(saved.num_layers)
    recipe.keeps_dropout &= saved.tp == 1
    run.loss_at, run.needs_gradients = saved.loss_at, saved.needs_gradients
    run.blueprint = Blueprint(setting=run.setting, recipe=recipe, source=saved.source, on_cpu=saved.on_cpu)
    run.model = _load_saved(run, saved)
    return _judge(run, "reload_other_world", run.model, saved)


def _judge(run: RankRun, fact: str, model: nn.Module, saved: SavedWorld) -> str:
    """Compare the loss with that of the save, and report both.

    Every rank computes the same batch with the same whole parameters, in the same order: on a CPU the losses are the
    same number. Under another tensor-parallel cut, and on GPUs, partial sums may be added in another order.
    """
    value = evaluate(run, model)
    bitwise = value == saved.loss
    is_same_cut = saved.tp == run.setting.mesh.size(TP_AXIS)
    is_other_talk = fact == "reload_other_world" and any(gather(saved.talks or run.talks))
    tolerance = 0.0 if is_same_cut and run.device.type == "cpu" else tolerances_of(run).loss
    ok = bitwise or abs(value - saved.loss) <= tolerance * max(1.0, abs(saved.loss))
    # Rank 0 decides for all: running a model is collective, and only its buffers are those of the checkpoint.
    is_excused = is_other_talk or (run.has_drawn and not is_same_cut)
    if not share(ok) and (is_excused or share(evaluate(run, model) != value)):
        why = "forward communicates over the ranks" if is_other_talk else "two runs of this model differ"
        run.note(f"the loss after the reload on {run.setting.mesh} is not compared: {why}")
        return f"{run.setting.mesh}: loss {value:.6f}, not compared"
    if run.rank == 0:
        result = ReloadResult(ok=ok, mesh=str(run.setting.mesh), loss=value, saved_loss=saved.loss, bitwise=bitwise)
        if math.isfinite(value) and math.isfinite(saved.loss):
            run.journal.fact(fact, result)
        if not ok:
            what = f"it is {value!r} after the reload, but was {saved.loss!r} when saved"
            run.error("wrong-reload", "the loss", what, _HINT)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return f"{run.setting.mesh}: loss {value:.6f}, {'bitwise the same' if bitwise else f'saved {saved.loss:.6f}'}"


SEED = 20  # Of the batches; each data-parallel rank adds its index


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """How far results may be from the reference."""

    loss: float  # Absolute for losses up to 1, relative beyond
    gradient: float  # Relative, see `checks.GRADIENT_FLOOR`


def tolerances_of(run: RankRun) -> Tolerances:
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


def base_model(run: RankRun) -> nn.Module:
    """Return the model without adapters."""
    return run.model.get_base_model() if run.setting.options.lora else run.model  # type: ignore[operator]


def batch_of(run: RankRun, index: int) -> Batch:
    """Return the batch of a data-parallel rank: the same in every process and for every mesh."""
    return run.blueprint.recipe.batch(base_model(run), SEED + index)


def loss(run: RankRun) -> str:
    """Compare the loss with the reference's."""
    mean = mean_loss(run.loss)
    run.losses.append(mean)
    run.journal.fact("losses", run.losses)  # on every rank: its watchdog sees it go on
    if not math.isfinite(mean):
        report_not_finite(run, 0, mean)
        return f"{mean}"
    if not run.has_reference:
        return f"{mean:.6f}, not compared"
    run.talks = any(gather(run.talks))
    expected, why_not = 0.0, _why_too_large(run) if run.talks else ""
    if not why_not and (run.rank == 0 or run.talks):
        run.reference = Reference(run.blueprint, run.device, run.loss_at, together=run.talks)
        if run.talks:
            _check_scale(run, run.reference)
        expected = reference_loss(run, 0)
        if not is_close(run, mean, expected):
            why_not = _why_incomparable(run, run.reference, expected)
        if not why_not:
            check_loss(run, "the first step", mean, expected)
    expected, why_not = share((expected, why_not))
    if run.talks and not why_not:
        run.note("forward communicates: every rank has a reference of its own, and they communicate as it does")
    if why_not:
        run.note(f"losses and gradients are not compared: {why_not}")
        run.reference, run.has_reference = None, False
        return f"{mean:.6f}, not compared"
    return f"{mean:.6f}, the reference {expected:.6f}"


def report_not_finite(run: RankRun, step: int, value: float) -> None:
    """Say where a loss that is not finite comes from, and what the unsharded model makes of the batches. Collective."""
    what = f"the loss of step {step + 1} is {value}"
    if run.has_reference:
        if run.reference is None and (run.rank == 0 or run.talks):
            run.reference = Reference(run.blueprint, run.device, run.loss_at, together=run.talks)
        what += f" (unsharded: {share(reference_loss(run, step)):.6g})"
    rng.seed(run.dp_index, step)
    finding = explain_loss(run.model, what, lambda: call(run.model, run.batch))
    if run.rank == 0:
        run.report(finding)


def _check_scale(run: RankRun, reference: Reference) -> None:
    """Report gradients that grow with the number of ranks when all have one batch: FSDP averages, forward adds up."""
    batch = batch_of(run, 0)
    together = reference.gradient_norm(batch)
    with alone():
        try:
            single = reference.gradient_norm(batch)
        except Exception:  # noqa: BLE001 - it wants as many ranks as there were when it was built
            return
    if run.world_size > 1 and single and abs(together / single / run.world_size - 1) < NORM_TOLERANCE:
        what = f"on one batch, they are {run.world_size} times those of one rank: forward adds up what FSDP averages"
        hint = "divide by the world size what forward adds up, or detach it where it is only logged"
        run.error("sum-over-ranks", "the gradients", what, hint)


def _why_too_large(run: RankRun) -> str:
    """Say why not every rank can have a reference, "" when it can; rank 0 decides for all. Collective."""
    free = run.setting.options.memory_bytes or free_memory(run.device)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
    wanted = whole * blueprints.STATES * (run.world_size if run.device.type == "cpu" and run.is_local else 1)
    text = f"forward communicates, and whole copies on all ranks need {format_size(wanted)}"
    return share(f"{text}, of {format_size(free)}" if wanted > free else "")


def _why_incomparable(run: RankRun, reference: Reference, expected: float) -> str:
    """Say why no reference can follow this model, "" when one can."""
    if run.setting.has_tp and run.has_drawn:
        return "forward draws random numbers, and under tp every rank draws for its own part of a layer"
    reference.forget()
    again = reference_loss(run, 0)
    if is_close(run, again, expected):
        return ""
    return (
        f"two runs of the unsharded model on one batch with the same seeds give {expected:.9g} and {again:.9g}: "
        "it uses its own random generator, or keeps state outside its buffers"
    )


def reference_loss(run: RankRun, step: int) -> float:
    """Run the reference on every rank's batch, where there is one. Leaves its gradients there."""
    if run.reference is None:
        return math.nan
    indexes = (run.dp_index,) if run.talks else range(run.setting.dp_size)
    return run.reference.mean_loss({index: batch_of(run, index) for index in indexes}, step)


def mean_loss(own: torch.Tensor | None) -> float:
    """Return the mean over data-parallel ranks. Collective."""
    values = gather(math.nan if own is None else float(own.detach()))
    return sum(values) / len(values)


def is_close(run: RankRun, value: float, expected: float) -> bool:
    """Are two losses the same within what rounding explains?"""
    if math.isnan(value) and math.isnan(expected):  # "not-finite" says that
        return True
    return _difference(value, expected) <= tolerances_of(run).loss


def _difference(value: float, expected: float) -> float:
    return abs(value - expected) / max(1.0, abs(expected))


def check_loss(run: RankRun, where: str, value: float, expected: float) -> None:
    """Report on rank 0, which has both, a loss that is not the reference's."""
    if run.rank:
        return
    run.reference_losses.append(expected)
    run.fact("reference_losses", run.reference_losses)
    if not is_close(run, value, expected):
        allowed = f"{format_number(_difference(value, expected), 2)} off, allowed {tolerances_of(run).loss:.0e}"
        what = f"{value:.9g}, but {expected:.9g} in the unsharded reference ({allowed})"
        run.error("wrong-loss", where, what, "check that every rank runs all of forward, and nothing outside it")
