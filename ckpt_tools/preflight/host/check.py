"""Compares a machine with what a run needs of it: a pure function of the two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.host.machine import SHARED_MEMORY, Host, Place
from ckpt_tools.preflight.host.needs import Needs
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""CUDA → the oldest driver that runs all its minor versions. Source: NVIDIA, CUDA Compatibility, table 1."""
_USED_BYTES = 2**30
"""Of a GPU, before the job: more than a driver or a desktop takes."""
_SHM_BYTES = 2**30
_LOCKED_BYTES = 64 * 2**20
_OPEN_FILES = 1024
_THREADS = 32
"""Of one rank: torch's, NCCL's and the data loader's."""
_SECONDS = 60.0
"""That clocks may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult:
    """What is wrong with a machine, what it has, and what nobody could look at."""

    findings: tuple[Finding, ...]
    what: str
    not_checked: tuple[str, ...]


def check_host(host: Host, needs: Needs) -> HostResult:
    """Compare a machine with what a run needs of it."""
    findings = (*_devices(host, needs), *_software(host), *_memory(host, needs), *_limits(host, needs))
    meeting = tuple(_meeting(host, needs))
    places = tuple(one for path in needs.paths if path in host.places for one in _place(host.places[path], needs))
    return HostResult(
        findings=(*findings, *places, *meeting),
        what=_describe(host),
        not_checked=tuple(_not_checked(host, needs)),
    )


def _describe(host: Host) -> str:
    names = sorted({one.name for one in host.devices or ()})
    parts = [
        "" if host.devices is None else f"{len(host.devices)} GPUs{f' ({escape_name(names[0])})' if names else ''}",
        f"driver {host.driver}" if host.driver else "",
        f"torch {host.torch}" + (f" for CUDA {host.torch_cuda}" if host.torch_cuda else "") if host.torch else "",
        f"NCCL {host.nccl}" if host.nccl else "",
        "" if host.memory_bytes is None else f"{format_size(host.memory_bytes)} of memory",
    ]
    return ", ".join(part for part in parts if part)


def _devices(host: Host, needs: Needs) -> Iterator[Finding]:
    devices, ranks = host.devices, needs.ranks
    if devices is None or ranks is None or not needs.uses_gpus:
        return
    if len(devices) < ranks:
        what = f"{ranks} ranks start here, and {len(devices)} GPUs are visible"
        hint = "start as many ranks as there are GPUs, or look at CUDA_VISIBLE_DEVICES and the job's --gpus-per-node"
        yield Finding.error("host-gpus", "GPUs", what, hint)
    for index, one in enumerate(devices[:ranks]):
        if one.used_bytes is not None and one.used_bytes > _USED_BYTES:
            what = f"GPU {index} has {format_size(one.used_bytes)} in use before the run starts"
            yield Finding.warning("host-gpus", f"GPU {index}", what, "end what runs there (nvidia-smi)")
    if len({(one.name, one.total_bytes) for one in devices[:ranks]}) > 1:
        yield Finding.warning("host-gpus", "GPUs", "the GPUs differ: the smallest sets the limit", "take equal ones")


def _software(host: Host) -> Iterator[Finding]:
    if not host.devices or host.torch is None:
        return
    if host.torch_cuda == "":
        what = f"torch {host.torch} was built without CUDA, and there are {len(host.devices)} GPUs"
        yield Finding.error("host-driver", "torch", what, "install a build of torch for CUDA")
    major = (host.torch_cuda or "").partition(".")[0]
    least = _DRIVERS.get(int(major)) if major.isdecimal() else None
    parts = [int(part) for part in (host.driver or "").split(".")[:2] if part.isdecimal()]
    if least is not None and parts and tuple(parts) < least and not host.has_compat_libraries:
        needed = ".".join(map(str, least))
        what = f"driver {host.driver}, and torch for CUDA {host.torch_cuda} needs {needed} at least"
        yield Finding.error("host-driver", "driver", what, "update the driver, or install a torch for an older CUDA")


def _memory(host: Host, needs: Needs) -> Iterator[Finding]:
    if host.memory_bytes is None:
        return
    needed = needs.gathered_bytes + needs.resident_bytes
    if needed > host.memory_bytes:
        parts = {"gathers for a save": needs.gathered_bytes, "is offloaded": needs.resident_bytes}
        said = " and ".join(f"{format_size(size)} {name}" for name, size in parts.items() if size)
        what = f"{said}, and {format_size(host.memory_bytes)} can be allocated here"
        yield Finding.error(
            "host-memory", "memory", what, "SHARDED_STATE_DICT, less offloading, or more memory for the job"
        )


def _limits(host: Host, needs: Needs) -> Iterator[Finding]:
    ranks = needs.ranks or 1
    if host.shm_bytes is not None and host.shm_bytes < _SHM_BYTES and ranks > 1:
        what = f"{format_size(host.shm_bytes)}: NCCL and data loaders pass tensors through it"
        yield Finding.warning("host-shm", SHARED_MEMORY, what, "docker run --shm-size=16g, or --ipc=host")
    if host.open_files is not None and 0 <= host.open_files < _OPEN_FILES:
        what = f"a process may open {host.open_files} files: data loaders and shards need more"
        yield Finding.warning("host-limit", "ulimit -n", what, "ulimit -n 65536")
    if host.has_infiniband and host.locked_bytes is not None and 0 <= host.locked_bytes < _LOCKED_BYTES:
        what = f"a process may lock {format_size(host.locked_bytes)}: NCCL cannot register its buffers with InfiniBand"
        yield Finding.error("host-limit", "ulimit -l", what, "ulimit -l unlimited (docker: --ulimit memlock=-1)")
    if host.processes_left is not None and host.processes_left < ranks * _THREADS:
        what = f"{host.processes_left} more processes and threads may start, and {ranks} ranks need {ranks * _THREADS}"
        yield Finding.error("host-limit", "pids.max", what, "raise the limit of the job's control group (--pids-limit)")


def _place(place: Place, needs: Needs) -> Iterator[Finding]:
    where = escape_name(place.path)
    if place.path not in needs.saves:
        if not place.exists:
            make = Finding.error if place.path.startswith("/") else Finding.warning  # where will the job be started?
            yield make("host-path", where, "it is not on this machine", "mount it, or mend the path")
        return
    if place.is_rootless:
        what = "checkpoints go there, and not even its first directory is here: is something not mounted?"
        yield Finding.warning("host-write", where, what, "mount it, or mend the path")
    if place.problem:
        what = f"checkpoints go there, and a file cannot be written: {place.problem}"
        yield Finding.error("host-write", where, what, "look at mounts, permissions and quotas")
    size, free = needs.checkpoint_bytes, place.free_bytes
    if size is not None and free is not None and free < size * needs.kept:
        what = f"{format_size(free)} are free, and one checkpoint has {format_size(size)}"
        hint = f"free {format_size(size * needs.kept)} for the {needs.kept} that are kept, or save elsewhere"
        make = Finding.error if free < size else Finding.warning
        yield make("host-disk", where, what + (f"; {needs.kept} are kept" if needs.kept > 1 else ""), hint)
    if place.is_volatile:
        yield Finding.warning("host-write", where, f"it lies in memory ({place.filesystem})", "save to a disk")
    elif needs.nodes is not None and needs.nodes > 1 and place.filesystem is not None and not place.is_shared:
        what = f"{needs.nodes} machines save there, and it is {place.filesystem}, which others may not see"
        yield Finding.warning("host-write", where, what, "save to a file system that all machines share")
    if place.seconds_ahead is not None and abs(place.seconds_ahead) > _SECONDS:
        what = f"its clock differs from this machine's by {abs(place.seconds_ahead):.0f} s"
        yield Finding.warning("host-clock", where, what, "synchronise the clocks: files would seem to be of the future")


def _meeting(host: Host, needs: Needs) -> Iterator[Finding]:
    address, port = needs.meeting
    if address and host.addresses == ():
        what = f"ranks meet at {escape_name(address)}, whose name cannot be resolved here"
        yield Finding.error("host-port", "MASTER_ADDR", what, "the address of the first machine")
    if host.port_is_free is False and needs.is_first:
        yield Finding.error("host-port", "MASTER_PORT", f"port {port} is in use on this machine", "another MASTER_PORT")


def _not_checked(host: Host, needs: Needs) -> Iterator[str]:
    if host.devices is None:
        yield "host: GPUs: nvidia-smi does not answer, and they are not NVIDIA's"
    elif needs.ranks is None and needs.uses_gpus:
        yield "host: a GPU for each rank: neither the config nor the environment says how many start here"
    if host.devices and (host.torch is None or host.driver is None):
        yield "host: driver and CUDA: torch or the driver was not found"
    if needs.saves and needs.checkpoint_bytes is None:
        yield "host: room for checkpoints: the size of the model is not known here"
    if not needs.saves:
        yield "host: where checkpoints go: the config does not say"
    silent = [path for path in needs.paths if path not in host.places]
    yield from (f"host: {escape_name(path)}: it could not be looked at in time" for path in silent)
