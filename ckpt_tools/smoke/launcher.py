"""The process between the caller and the ranks: imports torch once, forks the ranks, watches them, and reports.

It is started by `start.run_local` with a directory that holds `job.json`, and leaves `result.json` there.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import warnings
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckpt_tools.checkpoint import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.smoke.assemble import assemble, first_error, is_abort
from ckpt_tools.smoke.journal import Journal
from ckpt_tools.smoke.options import SmokeOptions, parse_options
from ckpt_tools.smoke.world import Outcome, World, die_with_parent

if TYPE_CHECKING:
    from ckpt_tools.smoke.setting import Setting

JOB_NAME = "job.json"
"""What to do."""
RESULT_NAME = "result.json"
"""What came of it."""
WORLD_NAME = "world"
"""Directory of the ranks that train."""
RELOAD_NAME = "reload"
"""Directory of the ranks that reload."""
_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "ckpt_tools.smoke.rank",
)


def main(directory: str) -> None:
    """Do the job of a directory."""
    with open(os.path.join(directory, JOB_NAME), encoding="utf-8") as file:
        job = json.load(file)
    worlds: list[World] = []

    def stop(*_: object) -> None:
        for world in worlds:
            world.kill()
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    die_with_parent(job["parent"], signal.SIGTERM)
    try:
        result = _run(job, directory, worlds)
    except CkptError as error:
        parts = {"what": error.what, "where": error.where, "hint": error.hint}
        result = {"error": {"class": type(error).__name__, **parts}}
    finally:
        for world in worlds:
            world.kill()
    path = os.path.join(directory, RESULT_NAME)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(path + ".part", path)


def _check_parent() -> None:
    """End when the caller is gone: its end of the pipe is closed."""
    readable, _, _ = select.select([0], [], [], 0)
    if readable and not os.read(0, 1):
        os.kill(os.getpid(), signal.SIGTERM)


def _run(job: dict[str, Any], directory: str, worlds: list[World]) -> dict[str, Any]:
    options = parse_options(job["options"])
    preload(options)
    from ckpt_tools.smoke import other
    from ckpt_tools.smoke.setting import resolve

    setting = resolve(options)
    _warm(setting)
    if job["saved"] is not None:  # the ranks that trained are torchrun's
        outcome = _run_world(setting, directory, RELOAD_NAME, worlds, job["saved"])
        findings = [asdict(finding) for finding in outcome.findings]
        return {"events": {rank: log.events for rank, log in outcome.logs.items()}, "findings": findings}
    first = _run_world(setting, directory, WORLD_NAME, worlds)
    error = first_error(first.logs)
    if error is not None:
        raise error
    second: Outcome | None = None
    reloading, why_not = other.setting_for(setting, first.logs[0])
    if reloading is not None and is_sound(first):
        saved = other.saved_by(setting, reloading, first.logs[0])
        second = _run_world(reloading, directory, RELOAD_NAME, worlds, saved)
    report = assemble(
        first.logs,
        source=options.label,
        model=setting.recipe.title,
        mesh=str(setting.mesh),
        strategy=setting.policy.strategy,
        device=str(first.logs[0].fact("device") or options.device),
        findings=[*first.findings, *_of_traces(directory, first), *(second.findings if second else [])],
        stacks=first.stacks or (second.stacks if second else {}),
        reload_logs=second.logs if second else None,
        reload_skipped=why_not,
    )
    return {"report": report.to_json()}


def preload(options: SmokeOptions) -> None:
    """Import what every rank will need, once; nothing here may start a thread or touch a GPU."""
    for name in _PRELOAD:
        importlib.import_module(name)
    for name, is_wanted in (("peft", options.lora), ("bitsandbytes", options.quantize is not None)):
        # bitsandbytes begins to use a GPU when it is imported. The absence of either is refused later, with a hint.
        if is_wanted and not (name == "bitsandbytes" and os.path.exists("/dev/nvidiactl")):
            with suppress(ImportError):
                importlib.import_module(name)
    warnings.simplefilter("ignore")


def _warm(setting: Setting) -> None:
    """Build the model once on meta: a config that cannot be meant is refused before any rank starts."""
    if setting.options.factory is None:
        import torch

        with torch.device("meta"):
            setting.recipe.build()
    # What is alive now is alive in every rank; it shall not be copied for being looked at.
    gc.collect()
    gc.freeze()


def _run_world(
    setting: Setting, directory: str, name: str, worlds: list[World], saved: dict[str, object] | None = None
) -> Outcome:
    from ckpt_tools.smoke.rank import run_rank

    private = os.path.join(directory, name)
    size = setting.mesh.world_size

    def be_rank(rank: int, journal: Journal) -> bool:
        return run_rank(
            setting,
            rank=rank,
            num_local=size,
            local_rank=rank,
            directory=private,
            journal=journal,
            rendezvous=os.path.join(private, "rendezvous"),
            saved=saved,
        )

    world = World(private, size, be_rank)
    worlds.append(world)
    world.start()
    return world.watch(setting.timeout_s, _check_parent)


def is_sound(outcome: Outcome) -> bool:
    """Did every rank do everything?"""
    return not outcome.findings and not any(log.has_said for log in outcome.logs.values())


def _of_traces(directory: str, outcome: Outcome) -> list[Finding]:
    """Return where ranks parted, when they did not all come to an end."""
    traces = os.path.join(directory, WORLD_NAME, "traces")
    # A rank that does something else entirely, or was ended from outside, has not parted: it has only stopped.
    parted = [f for f in outcome.findings if (f.code == "hang" and not f.where.startswith("rank")) or is_abort(f)]
    if not parted or not os.path.isdir(traces):
        return []
    from ckpt_tools.fsdp2.compare import compare_traces
    from ckpt_tools.fsdp2.watch import read_traces

    try:
        return compare_traces(read_traces(traces))
    except CkptError:  # a rank was ended before its trace began
        return []
