"""Runs `ckpt` commands, each in a process of its own that is forked from this one with everything imported.

Started with the shim preloaded; speaks JSON lines on its standard streams (see `harness.py`).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback


def _arm(request: dict, log: int) -> None:
    shim = ctypes.CDLL(None)
    numbers = (request["nth"], request["errno"], request["signal"], int(request["on"]))
    below, only, deny = (request[key].encode() for key in ("below", "only", "deny"))
    nth, error, signal_number, on = numbers
    short, free = ctypes.c_long(request["short"]), ctypes.c_long(request["free"])
    trace = int(request["trace"])
    shim.shim_arm(below, only, ctypes.c_long(nth), error, signal_number, on, short, free, deny, log, trace)


def _run(request: dict, out: int, err: int, log: int) -> None:
    """In the child: run the command and leave."""
    code = 70
    try:
        signal.alarm(60)  # a command that hangs is a failure, not a wait
        os.dup2(out, 1)
        os.dup2(err, 2)
        for name, limit in request["limits"].items():
            value = limit + (_virtual_bytes() if name == "RLIMIT_AS" else 0)  # beyond what the imports take
            resource.setrlimit(getattr(resource, name), (value, value))
        if request["uid"]:
            os.setgroups([])
            os.setresgid(*[request["uid"]] * 3)
            os.setresuid(*[request["uid"]] * 3)
        block_bytes = request["block_bytes"]
        if block_bytes:
            for module in ("transfer.plan", "checkpoint.formats.digest", "checkpoint.formats.manifest"):
                sys.modules[f"ckpt_tools.{module}"].BLOCK_BYTES = block_bytes  # type: ignore[attr-defined]
        from ckpt_tools.cli import main

        if request["below"]:
            _arm(request, log)
        try:
            code = main(request["argv"])
        except BaseException:
            traceback.print_exc()
        count = ctypes.CDLL(None).shim_disarm() if request["below"] else 0
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(log, f"count {count}\n".encode())
    finally:
        os._exit(code)


def _read(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read().decode(errors="replace")


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[0]) * resource.getpagesize()


class _Child:
    def __init__(self, request: dict, start: int = -1) -> None:
        self._streams = [os.memfd_create(name, 0) for name in ("out", "err", "log")]
        self.pid = os.fork()
        if self.pid == 0:
            if start >= 0:
                os.read(start, 1)  # ends when the server closes its end
            _run(request, *self._streams)

    def result(self, status: int) -> dict:
        """What it left, as `harness.Result` has it."""
        out, err, log = map(_read, self._streams)
        # A process that is killed may leave half a line behind.
        lines = [(word, rest) for word, space, rest in (line.partition(" ") for line in log.splitlines()) if space]
        counts = [int(rest) for word, rest in lines if word == "count"]
        return {
            "code": -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status),
            "out": out,
            "err": err,
            "hit": "".join(rest for word, rest in lines if word == "hit"),
            "count": counts[0] if counts else -1,
            "calls": [rest for word, rest in lines if word in ("hit", "call")],
        }


def _serve(request: dict) -> None:
    child = _Child(request)
    while True:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        _answer({"stopped": True})
        for number in json.loads(sys.stdin.readline()):
            os.kill(child.pid, number)
        os.kill(child.pid, signal.SIGCONT)
    _answer(child.result(status))


def _serve_crowd(requests: list[dict]) -> None:
    """Run them all at the same time."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    children = []
    for request in requests:
        children.append(_Child(request, reading))
    os.close(reading)
    os.write(writing, b"x" * len(requests))
    os.close(writing)
    _answer({"results": [child.result(os.waitpid(child.pid, 0)[1]) for child in children]})


def _answer(document: dict) -> None:
    _STDOUT.write(json.dumps(document) + "\n")
    _STDOUT.flush()


def _warm_up(commands: list[list[str]]) -> None:
    """Import what the commands import when they run, and build the parser: once, not in every process."""
    from ckpt_tools.cli import main

    for argv in commands:
        assert main(argv) == 0, argv


_STDOUT = os.fdopen(os.dup(1), "w")

if __name__ == "__main__":
    os.dup2(2, 1)  # what commands print here must not reach the answers
    os.environ.pop("LD_PRELOAD")
    _warm_up(json.loads(sys.stdin.readline()))
    _answer({"ready": True})
    for line in sys.stdin:
        document = json.loads(line)
        if isinstance(document, list):
            _serve_crowd(document)
        else:
            _serve(document)
