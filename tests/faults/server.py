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
    shim.shim_arm(below, only, ctypes.c_long(nth), error, signal_number, on, short, free, deny, log)


def _run(request: dict, out: int, err: int, log: int) -> None:
    """In the child: run the command and leave."""
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        for name, limit in request["limits"].items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        block_bytes = request["block_bytes"]
        if block_bytes:
            for module in ("plan", "digest", "formats.manifest"):
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


def _serve(request: dict) -> None:
    out, err, log = (os.memfd_create(name, 0) for name in ("out", "err", "log"))
    os.set_inheritable(log, True)
    pid = os.fork()
    if pid == 0:
        _run(request, out, err, log)
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        _answer({"stopped": True})
        for number in json.loads(sys.stdin.readline()):
            os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
    lines = _read(log).splitlines()
    counts = [int(line.split()[1]) for line in lines if line.startswith("count ")]
    hits = [line for line in lines if not line.startswith("count ")]
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    _answer(
        {
            "code": code,
            "out": _read(out),
            "err": _read(err),
            "hit": hits[0] if hits else "",
            "count": counts[0] if counts else -1,
        }
    )


def _answer(document: dict) -> None:
    _STDOUT.write(json.dumps(document) + "\n")
    _STDOUT.flush()


def _warm_up(commands: list[list[str]]) -> None:
    """Import what the commands import when they run, and build the parser: once, not in every process."""
    import typer.main

    from ckpt_tools.cli import main
    from ckpt_tools.cli.app import app

    parser = typer.main.get_command(app)
    typer.main.get_command = lambda _: parser
    for argv in commands:
        assert main(argv) == 0, argv


_STDOUT = os.fdopen(os.dup(1), "w")

if __name__ == "__main__":
    os.dup2(2, 1)  # what commands print here must not reach the answers
    os.environ.pop("LD_PRELOAD")
    _warm_up(json.loads(sys.stdin.readline()))
    _answer({"ready": True})
    for line in sys.stdin:
        _serve(json.loads(line))
