"""A machine, as far as a training job depends on it. None: nobody could look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """By whom ever, before the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A path of the config, on this machine."""

    path: str
    exists: bool
    is_rootless: bool = False
    """Not even the first directory of it is there."""
    filesystem: str | None = None
    """nfs4, lustre, ext4, …: of the path, or of the nearest directory above it."""
    free_bytes: int | None = None
    problem: str = ""
    """Why nothing can be written there; "" where it can, or was not tried."""
    seconds_ahead: float | None = None
    """What the file system's clock is ahead of this machine's."""

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
    """Version of the GPUs' driver: 550.54.15."""
    torch: str | None = None
    torch_cuda: str | None = None
    """CUDA that torch was built for: 12.8; "" for none."""
    nccl: str | None = None
    memory_bytes: int | None = None
    """That can still be allocated, within the job's limit."""
    shm_bytes: int | None = None
    """Size of /dev/shm."""
    open_files: int | None = None
    """Files that a process may open."""
    locked_bytes: int | None = None
    """Memory that a process may lock; -1 for no limit."""
    processes_left: int | None = None
    """Processes and threads that the job may still start; None where there is no limit."""
    has_infiniband: bool = False
    has_compat_libraries: bool = False
    """CUDA's forward-compatible libraries, with which an older driver may do."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Path as the config has it → what lies there."""
    addresses: tuple[str, ...] | None = None
    """Of the host that the ranks meet at; () where its name cannot be resolved."""
    port_is_free: bool | None = None
    """Of the port that they meet at, where that host is this one."""
