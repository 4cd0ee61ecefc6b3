"""Onto the hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ckpt_tools.api.workers import ProgressFactory, default_num_workers
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.hub.card import CardFacts
from ckpt_tools.hub.plan import PushResult
from ckpt_tools.hub.push import CheckLevel, Push, PushOptions


def push(
    directory: str | os.PathLike[str],
    repo: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    dry_run: bool = False,
    card: CardFacts | bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    delete_stale: bool = False,
    check: CheckLevel = "sent",
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
    say: Callable[[str], None] | None = None,
    bars: bool = False,
) -> PushResult:
    """Push a directory to the hub in one commit, and check what arrived.

    What is there must be whole, as `verify` sees it. The commit is made on the state that the plan was made on, or not
    at all. The directory is not written to: a model card, or the keys that its README.md lacks, are only sent.

    Args:
        directory: A model, an adapter or a checkpoint.
        repo: "namespace/name", or "name" for one of the token's user; created if it does not exist.
        private: Create it as a private one; a public one is refused.
        create_pr: Open a pull request instead of committing.
        revision: Branch; main by default.
        commit_message: First line of the commit, and after an empty line the rest.
        token: By default HF_TOKEN, or what `hf auth login` stored.
        endpoint: By default HF_ENDPOINT, or huggingface.co.
        dry_run: Plan only: nothing is sent, nothing created.
        card: What the model card says besides what the configs say; False for none.
        include: Globs of the files to push; all but hidden ones by default.
        exclude: Globs of the files to leave out.
        delete_stale: Delete weights that only the hub has, beside the new ones.
        check: "sent" reads back what was sent, "all" everything, "names" compares the hub's own digests only.
        num_workers: Threads that read and upload.
        progress: Makes the receiver of progress.
        say: Told what takes long.
        bars: Let the hub's client draw its own bars while it uploads.

    Raises:
        UsageError: Options that contradict each other, or names that cannot be.
        UnreadableError: The directory holds something that is not whole, or changes meanwhile.
        AdapterRefusedError: It holds an adapter that would load and change nothing, or not load.
        HubError: The hub refused or is away, or somebody else committed meanwhile.
    """
    path = os.fspath(directory)
    if not os.path.isdir(path):
        if os.path.lexists(path):
            raise UsageError("push takes a directory", where=path)
        raise UnreadableError("no such directory", where=path)
    options = PushOptions(
        repo=repo,
        private=private,
        create_pr=create_pr,
        revision=revision,
        commit_message=commit_message,
        token=token,
        endpoint=endpoint,
        dry_run=dry_run,
        card=card,
        include=include,
        exclude=exclude,
        delete_stale=delete_stale,
        check=check,
    )
    job = Push(
        directory=path,
        options=options,
        num_workers=num_workers or default_num_workers(),
        progress=progress,
        bars=bars,
    )
    if say is not None:
        job.say = say
    return job.run()
