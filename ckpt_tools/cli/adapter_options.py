"""Options of the commands that read adapters."""

from __future__ import annotations

from typing import Annotated

import typer

Alpha = Annotated[
    float | None,
    typer.Option("--alpha", envvar="CKPT_ALPHA", metavar="VALUE", help="lora_alpha of the training run."),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base", envvar="CKPT_BASE", metavar="DIR", help="The base model: modules and shapes are held against it."
    ),
]
AdapterName = Annotated[
    str | None, typer.Option("--adapter", envvar="CKPT_ADAPTER", metavar="NAME", help="Which one, of several.")
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        envvar="CKPT_CONFIG",
        metavar="FIELD=VALUE",
        help="A setting of PEFT's configuration that neither tensors nor files tell (repeatable).",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse an adapter when a setting of its run must be assumed."),
]
Architecture = Annotated[
    str | None,
    typer.Option(
        "--architecture",
        envvar="CKPT_ARCHITECTURE",
        metavar="flux1|flux2|sdxl|sd3|llm",
        help="Model family, where the names do not tell it.",
    ),
]
