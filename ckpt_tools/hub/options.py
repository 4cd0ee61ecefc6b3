"""Options of whatever pushes to the hub: `push`, and `export-lora --push`."""

from __future__ import annotations

from typing import Annotated

from ckpt_tools.options import Option

Private = Annotated[bool, Option("Create it private; never send to a public one.")]
CreatePr = Annotated[bool, Option("Open a pull request instead of committing.")]
Revision = Annotated[str | None, Option("main by default.", metavar="BRANCH")]
CommitMessage = Annotated[str | None, Option("Of the commit.", metavar="TEXT")]
License = Annotated[str | None, Option("For the model card: apache-2.0, …", metavar="NAME")]
Endpoint = Annotated[str | None, Option("HF_ENDPOINT or huggingface.co by default.", metavar="URL")]
