"""Real gloo ranks for tests: started together, ended together, with what each returned or raised.

    def check(rank, world_size, path): ...            # at module level of a test module
    results = run_ranks(2, check, tmp_path, timeout=60)

Ranks are forked from one server process that has imported torch once, so that starting them is cheap.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

_PRELOAD = [
    "ckpt_tools.fsdp2",
    "torch._dynamo",  # FSDP's hooks import it
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed._composable.replicate_with_fsdp",
    "peft",  # and with it bitsandbytes, which compiles
    "pytest",  # as the modules do that the functions stand in
    "transformers.conversion_mapping",
    "transformers.models.llama.modeling_llama",
]
"""What most ranks import, at several seconds each; what is not installed is passed over."""
_GRACE_S = 8.0
"""What the other ranks get to end once one has failed: mostly they wait for it."""


class RankError(Exception):
    """A rank raised: `kind` and `message` of its exception, and where."""

    def __init__(self, rank: int, kind: str, message: str, trace: str = "", error: BaseException | None = None):
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.rank = rank
        self.kind = kind
        self.message = message
        self.trace = trace
        self.error = error
        """The exception itself, where it can be pickled."""


class RankLost(RankError):  # noqa: N818 - not an error of its own
    """A rank neither returned nor raised: it hung, or was ended; `trace` has its stacks and output."""


def run_ranks(world_size, function, *args, timeout=60, check=True, backend="gloo", start="forkserver"):
    """Call `function(rank, world_size, *args)` on every rank of a new process group.

    Args:
        world_size: Number of processes.
        function: At module level of a file; `args` and the results are pickled.
        *args: As they are.
        timeout: Seconds for all; after that every rank's stacks are collected and it is killed.
        check: Raise the first `RankError`; False puts them into the list.
        backend: Of the process group; None leaves it out (the function makes its own).
        start: How; "fork" has what this process has imported, which must not have started threads.

    Returns:
        What every rank returned, by rank.
    """
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    target = (function.__code__.co_filename, function.__qualname__)
    with tempfile.TemporaryDirectory(prefix="ranks-") as private:
        processes = [
            context.Process(target=_run, args=(rank, world_size, private, timeout, backend, target, args), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _watch(processes, private, timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        results = [_result(rank, process.exitcode, Path(private)) for rank, process in enumerate(processes)]
    failures = [result for result in results if isinstance(result, RankError)]
    if failures and check:
        # What the others say is mostly that somebody is gone; those that were ended at last have nothing to say.
        failures.sort(key=lambda f: (f.message.endswith("-9"), "gloo" in f.message, getattr(f, "time", 0)))
        raise failures[0]
    return results


def execute(rank, world_size, script, *arguments):
    """Be what `python -c script RANK WORLD_SIZE …` is, and return what it prints; for `run_ranks` with backend=None."""
    sys.argv = ["-c", *map(str, (rank, world_size, *arguments))]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def _watch(processes, private, timeout):
    """Wait until every rank has ended, one has failed and the grace is over, or time is up."""
    deadline = time.monotonic() + timeout
    running = list(processes)
    failed = False
    while running and (left := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in running], timeout=left)
        running = [process for process in running if process.exitcode is None]
        if not failed and any(process.exitcode for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    if running:
        time.sleep(0.3)


def _result(rank, exitcode, private):
    try:
        result = pickle.loads((private / f"{rank}.result").read_bytes())
    except FileNotFoundError:
        log = (private / f"{rank}.log").read_text(errors="replace") if (private / f"{rank}.log").exists() else ""
        return RankLost(rank, "RankLost", f"no result, exit status {exitcode}", log[-6000:])
    kind, value = result
    if kind == "returned":
        return value
    error = RankError(rank, *value)
    error.time = value_time(private, rank)
    return error


def value_time(private, rank):
    """When the rank said what happened to it."""
    return (private / f"{rank}.result").stat().st_mtime_ns


def _load(file, qualname):
    """Return the function: from the module of that file, imported under a name of its own."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == file and module.__name__ != "__mp_main__":
            break
    else:
        name = "_rank_" + Path(file).stem
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return getattr(module, qualname)


def _run(rank, world_size, private, timeout, backend, target, args):
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(os.path.join(private, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.manual_seed(0)
        if backend is not None:
            dist.init_process_group(
                backend,
                init_method=f"file://{private}/rendezvous",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
        result = _load(*target)(rank, world_size, *args)
        _write(private, rank, ("returned", result))
        if backend is not None and dist.is_initialized():
            dist.barrier()  # so that nobody takes an early farewell for a failure
            dist.destroy_process_group()
    except BaseException as error:
        _write(private, rank, ("raised", _picklable(error)))
        os._exit(1)  # without a farewell to the group: the others may never answer
    os._exit(0)


def _picklable(error):
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = None
    exception = sys.exc_info()[1]
    return type(exception).__name__, str(exception), trace, error


def _write(private, rank, result):
    path = os.path.join(private, f"{rank}.part")
    with open(path, "wb") as file:
        pickle.dump(result, file)
    os.replace(path, os.path.join(private, f"{rank}.result"))


def _end_with_parent():
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
