"""Is the machine that a job starts on what its config needs? Looked at before the job, in seconds, without a GPU."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Literal, TypeVar

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.memory import available_bytes, limit_left
from ckpt_tools.preflight.configs.config import Config
from ckpt_tools.preflight.model_facts import ModelFacts
from ckpt_tools.preflight.plain_values import words_of
from ckpt_tools.preflight.rules.rule import NotKnownError, Stated, Subject
from ckpt_tools.storage.publish import nearest_parent
from ckpt_tools.storage.staging import free_bytes
from ckpt_tools.text import counted, escape_name
from ckpt_tools.units import format_size

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, and not written to
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "wekafs", "gluster", "afs", "panfs", "fuse", "9p")
"""How the types of file systems begin that several machines can see."""
_VOLATILE = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU that the job sees."""

    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPath:
    """A path of the config, on this machine."""

    path: str
    exists: bool
    is_rootless: bool = False  # Not even the first directory of it is there
    filesystem: str | None = None  # nfs4, lustre, ext4, …: of the path, or of the nearest directory above it
    free_bytes: int | None = None
    problem: str = ""  # Why nothing can be written there; "" where it can, or was not tried
    seconds_ahead: float | None = None  # What the file system's clock is ahead of this machine's

    @property
    def is_shared(self) -> bool:
        """Can other machines see it?"""
        return (self.filesystem or "").startswith(_SHARED)

    @property
    def is_volatile(self) -> bool:
        """Does it lie in memory?"""
        return self.filesystem in _VOLATILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What one machine has."""

    devices: tuple[Device, ...] | None = None
    driver: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    nccl: str | None = None
    memory_bytes: int | None = None  # That can still be allocated, within the job's limit
    shm_bytes: int | None = None
    open_files: int | None = None
    locked_bytes: int | None = None  # Memory that a process may lock; -1 for no limit
    processes_left: int | None = None
    """Processes and threads that the job may still start; None where there is no limit."""
    has_infiniband: bool = False
    has_compat_libraries: bool = False  # CUDA's forward-compatible libraries, with which an older driver may do
    places: Mapping[str, HostPath] = field(default_factory=dict)
    addresses: tuple[str, ...] | None = None
    port_is_free: bool | None = None


_KEPT = ("save_total_limit", "checkpoint.keep_latest_k", "trainer.max_actor_ckpt_to_keep", "ckpt.max_num")
_ONE_NODE = ("accelerate", "verl")
"""Trainers whose configs mean one machine where they name none; a launcher says it for the others."""
_NODES = ("num_machines", "trainer.nnodes", "actor.num_nodes", "actor_num_nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs of a machine. None: the config does not say."""

    ranks: int | None = None
    world_size: int | None = None
    nodes: int | None = None
    uses_gpus: bool = True
    saves: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()  # Files and directories of the data and the model that the config names as paths
    checkpoint_bytes: int | None = None
    kept: int = 1
    gathered_bytes: int = 0  # What one rank gathers in host memory at a save
    resident_bytes: int = 0  # What the ranks of this machine keep in host memory: offloaded parameters and moments
    meeting: tuple[str, int] = ("", 0)
    is_first: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths."""
        return tuple(dict.fromkeys((*self.saves, *self.reads)))


def needs_of(
    configs: tuple[Config, ...], facts: ModelFacts | None, environment: Mapping[str, str] = os.environ
) -> Needs:
    """Return what a run needs of this machine; several configs are parts of one run, the arguments last."""
    cases = [Subject(config=one, facts=facts or ModelFacts(where="")) for one in configs]
    spec = configs[-1].spec if configs else None
    world = _number(environment, "WORLD_SIZE") or (None if spec is None else spec.world_size)
    nodes = _number(environment, "NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or _whole(cases, *_NODES)
    if any(case.framework in _ONE_NODE for case in cases):
        nodes = nodes or 1
    ranks = _number(environment, "LOCAL_WORLD_SIZE")
    for case in cases:
        ranks = ranks or _whole([case], *words_of(case.framework, "ranks of a machine"))
    params = None if facts is None or (spec is not None and spec.adapter is not None) else facts.num_params
    width = 2 if spec is not None and spec.master_dtype in ("bf16", "f16") else 4
    state = None if params is None else 3 * width * params  # parameters and Adam's two moments
    address, port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT") or 0
    host = next((one.text for one in _options(cases, "main_process_ip")), "")
    return Needs(
        ranks=ranks or (None if world is None or nodes is None else -(-world // nodes)),
        world_size=world,
        nodes=nodes,
        uses_gpus=not any(one.is_on for one in _options(cases, "use_cpu", "no_cuda")),
        saves=tuple(_paths(cases, "saves")),
        reads=(*_paths(cases, "data"), *([spec.model] if spec and spec.model and _is_path(spec.model) else [])),
        checkpoint_bytes=state,
        kept=_whole(cases, *_KEPT) or 1,
        gathered_bytes=3 * 4 * params if params is not None and any(map(_gathers, cases)) else 0,
        resident_bytes=(state or 0) // (nodes or 1) if spec is not None and spec.offload_params else 0,
        meeting=(address or host, port or _whole(cases, "main_process_port") or 0),
        is_first=environment.get("SLURM_NODEID", environment.get("NODE_RANK", "0")) == "0",
    )


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    return next((int(text) for name in names if (text := environment.get(name, "")).isdecimal() and int(text)), None)


def _options(cases: list[Subject], *names: str) -> Iterator[Stated]:
    """Yield the options that are there, and are known."""
    for case in cases:
        for name in names:
            with suppress(NotKnownError):
                found = case.option(name)
                if found is not None:
                    yield found


def _whole(cases: list[Subject], *names: str) -> int | None:
    return next((one.count for one in _options(cases, *names) if one.count), None)


def _gathers(case: Subject) -> bool:
    with suppress(NotKnownError):
        return case.is_fsdp and case.spec.state_dict_type == "FULL_STATE_DICT"
    return False


def _paths(cases: list[Subject], what: Literal["saves", "data"]) -> Iterator[str]:
    """Yield the paths of some options; a name that is not written as a path may be the hub's."""
    for case in cases:
        for name in words_of(case.framework, what):
            head, is_list, tail = name.partition("[].")
            for found in _options([case], head):
                items = found.value if isinstance(found.value, list) else [found.value]
                values = [one.get(tail) if is_list and isinstance(one, Mapping) else one for one in items]
                always = what == "saves"
                texts = [one for one in values if isinstance(one, str) and one and "://" not in one]
                yield from (one for one in texts if always or _is_path(one))


def _is_path(text: str) -> bool:
    """Is it one path, and neither a pattern, a list, a URL nor the hub's name of something?"""
    is_one = not any(sign in text for sign in ("*", "?", "[", ",", "@"))
    return is_one and (text.startswith(("/", "./", "../")) or text.endswith(_ENDINGS))


_ENDINGS = (".json", ".jsonl", ".parquet", ".csv", ".arrow")


# Looks at this machine: /proc, /sys, nvidia-smi and the paths of a config. torch is read, and not imported.

_SECONDS = 10.0  # how long one look may take: a dead file server or name server answers never
_MAX_LOOKS = 64  # paths that are looked at, at once
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
        shm_bytes=_in_time({"": lambda: shutil.disk_usage(SHARED_MEMORY).total}).get(""),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        processes_left=limit_left("pids.max", "pids.current"),
        has_infiniband=bool(glob.glob("/sys/class/infiniband/*")),
        has_compat_libraries=bool(glob.glob("/usr/local/cuda*/compat/libcuda.so*")),
        places=_in_time({path: partial(_place, path, writes=path in needs.saves) for path in needs.paths}),
        addresses=addresses,
        port_is_free=_can_bind("", port) if port and any(_can_bind(one, 0) for one in addresses or ()) else None,
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
    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _contents("/proc/driver/nvidia/version"))
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
    text = "" if folder is None else _contents(os.path.join(folder, "version.py"))
    version, cuda = (
        re.search(rf"^{name}\b[^=\n]*= *(?:'([^']*)'|None)", text, re.MULTILINE) for name in ("__version__", "cuda")
    )
    return version and version[1], None if cuda is None else cuda[1] or ""


def _nccl() -> str | None:
    spec = importlib.util.find_spec("torch")
    site = "" if spec is None or spec.origin is None else os.path.dirname(os.path.dirname(spec.origin))
    found = glob.glob(os.path.join(glob.escape(site), "nvidia_nccl_cu*.dist-info")) if site else []
    return os.path.basename(found[0]).rpartition("-")[2].removesuffix(".dist-info") if found else None


def _contents(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(100_000)
    except OSError:
        return ""


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _place(path: str, *, writes: bool) -> HostPath:
    near = nearest_parent(path)
    problem, ahead = _probe(near) if writes and near != os.sep else ("", None)
    return HostPath(
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
    for line in _contents("/proc/self/mountinfo").splitlines():
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


def _can_bind(address: str, port: int) -> bool:
    """Can a socket be bound to an address of this machine, and a port that is free?"""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError, OverflowError), socket.socket(family, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((address, port))
        return True
    return False


# Compares a machine with what a run needs of it: a pure function of the two.

_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""CUDA → the oldest driver that runs all its minor versions. Source: NVIDIA, CUDA Compatibility, table 1."""
_USED_BYTES = 2**30  # of a GPU, before the job: more than a driver or a desktop takes
_SHM_BYTES = 2**30
_LOCKED_BYTES = 64 * 2**20
_OPEN_FILES = 1024
_THREADS = 32  # of one rank: torch's, NCCL's and the data loader's
_CLOCK_SECONDS = 60.0  # that clocks may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult:
    """What is wrong with a machine, what it has, and what nobody could look at."""

    findings: tuple[Finding, ...]
    what: str
    not_checked: tuple[str, ...]


def check_host(host: Host, needs: Needs) -> HostResult:
    """Compare a machine with what a run needs of it."""
    findings = (
        *_check_devices(host, needs),
        *_check_software(host),
        *_check_memory(host, needs),
        *_check_limits(host, needs),
    )
    meeting = tuple(_check_meeting(host, needs))
    places = tuple(one for path in needs.paths if path in host.places for one in _check_place(host.places[path], needs))
    return HostResult(
        findings=(*findings, *places, *meeting), what=_describe(host), not_checked=tuple(_not_checked(host, needs))
    )


def _describe(host: Host) -> str:
    names = sorted({escape_name(one.name) for one in host.devices or ()})
    parts = [
        "" if host.devices is None else counted(len(host.devices), "GPU") + f" ({', '.join(names)})" * bool(names),
        f"driver {host.driver}" if host.driver else "",
        f"torch {host.torch}" + (f" for CUDA {host.torch_cuda}" if host.torch_cuda else "") if host.torch else "",
        f"NCCL {host.nccl}" if host.nccl else "",
        "" if host.memory_bytes is None else f"{format_size(host.memory_bytes)} of memory",
    ]
    return ", ".join(part for part in parts if part)


def _check_devices(host: Host, needs: Needs) -> Iterator[Finding]:
    devices, ranks = host.devices, needs.ranks
    if devices is None or ranks is None or not needs.uses_gpus:
        return
    if len(devices) < ranks:
        what = f"{ranks} ranks start here, but only {len(devices)} GPUs are visible"
        hint = "start as many ranks as there are GPUs, or check CUDA_VISIBLE_DEVICES and the job's --gpus-per-node"
        yield Finding.error("host-gpus", "GPUs", what, hint)
    for index, one in enumerate(devices[:ranks]):
        if one.used_bytes is not None and one.used_bytes > _USED_BYTES:
            what = f"GPU {index} has {format_size(one.used_bytes)} in use before the run starts"
            yield Finding.warning("host-gpus", f"GPU {index}", what, "stop the process that uses it (nvidia-smi)")
    if len({(one.name, one.total_bytes) for one in devices[:ranks]}) > 1:
        yield Finding.warning("host-gpus", "GPUs", "the GPUs differ: the smallest sets the limit", "use equal GPUs")


def _check_software(host: Host) -> Iterator[Finding]:
    if not host.devices or host.torch is None:
        return
    if host.torch_cuda == "":
        what = f"torch {host.torch} was built without CUDA, but there are {len(host.devices)} GPUs"
        yield Finding.error("host-driver", "torch", what, "install a build of torch for CUDA")
    major = (host.torch_cuda or "").partition(".")[0]
    least = _DRIVERS.get(int(major)) if major.isdecimal() else None
    parts = [int(part) for part in (host.driver or "").split(".")[:2] if part.isdecimal()]
    if least is not None and parts and tuple(parts) < least and not host.has_compat_libraries:
        needed = ".".join(map(str, least))
        what = f"torch for CUDA {host.torch_cuda} needs driver {needed} or newer, got {host.driver}"
        yield Finding.error("host-driver", "driver", what, "update the driver, or install a torch for an older CUDA")


def _check_memory(host: Host, needs: Needs) -> Iterator[Finding]:
    if host.memory_bytes is None:
        return
    needed = needs.gathered_bytes + needs.resident_bytes
    if needed > host.memory_bytes:
        parts = {"gathered for a save": needs.gathered_bytes, "offloaded": needs.resident_bytes}
        said = " and ".join(f"{format_size(size)} {name}" for name, size in parts.items() if size)
        what = f"{said}, but only {format_size(host.memory_bytes)} can be allocated here"
        yield Finding.error(
            "host-memory", "memory", what, "use SHARDED_STATE_DICT, less offloading, or more memory for the job"
        )


def _check_limits(host: Host, needs: Needs) -> Iterator[Finding]:
    ranks = needs.ranks or 1
    if host.shm_bytes is not None and host.shm_bytes < _SHM_BYTES and ranks > 1:
        what = f"{format_size(host.shm_bytes)}: NCCL and data loaders pass tensors through it"
        yield Finding.warning("host-shm", SHARED_MEMORY, what, "start with docker run --shm-size=16g, or --ipc=host")
    if host.open_files is not None and 0 <= host.open_files < _OPEN_FILES:
        what = f"a process may open {host.open_files} files: data loaders and shards need more"
        yield Finding.warning("host-limit", "ulimit -n", what, "run ulimit -n 65536")
    if host.has_infiniband and host.locked_bytes is not None and 0 <= host.locked_bytes < _LOCKED_BYTES:
        what = f"a process may lock {format_size(host.locked_bytes)}: NCCL cannot register its buffers with InfiniBand"
        yield Finding.error("host-limit", "ulimit -l", what, "ulimit -l unlimited (docker: --ulimit memlock=-1)")
    if host.processes_left is not None and host.processes_left < ranks * _THREADS:
        what = f"{host.processes_left} more processes and threads can start, {ranks} ranks need {ranks * _THREADS}"
        yield Finding.error("host-limit", "pids.max", what, "raise the limit of the job's control group (--pids-limit)")


def _check_place(place: HostPath, needs: Needs) -> Iterator[Finding]:
    where = escape_name(place.path)
    if place.path not in needs.saves:
        if not place.exists:
            make = Finding.error if place.path.startswith("/") else Finding.warning  # where will the job be started?
            yield make("host-path", where, "no such file or directory on this machine", "mount it, or correct the path")
        return
    if place.is_rootless:
        what = "checkpoints are saved there, but even its top directory does not exist here"
        yield Finding.warning("host-write", where, what, "mount it, or correct the path")
    if place.problem:
        what = f"checkpoints are saved there, but a file cannot be written: {place.problem}"
        yield Finding.error("host-write", where, what, "check mounts, permissions and quotas")
    size, free = needs.checkpoint_bytes, place.free_bytes
    if size is not None and free is not None and free < size * needs.kept:
        what = f"{format_size(free)} are free, but one checkpoint needs {format_size(size)}"
        hint = f"free {format_size(size * needs.kept)} for the {needs.kept} that are kept, or save elsewhere"
        make = Finding.error if free < size else Finding.warning
        yield make("host-disk", where, what + (f"; {needs.kept} are kept" if needs.kept > 1 else ""), hint)
    if place.is_volatile:
        yield Finding.warning("host-write", where, f"it is in memory ({place.filesystem})", "save to a disk")
    elif needs.nodes is not None and needs.nodes > 1 and place.filesystem is not None and not place.is_shared:
        what = f"{needs.nodes} machines save there, but {place.filesystem} may not be shared between machines"
        yield Finding.warning("host-write", where, what, "save to a file system that all machines share")
    if place.seconds_ahead is not None and abs(place.seconds_ahead) > _CLOCK_SECONDS:
        what = f"its clock differs from this machine's by {abs(place.seconds_ahead):.0f} s"
        yield Finding.warning("host-clock", where, what, "synchronise the clocks: files would seem to be in the future")


def _check_meeting(host: Host, needs: Needs) -> Iterator[Finding]:
    address, port = needs.meeting
    if address and host.addresses == ():
        what = f"the rendezvous address {escape_name(address)} cannot be resolved here"
        yield Finding.error("host-port", "MASTER_ADDR", what, "set the address of the first machine")
    if host.port_is_free is False and needs.is_first:
        yield Finding.error("host-port", "MASTER_PORT", f"port {port} is in use on this machine", "change MASTER_PORT")


def _not_checked(host: Host, needs: Needs) -> Iterator[str]:
    if host.devices is None:
        yield "host: GPUs: nvidia-smi does not answer (only NVIDIA GPUs are checked)"
    elif needs.ranks is None and needs.uses_gpus:
        yield "host: a GPU for each rank: neither the config nor the environment sets the number of ranks here"
    if host.devices and (host.torch is None or host.driver is None):
        yield "host: driver and CUDA: torch or the driver was not found"
    if needs.saves and needs.checkpoint_bytes is None:
        yield "host: disk space for checkpoints: the size of the model is not known here"
    if not needs.saves:
        yield "host: where checkpoints are saved: not set in the config"
    silent = [path for path in needs.paths if path not in host.places]
    yield from (f"host: {escape_name(path)}: it did not answer in time" for path in silent)
