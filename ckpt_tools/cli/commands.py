"""The table of commands, in the order in which --help shows them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Command(NamedTuple):
    """What is known of a command before it is loaded: names, of what is imported when it is needed."""

    run: str
    """Module of this package whose `run`, or the function named after a dot, prints the result."""
    options: str
    """Classes in `ckpt_tools.options`: of the library's function (- without one), then of the command line alone."""
    help: str


COMMANDS: dict[str, Command] = {
    "inspect": Command(
        "inspection",
        "check.InspectOptions check.InspectView",
        "Show what a checkpoint holds and how it is sharded, from its headers alone; with --mesh, how it would be.",
    ),
    "shard": Command(
        "convert",
        "convert.ShardOptions convert.RunOptions",
        "Convert full safetensors into a DTensor-sharded DCP checkpoint.",
    ),
    "gather": Command(
        "convert",
        "convert.GatherOptions convert.RunOptions",
        "Convert a sharded checkpoint into full safetensors that transformers loads.",
    ),
    "reshard": Command(
        "convert",
        "convert.ReshardOptions convert.RunOptions",
        "Convert a sharded checkpoint for another mesh, optimizer state and non-tensor items included.",
    ),
    "verify": Command(
        "verify",
        "check.VerifyOptions check.VerifyView",
        "Check that a checkpoint is complete and intact: every element exactly once, every byte as written.",
    ),
    "diff": Command(
        "diff",
        "check.DiffOptions check.DiffView",
        "Compare two checkpoints: names, shapes, dtypes and values. Exit code 3 when they differ.",
    ),
    "stats": Command(
        "stats",
        "check.StatsOptions check.StatsView",
        """
        Measure the values of every tensor: spread, extremes, zeros, NaN and Inf, and what stands out among layers.

        With --against, also how far training has moved each of them. Exit code 3 when a value is not finite, a frozen
        tensor has changed or nothing was trained.
        """,
    ),
    "scan": Command(
        "scan",
        "check.ScanOptions check.ScanView",
        """
        List what the files of a checkpoint would run when they are loaded: names in pickles, code. Executes nothing.

        Dangerous is what can start programs, run code, load more of it, or open files and connections: exit code 3.
        Unknown names and code that a model brings along are listed. Takes any file or directory.
        """,
    ),
    "smoke": Command(
        "smoke",
        "smoke.SmokeFields output.HtmlOptions",
        """
        Train a few steps under FSDP2, before a long run: does this checkpoint load, train, save and reload correctly?

        Everything is compared with the same model in one process: losses, gradients, norms. Under torchrun its
        processes are the ranks.
        """,
    ),
    "estimate": Command(
        "estimate",
        "estimate.EstimateFields output.HtmlOptions",
        """
        Estimate the memory of a training rank, strategy by strategy, and whether it fits a device.

        Runs a training step of the real model under FSDP2 on fake tensors and counts with PyTorch's own tracker. A
        formula gives a second opinion; it stands alone without a config, and for quantised weights.
        """,
    ),
    "preflight": Command(
        "preflight",
        "preflight.PreflightFields preflight.PreflightView",
        """
        Check a training run before it starts: will what a trainer's config describes start, fit, load and train?

        Reads the config without the trainer; checks it against rules, the model, the checkpoint and the memory of a
        device, and trains a few steps of a cut-down model. The report lists what was not checked; an option or a
        config that cannot be read is exit code 3.
        """,
    ),
    "export-lora": Command(
        "export_lora",
        "adapters.ExportOptions hub.ExportPush hub.CardFields",
        "Extract a LoRA-family adapter from any checkpoint and write it for PEFT, diffusers, kohya or ComfyUI.",
    ),
    "merge-lora": Command(
        "convert.convert",
        "adapters.MergeOptions",
        "Merge adapters (LoRA, DoRA, LoHa, LoKr, OFT, BOFT, …) into their base, streaming.",
    ),
    "commit": Command(
        "convert.convert",
        "rewrite.CommitOptions",
        "Publish what the parts of a conversion have written, when the last one died before it.",
    ),
    "average": Command(
        "convert.convert",
        "rewrite.AverageOptions",
        "Average the weights of several checkpoints (SWA, EMA, soups), streaming, in the format of the first.",
    ),
    "extract": Command(
        "convert.convert",
        "rewrite.ExtractOptions",
        "Write chosen tensors of a checkpoint, or the model of its first layers, in its own format.",
    ),
    "rename": Command(
        "convert.convert",
        "rewrite.RenameOptions",
        "Write a model's weights by the names of a key map, in its own format.",
    ),
    "check-lora": Command(
        "check_lora",
        "adapters.CheckOptions",
        "Check an adapter: is it whole, and will peft, diffusers, ComfyUI, kohya or vLLM load it and change anything?",
    ),
    "push": Command(
        "push",
        "hub.PushFields hub.PushView hub.CardFields",
        """
        Upload a directory to the Hugging Face hub in one commit, and check what arrived.

        The token comes from HF_TOKEN or `hf auth login`. Refuses incomplete files, and a branch that changed during
        the upload.
        """,
    ),
    "watch": Command(
        "runs",
        "runs.WatchOptions output.HtmlOptions",
        """
        Verify the checkpoints of a run as they are saved, and remove what is superseded.

        Knows how the Trainer, torchtitan, accelerate, verl, OpenRLHF, Lightning, axolotl, LLaMA-Factory and ai-toolkit
        name them. Removes nothing without --keep-last, --keep-every or --keep-best.
        """,
    ),
    "prune": Command(
        "runs",
        "runs.PruneOptions output.HtmlOptions",
        """
        Remove the checkpoints of a run that are verified and superseded.

        What `ckpt watch` has not verified stays, and so does what is in use. --dry-run says what would be freed.
        """,
    ),
    "env": Command("env", "- output.EnvOptions", "Print versions for a bug report."),
}


def load(name: str) -> Callable[..., int]:
    """Return a command as typer reads it: its options are imported, and what runs when it is called."""
    from ckpt_tools.cli.build import command

    found = COMMANDS[name]
    stated, *own = map(_find, found.options.split())

    def resolve() -> tuple[Callable[..., int], Callable[..., object] | None]:
        from ckpt_tools import api

        module, _, function = found.run.partition(".")
        run: Callable[..., int] = getattr(import_module(f"ckpt_tools.cli.{module}"), function or "run")
        return run, None if stated is None else getattr(api, name.replace("-", "_"))

    return command(stated, own, resolve)


def _find(name: str) -> Any:  # noqa: ANN401 - a class, or None for -
    module, _, kind = name.rpartition(".")
    return getattr(import_module(f"ckpt_tools.options.{module}"), kind) if module else None
