"""Options of whatever pushes to the hub."""

from __future__ import annotations

from typing import Annotated

import typer

Private = Annotated[
    bool, typer.Option("--private", envvar="CKPT_PRIVATE", help="Create it private; never send to a public one.")
]
CreatePr = Annotated[
    bool, typer.Option("--create-pr", envvar="CKPT_CREATE_PR", help="Open a pull request instead of committing.")
]
Revision = Annotated[
    str | None, typer.Option("--revision", envvar="CKPT_REVISION", metavar="BRANCH", help="main by default.")
]
Message = Annotated[
    str | None, typer.Option("--commit-message", envvar="CKPT_COMMIT_MESSAGE", metavar="TEXT", help="Of the commit.")
]
Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint", envvar="CKPT_ENDPOINT", metavar="URL", help="HF_ENDPOINT or huggingface.co by default."),
]
License = Annotated[
    str | None,
    typer.Option("--license", envvar="CKPT_LICENSE", metavar="NAME", help="For the model card: apache-2.0, …"),
]
