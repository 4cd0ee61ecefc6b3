"""A process that runs commands over the corpus under an audit hook, a memory limit and a time limit.

Started as `python watch.py JOB`, with the product importable and nothing of the tests: JOB is a JSON file with the
runs; one JSON line per run goes to the file that it names. The hook reports every execution, import, process, socket
and library load, every file opened or listed outside of the roots of its case, and every change outside of the
destination's parent. It cannot be removed again, and is armed only while a command runs.
"""

from __future__ import annotations

import contextlib
import encodings.cp437  # noqa: F401  by which zipfile reads names
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import unicodedata

MEMORY_BYTES = 2 << 30
KILL_AFTER_S = 60

FORBIDDEN = (
    "exec", "compile", "import", "marshal.", "pickle.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "os.startfile", "os.kill", "os.putenv", "subprocess.", "pty.", "socket.", "ctypes.dl", "code.",
    "function.__new__", "object.__", "mmap.", "sys._", "sys.set", "builtins.input", "builtins.breakpoint", "cpython.",
    "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.", "sqlite3.", "winreg.", "tempfile.", "gc.", "syslog.",
    "os.setxattr", "os.chmod", "os.chown", "os.chflags", "os.utime", "os.symlink", "os.link", "os.chdir", "os.lockf",
)  # fmt: skip
HARMLESS = ("object.__getattr__", "sys._getframe")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "shutil.")
LOOKS = ("open", "os.listdir", "os.scandir", "os.walk", "glob.")
ALSO_READ = ("/proc/self/status", "/proc/meminfo", "/dev/null")
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def _source_of(code: object) -> object:
    """What a compile or exec event is about, the same each time that it happens."""
    return (code.co_code, code.co_names, repr(code.co_consts)) if hasattr(code, "co_code") else code


class Watch:
    """What the hook sees while a command runs."""

    def __init__(self) -> None:
        self.armed = False
        self.learns = False
        self.known: set[object] = set()
        self.roots: tuple[str, ...] = ()
        self.writable = ""
        self.seen: list[list[str]] = []

    def hook(self, event: str, args: tuple[object, ...]) -> None:
        if self.learns and event in ("compile", "exec"):
            self.known.add(_source_of(args[0]))
        if not self.armed:
            return
        self.armed = False  # what happens in here is not the command's doing
        try:
            self._look(event, args)
        finally:
            self.armed = True

    def _look(self, event: str, args: tuple[object, ...]) -> None:
        if event.startswith(HARMLESS) or (event == "mmap.__new__" and args[0] == -1):  # -1: memory, no file
            return
        if event in ("compile", "exec") and _source_of(args[0]) in self.known:
            return  # typer evaluates the annotations of our own functions
        if event.startswith(FORBIDDEN):
            self._say("import" if event == "import" else "execution", event, args)
        elif event.startswith(CHANGES):
            paths = [arg for arg in args if isinstance(arg, str | bytes)]
            directories = [arg for arg in args if type(arg) is int and arg >= 0]
            for path in paths:
                real = self._real(path, directories, follow=False)  # none of these follows the last link
                if real is not None and not self._is_in(real, (self.writable,)):
                    self._say("change", event, (real,))
        elif event.startswith(LOOKS):
            self._look_at_open(event, args)

    def _look_at_open(self, event: str, args: tuple[object, ...]) -> None:
        path = args[0] if args else None
        if not isinstance(path, str | bytes) or path in ALSO_READ:
            return  # a descriptor that is open already
        flags = args[2] if event == "open" and len(args) > 2 and isinstance(args[2], int) else 0
        real = self._real(path, [], follow=not flags & os.O_NOFOLLOW)
        if real is None:
            return
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            if not self._is_in(real, (self.writable,)):
                self._say("change", event, (real,))
        elif not self._is_in(real, (*self.roots, self.writable)):
            if flags & os.O_PATH and os.path.isdir(real):
                return  # a handle of a directory, to open beneath; nothing is read
            self._say("open", event, (real, flags))

    @staticmethod
    def _real(path: str | bytes, directories: list[object], *, follow: bool = True) -> str | None:
        """The path with links resolved; None for a name relative to a directory that only the kernel knows."""
        path = os.fsdecode(path)
        if not os.path.isabs(path):
            if "/" not in path and not os.path.lexists(path):
                if not directories:
                    return None  # shutil.rmtree walks by descriptors; its top was checked
                path = os.path.join(os.readlink(f"/proc/self/fd/{directories[-1]}"), path)
            else:
                path = os.path.abspath(path)
        if follow:
            return os.path.realpath(path)
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))

    @staticmethod
    def _is_in(path: str, roots: tuple[str, ...]) -> bool:
        return any(path == root or path.startswith(root + os.sep) for root in roots)

    def _say(self, kind: str, event: str, args: tuple[object, ...]) -> None:
        self.seen.append([kind, event, ascii(args)[:300]])


def unsafe_characters(text: str) -> str:
    """Characters of an output that could drive or deceive a terminal."""
    found = {char for char in text if char != "\n" and (not char.isprintable() or _INVISIBLE.match(char))}
    return "".join(sorted(f"U+{ord(char):04X} ({unicodedata.category(char)}) " for char in found))


def run(watch: Watch, argv: list[str]) -> dict[str, object]:
    """Run one command; what it said, what it did, and how much processor time it took."""
    from ckpt_tools.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict", write_through=True) for _ in range(2))
    watch.seen = []
    raised = ""
    code: int | None = None
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        watch.armed = True
        try:
            code = main(argv)
        except BaseException:  # a traceback is a finding, whatever it is
            watch.armed = False
            raised = traceback.format_exc()
        finally:
            watch.armed = False
    seconds = time.process_time() - start
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return {
        "code": code,
        "raised": raised,
        "seen": watch.seen,
        "seconds": seconds,
        "out": texts[0][:20_000],
        "err": texts[1][:20_000],
        "unsafe": unsafe_characters(texts[0] + texts[1]),
        "json": _json_problem(code, *texts) if "--json" in argv else "",
    }


def _json_problem(code: int | None, out: str, err: str) -> str:
    """A command with --json prints exactly one document: on stdout, or for an error on stderr."""
    text = out if code in (0, 3) else err
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"{error}: {text[:200]!a}"
    if code not in (0, 3) and document.get("exit_code") != code:
        return f"exit code {code}, the document says {document.get('exit_code')}"
    return "" if text.isascii() else "not ASCII"


def _peak_bytes() -> int:
    """Peak of resident memory; `ru_maxrss` would count what the parent had."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))


def main_loop(job_file: str) -> None:
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    os.chdir(job["cwd"])
    watch = Watch()
    sys.addaudithook(watch.hook)
    watch.learns = True
    for argv in job["warm_up"]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            from ckpt_tools.cli import main

            main(argv)
    watch.learns = False
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with open(job["results"], "w", encoding="utf-8") as results:
        for task in job["runs"]:
            watch.roots = tuple(map(os.path.realpath, task["roots"]))
            watch.writable = os.path.realpath(task["writable"])
            results.write(json.dumps({"start": task["id"]}) + "\n")
            results.flush()
            signal.alarm(KILL_AFTER_S)  # the default action: the parent sees which run did not end
            result = run(watch, task["argv"])
            after = []
            if result["code"] == 0:
                after = [run(watch, argv) for argv in task["then"]]
            signal.alarm(0)
            left = sorted(os.listdir(task["writable"]))
            result["left"] = [name for name in left if name.startswith(".ckpt-tmp-")]
            destination = task["destination"]
            result["exists"] = bool(destination) and os.path.isdir(destination) and not os.path.islink(destination)
            if destination and task["remove"] and result["exists"]:
                shutil.rmtree(destination)
            results.write(json.dumps({"id": task["id"], **result, "then": after}) + "\n")
            results.flush()
        results.write(json.dumps({"peak_bytes": _peak_bytes()}) + "\n")


if __name__ == "__main__":
    main_loop(sys.argv[1])
