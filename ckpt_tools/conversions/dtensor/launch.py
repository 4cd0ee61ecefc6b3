"""Ranks as processes of this machine: started together, ended together."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_tools.conversions.dtensor.rank import Job, describe, save_rank
from ckpt_tools.errors import CkptError
from ckpt_tools.processes.child import LOOPBACK, describe_end, error_from_json, error_to_json


def run_local_ranks(job: Job) -> None:
    """Run one process per rank on this machine; when one fails, end the others.

    Raises:
        CkptError: A rank failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ckpt-ranks-") as private:
        ranks: list[BaseProcess] = [
            context.Process(target=_run_rank, args=(rank, private, job), daemon=True)
            for rank in range(job.mesh.world_size)
        ]
        try:
            for process in ranks:
                process.start()
            running = dict(enumerate(ranks))
            while running:
                wait([process.sentinel for process in running.values()])
                # Asked once: a sentinel tells of an end a moment before the system tells how it ended.
                ended = {rank: process.exitcode for rank, process in running.items()}
                failed = {rank: exitcode for rank, exitcode in ended.items() if exitcode}
                if failed:
                    raise _failure(private, failed)
                running = {rank: process for rank, process in running.items() if ended[rank] is None}
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _failure(private: str, failed: Mapping[int, int | None]) -> CkptError:
    """Return the error of the rank that failed first; what the others say is mostly that it is gone."""
    for rank, exitcode in failed.items():
        if exitcode is not None and exitcode < 0:
            how, hint = describe_end(exitcode, "try --engine stream")
            return CkptError(f"rank {rank} {how}", hint=hint)
    reports = []
    for name in os.listdir(private):
        if name.endswith(".error.json"):
            with open(os.path.join(private, name), encoding="utf-8") as file:
                reports.append(json.load(file))
    if not reports:
        rank, exitcode = next(iter(failed.items()))
        return CkptError(
            f"rank {rank} ended with exit status {exitcode}",
            hint="a script that calls this needs `if __name__ == '__main__':` around what it runs",
        )
    first = min(reports, key=lambda report: report["time_ns"])
    return error_from_json(first["error"] | {"where": first["error"]["where"] or f"rank {first['rank']}"})


def _run_rank(rank: int, private: str, job: Job) -> None:
    """Run one rank in its own process; leave a report in `private` when it fails."""
    # The terminal sends an interrupt to all; the parent answers it and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{private}/rendezvous",
            rank=rank,
            world_size=job.mesh.world_size,
            timeout=timedelta(seconds=job.timeout_s),
        )
        save_rank(job)
        dist.destroy_process_group()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - the report is the only way out of here
        told = error if isinstance(error, CkptError) else CkptError(describe(error))
        report = {"rank": rank, "time_ns": time.time_ns(), "error": error_to_json(told)}
        path = os.path.join(private, f"{rank}.error")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file)
        os.replace(path, f"{path}.json")
        # Without a farewell to the group: the others may never answer.
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
