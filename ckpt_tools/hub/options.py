"""Options of whatever pushes to the hub: `push`, and `export-lora --push`."""

from __future__ import annotations

from typing import Annotated

from ckpt_tools.options import Option

Private = Annotated[bool, Option("Create the repository as private; refuse a public one.")]
CreatePr = Annotated[bool, Option("Open a pull request instead of committing.")]
Revision = Annotated[str | None, Option("Branch (default: main).", metavar="BRANCH")]
CommitMessage = Annotated[str | None, Option("Commit message.", metavar="TEXT")]
Endpoint = Annotated[str | None, Option("Address of the hub (default: HF_ENDPOINT, or huggingface.co).", metavar="URL")]
