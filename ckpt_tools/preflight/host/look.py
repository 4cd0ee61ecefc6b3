"""Looks at this machine: /proc, /sys, nvidia-smi and the paths of a config. torch is read, and not imported."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import resource
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import TypeVar

from ckpt_tools.errors import CkptError
from ckpt_tools.memory import available_bytes, limit_left
from ckpt_tools.preflight.host.machine import SHARED_MEMORY, Device, Host, Place
from ckpt_tools.preflight.host.needs import Needs
from ckpt_tools.storage.publish import nearest_parent
from ckpt_tools.storage.staging import free_bytes

_SECONDS = 10.0
"""How long one look may take: a dead file server or name server answers never."""
_MAX_LOOKS = 64
"""Paths that are looked at, at once."""
_QUERY = "index,name,memory.total,memory.used,driver_version,uuid"
_PROBE_BYTES = 4096
_OTHERS = ("/dev/kfd", "/dev/davinci*", "/dev/accel*", "/dev/hl[0-9]*", "/dev/neuron*", "/dev/cambricon*")
"""Devices of other makers, whom nobody here can count."""
Value = TypeVar("Value")


def look_at(needs: Needs) -> Host:
    """Look at this machine, and at the paths, host and port that a run needs. Takes seconds at most."""
    devices, driver = _devices()
    torch, cuda = _torch()
    address, port = needs.meeting
    addresses = _in_time({"": lambda: _resolve(address)} if address else {}).get("")
    return Host(
        devices=devices,
        driver=driver,
        torch=torch,
        torch_cuda=cuda,
        nccl=_nccl(),
        memory_bytes=available_bytes(),
        shm_bytes=_size(SHARED_MEMORY),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        processes_left=limit_left("pids.max", "pids.current"),
        has_infiniband=bool(glob.glob("/sys/class/infiniband/*")),
        has_compat_libraries=bool(glob.glob("/usr/local/cuda*/compat/libcuda.so*")),
        places=_in_time({path: partial(_place, path, writes=path in needs.saves) for path in needs.paths}),
        addresses=addresses,
        port_is_free=_is_free(port) if port and addresses and _is_here(addresses) else None,
    )


def _in_time(looks: Mapping[str, Callable[[], Value]]) -> dict[str, Value]:
    """Return what looks find that end in time, all at once. A thread that hangs in the kernel cannot be ended."""
    found: dict[str, Value] = {}

    def look(name: str) -> None:
        with suppress(OSError, ValueError, CkptError):
            found[name] = looks[name]()

    threads = [Thread(target=look, args=(name,), daemon=True) for name in list(looks)[:_MAX_LOOKS]]
    for one in threads:
        one.start()
    end = time.monotonic() + _SECONDS
    for one in threads:
        one.join(max(0.0, end - time.monotonic()))
    return dict(found)


def _devices() -> tuple[tuple[Device, ...] | None, str | None]:
    """Return the GPUs that the job sees, and their driver."""
    words = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    except (OSError, subprocess.TimeoutExpired):
        rows = []
    rows = [row for row in rows if len(row) == _QUERY.count(",") + 1 and row[0].isdecimal()]
    if rows:
        seen = _visible(rows)
        return tuple(Device(name=row[1], total_bytes=_mib(row[2]), used_bytes=_mib(row[3])) for row in seen), rows[0][4]
    found = glob.glob("/proc/driver/nvidia/gpus/*")
    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _text("/proc/driver/nvidia/version"))
    if not found:  # other makers' GPUs have no file here
        return (None if any(map(glob.glob, _OTHERS)) else ()), None
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(found) if asked is None else min(len(found), len(_ids(asked)))
    return tuple(Device(name="GPU") for _ in range(count)), driver[1] if driver is not None else None


def _visible(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows that CUDA_VISIBLE_DEVICES lets the job see; CUDA stops at the first id that does not exist."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return rows
    seen: list[list[str]] = []
    for one in _ids(asked):
        row = next((row for row in rows if row[0] == one or row[5].startswith(one)), None)
        if row is None:
            break
        seen.append(row)
    return seen


def _ids(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip() and one.strip() != "-1"]


def _mib(text: str) -> int | None:
    return int(text) * 2**20 if text.isdecimal() else None


def _torch() -> tuple[str | None, str | None]:
    """Return torch's version and the CUDA that it was built for, as its `version.py` has them."""
    spec = importlib.util.find_spec("torch")
    folder = None if spec is None or spec.origin is None else os.path.dirname(spec.origin)
    text = "" if folder is None else _text(os.path.join(folder, "version.py"))
    version, cuda = (
        re.search(rf"^{name}\b[^=\n]*= *(?:'([^']*)'|None)", text, re.MULTILINE) for name in ("__version__", "cuda")
    )
    return version and version[1], None if cuda is None else cuda[1] or ""


def _nccl() -> str | None:
    spec = importlib.util.find_spec("torch")
    site = "" if spec is None or spec.origin is None else os.path.dirname(os.path.dirname(spec.origin))
    found = glob.glob(os.path.join(glob.escape(site), "nvidia_nccl_cu*.dist-info")) if site else []
    return os.path.basename(found[0]).rpartition("-")[2].removesuffix(".dist-info") if found else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(100_000)
    except OSError:
        return ""


def _size(path: str) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _place(path: str, *, writes: bool) -> Place:
    near = nearest_parent(path)
    problem, ahead = _probe(near) if writes and near != os.sep else ("", None)
    return Place(
        path=path,
        exists=os.path.exists(path),
        is_rootless=near == os.sep and os.path.abspath(path) != os.sep,
        filesystem=_filesystem(near),
        free_bytes=free_bytes(path),
        problem=problem,
        seconds_ahead=ahead,
    )


def _probe(folder: str) -> tuple[str, float | None]:
    """Write a small file, and remove it: why that fails, and what the file system's clock is ahead."""
    name = os.path.join(folder, f".ckpt-preflight-{secrets.token_hex(8)}")
    try:
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        return error.strerror or "it cannot be written to", None
    try:
        os.write(handle, bytes(_PROBE_BYTES))
        os.fsync(handle)
        return "", os.fstat(handle).st_mtime - time.time()
    except OSError as error:
        return error.strerror or "it cannot be written to", None
    finally:
        os.close(handle)
        os.unlink(name)


def _filesystem(path: str) -> str | None:
    """Return the type of the file system that a path lies on."""
    path, best, kind = os.path.realpath(path), "", None
    for line in _text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        at = before.split()[4].encode().decode("unicode_escape") if len(before.split()) > 4 else ""
        if at and (path == at or path.startswith(at.rstrip("/") + "/")) and len(at) >= len(best):
            best, kind = at, after.split()[0] if after else None
    return kind


def _resolve(name: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(str(one[4][0]) for one in socket.getaddrinfo(name, None)))
    except (OSError, UnicodeError):
        return ()


def _is_here(addresses: Iterable[str]) -> bool:
    """Can a socket be bound to one of some addresses: is it this machine's?"""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as one:
                one.bind((address, 0))
                return True
        except OSError:
            continue
    return False


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True
