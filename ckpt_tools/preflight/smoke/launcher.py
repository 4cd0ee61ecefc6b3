"""The process between the caller and the ranks: imports torch once, forks the ranks, watches them, and reports."""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.memory import available_bytes
from ckpt_tools.preflight.smoke.messages import RELIEF, RELOAD_NAME, WORLD_NAME, Launched, LaunchJob, SavedWorld
from ckpt_tools.preflight.smoke.options import SmokeOptions
from ckpt_tools.preflight.smoke.report import assemble, first_error
from ckpt_tools.sandbox.child import Here
from ckpt_tools.sandbox.journal import Journal
from ckpt_tools.sandbox.ranks import RanksOutcome, World

if TYPE_CHECKING:
    from ckpt_tools.preflight.smoke.setting import SmokeSetting


_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "ckpt_tools.preflight.smoke.rank",
)


def launch(job: LaunchJob, here: Here) -> Launched:
    """Do a job; no rank is left when this returns."""
    options = job.options
    preload(options)
    from ckpt_tools.preflight.smoke.setting import other_world, resolve

    setting = resolve(options)
    _try(setting, here)
    if job.saved is not None:
        return Launched(reloaded=_run_world(setting, here, RELOAD_NAME, job.saved))
    first = _run_world(setting, here, WORLD_NAME)
    error = first_error(first.logs)
    if error is not None:
        raise error
    second: RanksOutcome | None = None
    reloading, why_not = other_world(setting, first.logs[0])
    is_sound = not first.findings and not any(log.failed for log in first.logs.values())
    if reloading is not None and is_sound:
        second = _run_world(reloading, here, RELOAD_NAME, first.logs[0].fact("saved", SavedWorld))
    judge_traces(os.path.join(here.directory, WORLD_NAME), first)
    return Launched(report=assemble(setting, first, second, reload_skipped=why_not))


def preload(options: SmokeOptions) -> None:
    """Import what every rank will need, once; nothing here may start a thread or touch a GPU."""
    gc.disable()
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.enable()
    for name, is_wanted in (("peft", options.lora), ("bitsandbytes", options.quantize is not None)):
        # bitsandbytes begins to use a GPU when it is imported. The absence of either is refused later, with a hint.
        if is_wanted and not (name == "bitsandbytes" and os.path.exists("/dev/nvidiactl")):
            with suppress(ImportError):
                importlib.import_module(name)
    warnings.simplefilter("ignore")


def _try(setting: SmokeSetting, here: Here) -> None:
    """Build the model once on meta: a config that cannot be meant is refused before any rank starts."""
    from ckpt_tools.preflight.smoke.rank import judge_trial, try_build

    if setting.options.factory is None:
        # In a process of its own, in the sandbox: this one starts others.
        outcome = _watch(setting, here, "trial", 1, lambda _, journal: try_build(setting, journal, here.directory))
        error = first_error(outcome.logs) or judge_trial(setting, outcome)
        if error is not None:
            raise error
    # What is alive now is alive in every rank; it shall not be copied for being looked at.
    gc.freeze()


def _watch(
    setting: SmokeSetting, here: Here, name: str, size: int, run: Callable[[int, Journal], bool]
) -> RanksOutcome:
    with World(os.path.join(here.directory, name), size, run, relief=RELIEF) as world:
        return world.watch(here, timeout_s=setting.timeout_s)


def _run_world(setting: SmokeSetting, here: Here, name: str, saved: SavedWorld | None = None) -> RanksOutcome:
    from ckpt_tools.preflight.smoke.rank import run_rank

    private = os.path.join(here.directory, name)
    size = setting.mesh.world_size

    def be_rank(rank: int, journal: Journal) -> bool:
        return run_rank(
            setting,
            rank=rank,
            num_local=size,
            local_rank=rank,
            directory=private,
            scratch=here.directory,
            journal=journal,
            rendezvous=os.path.join(private, "rendezvous"),
            saved=saved,
        )

    return _watch(setting, here, name, size, be_rank)


def judge_traces(directory: str, outcome: RanksOutcome) -> None:
    """Add to an outcome where the ranks of a world parted, when they did not all come to an end."""
    traces = os.path.join(directory, "traces")
    if not outcome.has_parted or not os.path.isdir(traces):
        return
    from ckpt_tools.fsdp2.compare_ranks import compare_traces
    from ckpt_tools.fsdp2.watch import read_traces

    try:
        found = read_traces(traces)
    except CkptError:  # a rank was ended before its trace began
        return
    if any(finding.code == "hang" for finding in outcome.findings):
        outcome.findings += compare_traces(found)
        return
    # Gloo aborts ranks that do different things. What a rank did not do because it was dead is none of these.
    shortest = min(len(trace.events) for trace in found)
    parted = compare_traces(replace(trace, events=trace.events[:shortest]) for trace in found)
    outcome.findings += parted
    outcome.has_lost_rank |= not parted


# What this machine has: memory that is free, devices to compute on.


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated: of a GPU, or of this machine within its container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()


def choose_device(wanted: str, *, num_local: int, local_rank: int) -> torch.device:
    """Return where a rank computes; "auto" takes GPUs when there is one for every rank of this machine."""
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if count >= num_local:
        return torch.device("cuda", local_rank)
    if wanted == "cuda":
        raise UsageError(
            f"{num_local} ranks need as many GPUs, but there are {count}", hint="use --device cpu, or fewer ranks"
        )
    return torch.device("cpu")
