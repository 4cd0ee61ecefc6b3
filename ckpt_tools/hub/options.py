"""Options of whatever pushes to the hub: `push`, and `export-lora --push`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckpt_tools.options import Option

Private = Annotated[bool, Option("Create the repository as private; refuse a public one.")]
CreatePr = Annotated[bool, Option("Open a pull request instead of committing.")]
Revision = Annotated[str | None, Option("Branch (default: main).", metavar="BRANCH")]
CommitMessage = Annotated[str | None, Option("Commit message.", metavar="TEXT")]
Endpoint = Annotated[str | None, Option("Address of the hub (default: HF_ENDPOINT, or huggingface.co).", metavar="URL")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPush:
    """How `ckpt export-lora` pushes what it has written."""

    push: Annotated[
        str | None,
        Option("Then push it to the hub, as `ckpt push DST REPO` does.", metavar="REPO", after="exclude"),
    ] = None
    private: Private = False
    create_pr: CreatePr = False
    revision: Revision = None
    commit_message: CommitMessage = None
    endpoint: Endpoint = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushView:
    """What `ckpt push` takes in place of facts for the card."""

    no_card: Annotated[bool, Option("Write no model card, and add nothing to README.md.", after="commit_message")] = (
        False
    )
