"""Is the machine that a job starts on what its config needs? Looked at before the job, in seconds, without a GPU."""

from ckpt_tools.preflight.host.check import HostResult, check_host
from ckpt_tools.preflight.host.look import look_at
from ckpt_tools.preflight.host.machine import Device, Host, Place
from ckpt_tools.preflight.host.needs import Needs, needs_of

__all__ = ["Device", "Host", "HostResult", "Needs", "Place", "check_host", "look_at", "needs_of"]
