"""One rank from the process group to the last phase."""

from __future__ import annotations

import traceback
import warnings
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ckpt_tools.errors import CkptError
from ckpt_tools.fsdp2 import build_device_mesh
from ckpt_tools.fsdp2.smoke import losses, phases, reload
from ckpt_tools.fsdp2.smoke.enclosed import enclose, enclosed
from ckpt_tools.fsdp2.smoke.launcher import choose_device
from ckpt_tools.fsdp2.smoke.messages import Saved
from ckpt_tools.fsdp2.smoke.run import Run, Stopped, explain
from ckpt_tools.fsdp2.smoke.setting import Setting
from ckpt_tools.sandbox import Breach
from ckpt_tools.sandbox.journal import Journal

COLLECTIVE_GRACE_S = 60.0
"""Seconds by which collectives wait longer than the watchdog: it shall speak first."""

FIRST = (
    ("build", phases.build),
    ("shard", phases.shard),
    ("load", phases.load),
    ("compare", phases.compare),
    ("states", phases.states),
    ("forward", phases.forward),
    ("loss", losses.loss),
    ("backward", phases.backward),
    ("gradients", phases.gradients),
    ("clip", phases.clip),
    ("step", phases.step),
    ("save", phases.save),
    ("reload-same-world", reload.same_world),
)


def run_rank(
    setting: Setting,
    *,
    rank: int,
    num_local: int,
    local_rank: int,
    directory: str,
    scratch: str | None = None,
    journal: Journal,
    rendezvous: str | None = None,
    store: Store | None = None,
    saved: Saved | None = None,
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
        run: Run | None = None
        try:
            device = choose_device(setting.options.device, num_local=num_local, local_rank=local_rank)
            _join(setting, rank, device, rendezvous, store)
            run = Run(
                setting=setting,
                rank=rank,
                device=device,
                directory=directory,
                journal=journal,
                resources=resources.enter_context(ExitStack()),
                device_mesh=build_device_mesh(setting.mesh, device.type),
                is_local=num_local == setting.mesh.world_size,
            )
            journal.fact("device", run.device.type)
            journal.fact("num_devices", torch.cuda.device_count() if run.device.type == "cuda" else None)
            if scratch is not None:
                enclose(setting, journal, scratch=scratch, device=device, saved=saved)
            else:
                resources.enter_context(enclosed(setting, scratch=directory))
            journal.done("start", ok=True, seconds=0.0, what=f"{run.world_size} ranks, {run.device.type}")
            for name, function in FIRST if saved is None else ():
                run.phase(name, function)
            if saved is not None:
                run.phase("reload-other-world", partial(reload.other_world, saved=saved))
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


def _join(setting: Setting, rank: int, device: torch.device, rendezvous: str | None, store: Store | None) -> None:
    """Make the process group."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    options: dict[str, Any] = {"init_method": f"file://{rendezvous}"} if store is None else {"store": store}
    timeout = timedelta(seconds=setting.timeout_s + COLLECTIVE_GRACE_S)
    dist.init_process_group(backend, rank=rank, world_size=setting.mesh.world_size, timeout=timeout, **options)
