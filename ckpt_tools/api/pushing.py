"""Onto the hub."""

from __future__ import annotations

import os

from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.hub.plan import PushResult
from ckpt_tools.hub.push import Push, PushOptions
from ckpt_tools.options import default_num_workers, takes


@takes(PushOptions)
def push(options: PushOptions) -> PushResult:
    """Push a directory to the hub in one commit, and check what arrived.

    What is there must be whole, as `verify` sees it. The commit is made on the state that the plan was made on, or not
    at all. The directory is not written to: a model card, or the keys that its README.md lacks, are only sent.

    Raises:
        UsageError: Options that contradict each other, or names that cannot be.
        UnreadableError: The directory holds something that is not whole, or changes meanwhile.
        AdapterRefusedError: It holds an adapter that would load and change nothing, or not load.
        HubError: The hub refused or is away, or somebody else committed meanwhile.
    """
    path = os.fspath(options.directory)
    if not os.path.isdir(path):
        if os.path.lexists(path):
            raise UsageError("push takes a directory", where=path)
        raise UnreadableError("no such directory", where=path)
    return Push(options, options.num_workers or default_num_workers()).run()
