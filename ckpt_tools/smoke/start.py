"""Start a smoke run from a process that imports no torch, or take part in torchrun's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckpt_tools.checkpoint import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.opening import open_path
from ckpt_tools.smoke.assemble import merge
from ckpt_tools.smoke.journal import error_of, events_path, read_events
from ckpt_tools.smoke.options import SmokeOptions, absolute
from ckpt_tools.smoke.report import PhaseResult, SmokeReport, report_from_json
from ckpt_tools.units import format_size
from ckpt_tools.verify import verify

OnPhase = Callable[[str, str], None]
"""Told about progress: the phase, and "begun", "done" or "failed"."""

DATA_LIMIT_BYTES = 2 << 30
"""Checkpoints up to this size are read whole to find damage; of larger ones only the structure is checked."""
_POLL_S = 0.05
_BOOT = """
import json, sys
with open(sys.argv[1] + "/path.json") as file:
    sys.path[:] = json.load(file)
from ckpt_tools.smoke.launcher import main
main(sys.argv[1])
"""


def run_smoke(
    options: SmokeOptions,
    *,
    on_phase: OnPhase | None = None,
    on_abandoned: Callable[[SmokeReport], None] | None = None,
) -> SmokeReport:
    """Try a model with a checkpoint, a mesh and a strategy, and say what is wrong.

    Starts one process per rank on this machine; none of them outlives the call, nor the calling process. Under
    torchrun the processes that are there are the ranks, and every one makes the same call.

    Args:
        options: What to try.
        on_phase: Told when a phase begins and ends on rank 0.
        on_abandoned: Only under torchrun: given the report when ranks hang. The process then ends with exit status
            3, since nothing else ends a thread that waits in a collective. By default the findings go to stderr.

    Returns:
        The report; under torchrun `is_primary` says which rank's is to be shown.

    Raises:
        UsageError: Options, mesh or model that cannot be.
        UnreadableError: The source is not a complete checkpoint.
        CkptError: The ranks could not be started.
    """
    label = options.label
    options = replace(options, source=absolute(options.source), model=absolute(options.model))
    # Schedulers set RANK and WORLD_SIZE as well, for processes of which each may start ranks of its own.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from ckpt_tools.smoke.torchrun import run_in_torchrun

        is_first = os.environ["RANK"] == "0"
        check = SourceCheck(options if is_first else replace(options, source=None))
        speak = on_abandoned or _print_findings
        report = run_in_torchrun(
            options,
            on_phase=on_phase,
            on_abandoned=lambda report: speak(check.add_to(replace(report, source=label))),
            run_local=lambda others, saved: run_local(others, saved=saved),
        )
        return check.add_to(replace(report, source=label))
    check = SourceCheck(options)
    result = run_local(options, on_phase=on_phase)
    return check.add_to(replace(report_from_json(result["report"]), source=label))


def _print_findings(report: SmokeReport) -> None:
    for finding in report.findings:
        print(f"{finding.severity}: {finding.code}: {finding.where}: {finding.what}", file=sys.stderr)  # noqa: T201


class SourceCheck:
    """Verifies the source in a thread of its own, while the ranks start.

    Args:
        options: With the source.

    Raises:
        UnreadableError: It is no checkpoint at all.
    """

    def __init__(self, options: SmokeOptions) -> None:
        self._options = options
        self._findings: tuple[Finding, ...] = ()
        self._what = "there is no checkpoint"
        self._seconds = 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if options.source is not None:
            with open_path(options.source):
                pass
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            with open_path(self._options.source or "") as opened:
                is_small = opened.checkpoint.total_bytes <= DATA_LIMIT_BYTES
                found = verify(opened, level="data" if is_small else "structure", num_workers=1)
        except BaseException as error:  # noqa: BLE001 - raised where the thread is joined
            self._error = error
        else:
            self._findings = found.findings
            size = format_size(opened.checkpoint.total_bytes)
            read = f"{size} read" if is_small else f"{size}, headers only: ckpt verify reads every byte"
            self._what = f"{found.tensors} tensors, {read}"
        self._seconds = time.perf_counter() - start

    def add_to(self, report: SmokeReport) -> SmokeReport:
        """Return `report` with the phase "source" and its findings."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        ok = None if self._thread is None else not any(f.severity == "error" for f in self._findings)
        phase = PhaseResult(name="source", ok=ok, seconds=round(self._seconds, 3), what=self._what)
        return replace(report, phases=(phase, *report.phases[1:]), findings=merge([*self._findings, *report.findings]))


def run_local(
    options: SmokeOptions, *, saved: dict[str, Any] | None = None, on_phase: OnPhase | None = None
) -> dict[str, Any]:
    """Run the launcher, and return what it found.

    Raises:
        CkptError: What it raised, or that it ended without a word.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-smoke-", ignore_cleanup_errors=True) as directory:
        job = {"options": options.to_text(), "parent": os.getpid(), "saved": saved}
        _write(os.path.join(directory, "job.json"), job)
        # Not the current directory, which may be somebody's checkpoint, with a torch.py in it.
        _write(os.path.join(directory, "path.json"), [entry for entry in sys.path if entry])
        with open(os.path.join(directory, "launcher.log"), "w+b") as log:
            process = subprocess.Popen(  # noqa: S603 - this Python, with arguments of our own
                [sys.executable, "-P", "-c", _BOOT, directory],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(directory),
                start_new_session=True,
            )
            try:
                _follow(process, directory, on_phase)
            finally:
                _end(process)
        return _result(process.returncode, directory)


def _write(path: str, value: object) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def _environment(directory: str) -> dict[str, str]:
    """Return the launcher's environment: one thread per process, no network, nothing of torchrun, nothing left."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        and not name.startswith(("TORCHELASTIC_", "TORCH_NCCL_", "CKPT_"))
    }
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # Asking whether there are GPUs must not begin to use them: the ranks are forked.
    quiet = {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    inside = {"TMPDIR": directory, "TORCHINDUCTOR_CACHE_DIR": os.path.join(directory, "inductor")}
    return environment | one_thread | quiet | inside


def _follow(process: subprocess.Popen[bytes], directory: str, on_phase: OnPhase | None) -> None:
    """Wait for the launcher, which watches the ranks, and pass on what rank 0 reports."""
    told = [0, 0]
    while not _has_ended(process):
        for number, name in enumerate(("world", "reload")):
            events = read_events(events_path(os.path.join(directory, name), 0))
            for event in events[told[number] :]:
                if on_phase is not None and event["kind"] in ("phase", "done"):
                    state = "begun" if event["kind"] == "phase" else "done" if event["ok"] else "failed"
                    on_phase(event["name"], state)
            told[number] = len(events)
        time.sleep(_POLL_S)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Has the launcher ended? It is not collected yet: its number stays that of its session."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, flags) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and everything in its session; on return there is nothing left of it."""
    if process.stdin is not None:
        process.stdin.close()
    deadline = time.monotonic() + 5
    if not _has_ended(process):
        os.kill(process.pid, signal.SIGTERM)  # it ends its ranks first
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(returncode: int, directory: str) -> dict[str, Any]:
    try:
        with open(os.path.join(directory, "result.json"), encoding="utf-8") as file:
            result: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        with open(os.path.join(directory, "launcher.log"), encoding="utf-8", errors="replace") as log:
            tail = log.read()[-3000:].strip()
        if returncode < 0:
            name = signal.Signals(-returncode).name
            hint = "the machine may have run out of memory: try fewer ranks, or --memory" if name == "SIGKILL" else None
            raise CkptError(f"the process that starts the ranks was ended by {name}", hint=hint) from None
        last = tail.splitlines()[-1] if tail else f"exit status {returncode}"
        error = CkptError(f"the process that starts the ranks has failed: {last}")
        if tail:
            error.add_note(tail)
        raise error from None
    if "error" in result:
        raise error_of(result["error"])
    return result
