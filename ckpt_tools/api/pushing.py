"""Onto the hub."""

from __future__ import annotations

import os

from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.hub.plan import PushResult
from ckpt_tools.hub.push import Push, PushOptions
from ckpt_tools.options import default_num_workers, takes
from ckpt_tools.remote.places import is_remote
from ckpt_tools.storage.run_folder import leased


@takes(PushOptions)
def push(options: PushOptions) -> PushResult:
    """Push a directory to the hub in one commit, and check what arrived.

    The directory must be complete, as `verify` judges it. The commit is made on the revision that was planned
    for, or not at all. The directory is not written to: a model card, or the keys that its README.md lacks, are only
    uploaded.

    Raises:
        UsageError: Options that contradict each other, or invalid names.
        UnreadableError: The directory holds something incomplete, or changes meanwhile.
        AdapterRefusedError: It holds an adapter that would not load, or would load and change nothing.
        HubError: The hub refused or cannot be reached, or somebody else committed meanwhile.
    """
    path = os.fspath(options.directory)
    if is_remote(path):
        hint = f"bring it here first: ckpt gather {path} DIR, and push DIR"
        raise UsageError("push takes a directory of this machine", where=path, hint=hint)
    if not os.path.isdir(path):
        if os.path.lexists(path):
            raise UsageError("push takes a directory", where=path)
        raise UnreadableError("no such directory", where=path)
    with leased(path):
        return Push(options, options.num_workers or default_num_workers()).run()
