"""Options of whatever pushes to the hub: `push`, and `export-lora --push`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckpt_tools.options import AnyPath, Argument, Doc, Option, common

CheckLevel = Literal["sent", "all", "names"]
"""What is read back: what was sent, everything, or nothing; the hub's own digests are compared all the same."""
Relation = Literal["adapter", "finetune", "quantized", "merge"]
"""How the hub's tree of models hangs a model under its base."""

Private = Annotated[bool, Option("Create the repository as private; refuse a public one.")]
CreatePr = Annotated[bool, Option("Open a pull request instead of committing.")]
Revision = Annotated[str | None, Option("Branch (default: main).", metavar="BRANCH")]
CommitMessage = Annotated[str | None, Option("Commit message.", metavar="TEXT")]
AcceptAssumed = Annotated[
    bool, Option("Publish settings that no file or option states (scale, rsLoRA, base model) as assumed.")
]
Endpoint = Annotated[str | None, Option("Address of the hub (default: HF_ENDPOINT, or huggingface.co).", metavar="URL")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPush:
    """How `ckpt export-lora` pushes what it has written."""

    push: Annotated[
        str | None,
        Option("Hub repository to push the result to, as `ckpt push` does.", metavar="REPO", after="exclude"),
    ] = None
    private: Private = False
    create_pr: CreatePr = False
    revision: Revision = None
    commit_message: CommitMessage = None
    accept_assumed: AcceptAssumed = False
    endpoint: Endpoint = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushView:
    """What `ckpt push` takes in place of facts for the card."""

    no_card: Annotated[bool, Option("Write no model card, and add nothing to README.md.", after="commit_message")] = (
        False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFields:
    """What the user says for a model card."""

    base_model: Annotated[
        str | None, Option("Hub id of the base model, for the model card.", metavar="ORG/NAME", after="commit_message")
    ] = None
    relation: Annotated[
        Relation | None,
        Option("Relation to the base model, if ckpt cannot tell.", name="--base-model-relation"),
    ] = None
    pipeline_tag: Annotated[
        str | None, Option("Task for the model card: text-to-image, text-generation, …", metavar="TASK")
    ] = None
    tags: Annotated[Sequence[str], Option("Tag for the model card (repeatable).", name="--tag", metavar="TAG")] = ()
    instance_prompt: Annotated[str | None, Option("Trigger words, for the model card.", metavar="TEXT")] = None
    samples: Annotated[
        AnyPath | None,
        Option("Directory of sample images or videos with their prompts, for the card's gallery.", metavar="DIR"),
    ] = None
    license: Annotated[str | None, Option("License for the model card: apache-2.0, other, …", metavar="NAME")] = None
    license_name: Annotated[str | None, Option("Name of a custom license (with other).", metavar="NAME")] = None
    license_link: Annotated[str | None, Option("URL or LICENSE file of that license.", metavar="LINK")] = None
    languages: Annotated[
        Sequence[str], Option("Language code for the card (repeatable).", name="--language", metavar="CODE")
    ] = ()
    datasets: Annotated[
        Sequence[str], Option("Hub id of a dataset (repeatable).", name="--dataset", metavar="ORG/NAME")
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFields:
    """The options of `push`."""

    directory: Annotated[
        AnyPath, Argument("Directory to push (a model, an adapter, a checkpoint), or the file of an image LoRA.", "SRC")
    ] = field(kw_only=False)
    repo: Annotated[str, Argument("Repository, NAMESPACE/NAME or a NAME of yours; created if new.", "REPO")] = field(
        kw_only=False
    )
    private: Private = False
    create_pr: CreatePr = False
    revision: Revision = None
    commit_message: CommitMessage = None
    include: Annotated[
        Sequence[str],
        Option("Files to upload (repeatable). Without a slash, names in every directory match.", metavar="GLOB"),
    ] = ()
    exclude: Annotated[Sequence[str], Option("Files to skip (repeatable).", metavar="GLOB")] = ()
    accept_assumed: AcceptAssumed = False
    replace_card: Annotated[bool, Option("Replace a README.md on the hub that somebody else has changed.")] = False
    keep_pickles: Annotated[bool, Option("Upload pickles and code as well, which can run when loaded.")] = False
    also: Annotated[
        Sequence[str],
        Option(
            "Programs to add a converted copy of the LoRA for (repeatable, or with commas).",
            metavar="comfyui|diffusers|kohya",
        ),
    ] = ()
    delete_stale: Annotated[bool, Option("Delete weights beside the new ones that only the hub has.")] = False
    check: Annotated[
        CheckLevel,
        Option("Files to read back: those sent (of small ones 100), all, or none; all digests are always compared."),
    ] = "sent"
    token: Annotated[str | None, Doc("Access token (default: HF_TOKEN, or that of `hf auth login`).")] = field(
        default=None, repr=False
    )
    endpoint: Endpoint = None
    dry_run: Annotated[
        bool, Option("Print the plan, compared with the hub if there is a token; upload nothing.", short="-n")
    ] = False
    num_workers: common.NumWorkers = None
    progress: common.Progress = None
    log: Annotated[Callable[[str], None] | None, Doc("Called with a line of text before each slow step.")] = None
    bars: Annotated[bool, Doc("Let the hub's client draw its own bars while it uploads.")] = False
