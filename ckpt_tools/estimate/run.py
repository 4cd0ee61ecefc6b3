"""Estimate from a process that imports no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.estimate.child import JOB_NAME, RESULT_NAME
from ckpt_tools.estimate.evaluate import evaluate, propose
from ckpt_tools.estimate.options import Case, EstimateOptions
from ckpt_tools.estimate.report import Estimate, estimate_from_json
from ckpt_tools.estimate.source import config_path, find_figures
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.smoke.journal import error_of

_BOOT = """
import json, sys
with open(sys.argv[1] + "/path.json") as file:
    sys.path[:] = json.load(file)
from ckpt_tools.estimate.child import main
main(sys.argv[1])
"""
_NO_CONFIG = "there is no config.json, and nothing to run"


def run_estimate(options: EstimateOptions) -> Estimate:
    """Say how much memory a training run takes on the rank that holds the most.

    With a config.json, two training steps run in a process of their own, on tensors without data, and PyTorch's own
    tracker counts; the formula stands beside it. Otherwise the formula alone answers.

    Args:
        options: The model, and the ways to train it.

    Raises:
        UsageError: A model that cannot be built, or a mesh that cannot be.
        UnreadableError: A checkpoint without a config that cannot be described.
    """
    start = time.perf_counter()
    config = config_path(options)
    result = _by_formula(options) if config is None else _in_child(options, config)
    return replace(result, seconds=time.perf_counter() - start)


def _by_formula(options: EstimateOptions) -> Estimate:
    title, figures, notes = find_figures(options)

    def none(case: Case) -> str:  # noqa: ARG001 - what a tracker takes
        return _NO_CONFIG

    cases = evaluate(figures, options, none)
    return Estimate(
        model=title,
        params=figures.params,
        cases=cases,
        gpu_memory=options.gpu_memory,
        proposals=propose(figures, options, cases, none) if options.advise else (),
        notes=notes,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _in_child(options: EstimateOptions, config: str) -> Estimate:
    with tempfile.TemporaryDirectory(prefix="ckpt-estimate-", ignore_cleanup_errors=True) as directory:
        job = {"options": options.to_text(), "config": os.path.abspath(config), "parent": os.getpid()}
        _write(os.path.join(directory, JOB_NAME), job)
        # Not the current directory, which may be somebody's checkpoint, with a torch.py in it.
        _write(os.path.join(directory, "path.json"), [entry for entry in sys.path if entry])
        with open(os.path.join(directory, "log"), "w+b") as log:
            process = subprocess.Popen(  # noqa: S603 - this Python, with arguments of our own
                [sys.executable, "-P", "-c", _BOOT, directory],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(directory),
                start_new_session=True,
            )
            try:
                process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return estimate_from_json(_result(process.returncode, directory))


def _write(path: str, value: object) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def _environment(directory: str) -> dict[str, str]:
    """Return the child's environment: no network, no GPU, nothing of torchrun, nothing left behind."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        and not name.startswith(("TORCHELASTIC_", "CKPT_"))
    }
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    quiet = {
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    inside = {"TMPDIR": directory, "TORCHINDUCTOR_CACHE_DIR": os.path.join(directory, "inductor")}
    return environment | one_thread | quiet | inside


def _result(returncode: int, directory: str) -> dict[str, Any]:
    try:
        with open(os.path.join(directory, RESULT_NAME), encoding="utf-8") as file:
            result: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        with open(os.path.join(directory, "log"), encoding="utf-8", errors="replace") as log:
            tail = log.read()[-3000:].strip()
        if returncode < 0:
            name = signal.Signals(-returncode).name
            raise CkptError(f"the process that estimates was ended by {name}") from None
        last = tail.splitlines()[-1] if tail else f"exit status {returncode}"
        error = CkptError(f"the process that estimates has failed: {last}")
        if tail:
            error.add_note(tail)
        raise error from None
    if "error" in result:
        raise error_of(result["error"])
    return result
