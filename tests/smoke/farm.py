"""One process that has imported torch and transformers, and forks a smoke run's launcher whenever a test wants one.

Everything after the imports is real: launcher, ranks, watchdog, report. `tests/cli/test_smoke.py` starts the
program itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback

from ckpt_tools.preflight.smoke.messages import Launched, LaunchJob
from ckpt_tools.preflight.smoke.options import SmokeOptions
from ckpt_tools.preflight.smoke.run import LAUNCH
from ckpt_tools.sandbox import wire
from ckpt_tools.sandbox.child import environment, read_answer

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from smoke.farm import serve; serve()"


class Farm:
    """The process; use as a context."""

    def __enter__(self):
        path = json.dumps([entry for entry in sys.path if entry])
        self._directory = tempfile.TemporaryDirectory(prefix="farm-")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(self._directory.name, gpu=True),
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exception):
        self._process.stdin.close()
        self._process.wait(timeout=20)
        self._process.stdout.close()
        self._directory.cleanup()

    def call(self, function, *args):
        """Call "module:function" with JSON arguments in a fork."""
        self._process.stdin.write(json.dumps([function, args]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer == "done", answer

    def smoke(self, *, path=None, plugin=None, **options):
        """Run the launcher; return the report, or raise what it raised.

        Args:
            path: Directory to import a factory from, in addition.
            plugin: "module:function" that the launcher calls first.
            **options: Of the run.
        """
        options.setdefault("timeout_s", 60.0)
        with tempfile.TemporaryDirectory(prefix="farm-") as directory:
            job = json.loads(wire.dumps(LaunchJob(options=SmokeOptions(**options))))
            self.call("smoke.farm:launch", directory, str(path or ""), job, plugin)
            return read_answer(directory, Launched).report


def launch(directory, path, job, plugin):
    """Be the launcher."""
    from ckpt_tools.sandbox.child import serve

    if plugin is not None:
        module, name = plugin.split(":")
        getattr(importlib.import_module(module), name)()

    os.setsid()
    if path:
        sys.path.append(path)
    serve(directory, {"function": LAUNCH, "job": job, "parent": os.getppid()})


def serve():
    """Fork for every line on stdin, until there are no more."""
    from ckpt_tools.preflight.smoke.launcher import preload

    preload(SmokeOptions())
    with contextlib.suppress(ImportError):
        importlib.import_module("peft")  # a second of every rank that trains adapters
    for name in ("bert", "llama", "qwen3_moe", "t5"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    print("ready", flush=True)
    for line in sys.stdin:
        function, args = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(2, 1)
                module, name = function.split(":")
                getattr(importlib.import_module(module), name)(*args)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        print("done" if status == 0 else f"status {status}", flush=True)
