"""One rank from the process group to the last phase."""

from __future__ import annotations

import importlib
import os
import traceback
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.fsdp2 import build_device_mesh
from ckpt_tools.fsdp2.internals import groups_of_ranks
from ckpt_tools.models.config_recipe import ConfigRecipe
from ckpt_tools.preflight.smoke import phases
from ckpt_tools.preflight.smoke.blueprint import build_anyhow
from ckpt_tools.preflight.smoke.launcher import choose_device, free_memory
from ckpt_tools.preflight.smoke.messages import SavedWorld
from ckpt_tools.preflight.smoke.rank_run import RankRun, Stopped, explain
from ckpt_tools.preflight.smoke.report import PHASES
from ckpt_tools.preflight.smoke.setting import SmokeSetting
from ckpt_tools.sandbox.audit import Breach, Sandbox, in_sandbox
from ckpt_tools.sandbox.enclose import Limits, enter_sandbox
from ckpt_tools.sandbox.journal import Journal
from ckpt_tools.sandbox.ranks import RanksOutcome

COLLECTIVE_GRACE_S = 60.0  # Seconds by which collectives wait longer than the watchdog: it shall speak first


def run_rank(
    setting: SmokeSetting,
    *,
    rank: int,
    num_local: int,
    local_rank: int,
    directory: str,
    scratch: str | None = None,
    journal: Journal,
    rendezvous: str | None = None,
    store: Store | None = None,
    saved: SavedWorld | None = None,
) -> bool:
    """Run one rank in this process, write what happens to its journal, and return True when every phase succeeded.

    With `saved` the rank only reloads what another world has saved. Without `scratch` the process is the user's and has
    no sandbox. The process group meets by the file `rendezvous` or by torchrun's `store`.
    """
    journal.phase("start")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as resources, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resources.callback(torch.set_num_threads, num_threads)
        run: RankRun | None = None
        try:
            device = choose_device(setting.options.device, num_local=num_local, local_rank=local_rank)
            timeout = _join(setting, rank, device, rendezvous, store)
            outside = groups_of_ranks()
            device_mesh = _build_mesh(setting, device, timeout)
            run = RankRun(
                setting=setting,
                rank=rank,
                device=device,
                directory=directory,
                journal=journal,
                resources=resources.enter_context(ExitStack()),
                device_mesh=device_mesh,
                mesh_groups=groups_of_ranks() - outside,
                is_local=num_local == setting.mesh.world_size,
            )
            journal.fact("device", run.device.type)
            journal.fact("num_devices", torch.cuda.device_count() if run.device.type == "cuda" else None)
            if scratch is not None:
                enclose(setting, journal, scratch=scratch, device=device, saved=saved)
            else:
                resources.enter_context(enclosed(setting, scratch=directory))
            journal.done("start", ok=True, seconds=0.0, what=f"{run.world_size} ranks, {run.device.type}")
            for name in PHASES[2:-1] if saved is None else ():
                run.phase(name, getattr(phases, name.replace("-", "_")))
            if saved is not None:
                run.phase("reload-other-world", partial(phases.reload_other_world, saved=saved))
            dist.barrier()  # so that nobody takes an early farewell for a failure
            dist.destroy_process_group()
        except Stopped:
            return False
        except CkptError as error:
            journal.error(error)
            return False
        except Breach as breach:
            journal.error(breach.error)
            return False
        except Exception as error:  # noqa: BLE001 - the journal is the only way out of here
            traceback.print_exc()
            journal.finding(explain(error, None, "start" if run is None else "end"))
            return False
    return True


def _join(
    setting: SmokeSetting, rank: int, device: torch.device, rendezvous: str | None, store: Store | None
) -> timedelta:
    """Make the process group, and return how long collectives wait."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    options: dict[str, Any] = {"init_method": f"file://{rendezvous}"} if store is None else {"store": store}
    timeout = timedelta(seconds=setting.timeout_s + COLLECTIVE_GRACE_S)
    dist.init_process_group(backend, rank=rank, world_size=setting.mesh.world_size, timeout=timeout, **options)
    return timeout


def _build_mesh(setting: SmokeSetting, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Return the mesh; one of a single axis gets a group of its own, so that the model's own collectives are seen."""
    if len(setting.mesh.axes) > 1:
        return build_device_mesh(setting.mesh, device.type)
    names = tuple(name for name, _ in setting.mesh.axes)
    return DeviceMesh.from_group(dist.new_group(timeout=timeout), device.type, mesh_dim_names=names)


_EXIT = 3


def enclose(
    setting: SmokeSetting, journal: Journal, *, scratch: str, device: torch.device, saved: SavedWorld | None = None
) -> None:
    """Put this process in a sandbox for the rest of its life; a breach is its last event.

    A factory is the user's own code and has no sandbox. On GPUs only Python's own part stands: drivers and NCCL need
    devices, files and sockets.
    """
    if not isinstance(setting.recipe, ConfigRecipe):
        return

    def leave(error: CkptError) -> NoReturn:
        journal.error(error)
        os._exit(_EXIT)

    on_gpu = device.type == "cuda"
    limits = Limits() if on_gpu else Limits(memory_bytes=free_memory(device))
    enter_sandbox(
        replace(_sandbox(setting, setting.recipe, scratch, saved), on_breach=leave), limits, kernel=not on_gpu
    )


def enclosed(setting: SmokeSetting, *, scratch: str) -> AbstractContextManager[None]:
    """Return a sandbox that stands while a context is open, for a process of the user's own: a breach raises there."""
    if not isinstance(setting.recipe, ConfigRecipe):
        return nullcontext()
    # It makes a cache directory when it is imported, and torch imports it late; ranks of our own have it already.
    importlib.import_module("torch._dynamo")
    return in_sandbox(_sandbox(setting, setting.recipe, scratch))


def _sandbox(setting: SmokeSetting, recipe: ConfigRecipe, scratch: str, saved: SavedWorld | None = None) -> Sandbox:
    own, model = setting.options.source, setting.options.model
    sources = (own, *(() if saved is None else (saved.source, saved.path)))
    folder = model if model is None or os.path.isdir(model) else os.path.dirname(model)
    return Sandbox(
        subject=f"a {recipe.title}",
        where=recipe.where,
        scratch=scratch,
        sources=tuple(os.path.abspath(path) for path in sources if path),
        foreign=() if folder is None else (os.path.abspath(folder),),
    )


def try_build(setting: SmokeSetting, journal: Journal, scratch: str) -> bool:
    """Build the model once, and make a batch for it; what ckpt cannot build or feed is told in `journal`."""
    enclose(setting, journal, scratch=scratch, device=torch.device("cpu"))
    try:
        setting.recipe.batch(build_anyhow(setting.recipe, setting.options.build)[0], 0)
    except CkptError as error:
        journal.error(error)
        return False
    return True


def judge_trial(setting: SmokeSetting, outcome: RanksOutcome) -> CkptError | None:
    """Return what a trial that ended without a word means: nothing of it is the fault of FSDP2, or of the mesh."""
    if not outcome.findings:
        return None
    finding = outcome.findings[0]
    how = f"it did not finish within {setting.timeout_s:.0f} s" if finding.code == "hang" else finding.what
    return UsageError(
        f"building a {setting.recipe.title} from its config failed before any rank was started: {how}",
        where=setting.recipe.where if isinstance(setting.recipe, ConfigRecipe) else None,
        hint=finding.hint,
    )
