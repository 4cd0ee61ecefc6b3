"""The options of `export_lora`, `check_lora` and `merge_lora`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ckpt_tools.options import AnyPath, Argument, Doc, Option, common

ARCHITECTURES = (
    "sd1|sd2|sdxl|kolors|sd3|flux1|flux2|chroma|qwen_image|z_image|lumina2|sana|hidream|wan|hunyuan_video|"
    "hunyuan_video_1_5|ltx|ltx2|cogvideox|aura_flow|cosmos|mochi|kandinsky5|krea2|ideogram4|ernie_image|hunyuan_image|"
    "anima|llm"
)
"""As `adapters.architectures` has them, in its order."""
METHODS = (
    "sum|linear|ties|dare_linear|dare_ties|magnitude_prune|svd|ties_svd|dare_linear_svd|dare_ties_svd|"
    "magnitude_prune_svd"
)
"""As `adapters.merge` has them."""

Alpha = Annotated[float | None, Option("lora_alpha of the training run.", metavar="VALUE")]
Base = Annotated[AnyPath | None, Option("Base model, to check modules and shapes.", metavar="DIR")]
AdapterName = Annotated[str | None, Option("Adapter name, if there are several.", name="--adapter", metavar="NAME")]
Config = Annotated[
    Sequence[str],
    Option(
        "Setting of PEFT's configuration that neither tensors nor files contain (repeatable).", metavar="FIELD=VALUE"
    ),
]
Architecture = Annotated[str | None, Option("Model family, if the names do not show it.", metavar=ARCHITECTURES)]
Strict = Annotated[bool, Option("Refuse an adapter when a setting of its run must be assumed.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of `export_lora`."""

    source: Annotated[
        AnyPath,
        Argument("Source of the adapter: a training checkpoint (DCP), a PEFT directory, a safetensors file.", "SRC"),
    ] = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    to: Annotated[str, Option("Format to write.", metavar="peft|diffusers|kohya|comfyui|gguf|mlx")] = "peft"
    alpha: Alpha = None
    base_model: Annotated[str | None, Option("Hub id of the base model.", metavar="ORG/NAME")] = None
    base: Base = None
    adapter: AdapterName = None
    config: Config = ()
    live_config: Annotated[
        Mapping[str, object] | None, Doc("PEFT's configuration of the live model: `peft_config[name].to_dict()`.")
    ] = None
    architecture: Architecture = None
    svd_rank: Annotated[
        int | None,
        Option("Rank for what the format cannot express exactly; the error is reported.", metavar="R", min=1),
    ] = None
    dtype: Annotated[str | Any, Option("Dtype of the adapter's tensors.", metavar="keep|bf16|f16|f32")] = "keep"
    include: common.Include = ()
    exclude: common.Exclude = ()
    strict: Strict = False
    overwrite: common.Overwrite = False
    dry_run: common.DryRun = False
    format: common.From = None
    as_part: common.AsPart = False
    progress: common.Progress = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of `check_lora`."""

    source: Annotated[
        AnyPath, Argument("Source of the adapter: a safetensors file, a PEFT directory, a training checkpoint.", "SRC")
    ] = field(kw_only=False)
    base: Base = None
    loaders: Annotated[
        Sequence[str],
        Option(
            "Loader that must accept the whole adapter (repeatable; default: that of the adapter's own format).",
            name="--for",
            metavar="peft|diffusers|comfyui|kohya|invokeai|vllm|sglang|llama.cpp|mlx",
        ),
    ] = ()
    adapter: AdapterName = None
    architecture: Architecture = None
    format: common.From = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """The options of `merge_lora`."""

    base: Annotated[
        AnyPath,
        Argument("Base model: a safetensors file, a model directory, a diffusers pipeline or a DCP directory.", "BASE"),
    ] = field(kw_only=False)
    adapter: Annotated[
        AnyPath | Sequence[AnyPath],
        Argument("Adapters, each a PEFT directory, a safetensors file or a training checkpoint.", "ADAPTER"),
    ] = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    dtype: common.DTypeName = "keep"
    dtype_for: common.DTypeFor = ()
    scale: Annotated[float | None, Option("Factor for what the adapter adds (default: 1).", metavar="X")] = None
    weights: Annotated[
        str | Sequence[float],
        Option("Factor for what each adapter adds, in their order (default: 1 each).", metavar="X,X,…"),
    ] = ()
    combine: Annotated[
        str,
        Option("Method of combination: the exact sum of the changes, or a method of PEFT's.", metavar=METHODS),
    ] = "sum"
    density: Annotated[float | None, Option("Share of the elements that pruning methods keep.", metavar="P")] = None
    majority_sign: Annotated[
        Literal["total", "frequency"] | None, Option("Election of signs in the ties methods (default: total).")
    ] = None
    svd_rank: Annotated[int | None, Option("Rank of svd methods (default: the largest).", metavar="R", min=1)] = None
    seed: Annotated[int, Option("Seed of dare's random masks.", metavar="N", min=0)] = 0
    alpha: Alpha = None
    adapter_name: AdapterName = None
    config: Config = ()
    component: Annotated[str | None, Option("Component of a pipeline (default: by its names).", metavar="NAME")] = None
    untie: Annotated[bool, Option("Give a tied head a weight of its own; it and the embedding may differ.")] = False
    max_shard_size: common.MaxShardSize = None
    include: Annotated[Sequence[str], Option("Tensors of the adapter to take (repeatable).", metavar="GLOB")] = ()
    exclude: Annotated[Sequence[str], Option("Tensors of the adapter to skip (repeatable).", metavar="GLOB")] = ()
    strict: Strict = False
    overwrite: common.Overwrite = False
    keep_pickles: common.KeepPickles = False
    dry_run: common.DryRun = False
    num_workers: common.NumWorkers = None
    format: Annotated[
        str | None, Option("Format of BASE (default: detected).", name="--from", metavar=common.FORMATS)
    ] = None
    as_part: common.AsPart = False
    progress: common.Progress = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What `extract_lora` and `resize_lora` have in common."""

    rank: Annotated[
        int | None, Option("Rank; with --rank-by the highest (default of extract-lora: 8, or 128).", metavar="N", min=1)
    ] = None
    rank_by: Annotated[
        Literal["energy", "fro", "ratio"] | None,
        Option(
            "Rank of each module by --threshold: energy, share of the sum of singular values; fro, share of the norm; "
            "ratio, largest singular value ÷ smallest one kept (sd-scripts' sv_cumulative, sv_fro, sv_ratio)."
        ),
    ] = None
    threshold: Annotated[float | None, Option("Value for --rank-by: 0.9; for ratio 10.", metavar="X")] = None
    dtype: Annotated[str | Any, Option("Dtype of the factors (keep: BASE's, SRC's).", metavar="keep|bf16|f16|f32")] = (
        "keep"
    )
    dry_run: Annotated[bool, Option("Compute ranks and losses; write nothing.", short="-n")] = False
    overwrite: common.Overwrite = False
    progress: common.Progress = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractLoraOptions(RankOptions):
    """The options of `extract_lora`."""

    base: Annotated[AnyPath, Argument("Base model, in any format.", "BASE")] = field(kw_only=False)
    tuned: Annotated[AnyPath, Argument("Model trained from it, in any format.", "TUNED")] = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    to: Annotated[str, Option("Format to write.", metavar="peft|diffusers|kohya|comfyui")] = "peft"
    include: common.Include = ()
    exclude: common.Exclude = ()
    full: Annotated[
        bool, Option("Also write embeddings, norms and biases, whole (peft: modules_to_save; kohya, comfyui: diff).")
    ] = False
    device: Annotated[Literal["cpu", "cuda"], Option("Device that computes.")] = "cpu"
    names: common.LibraryNames = "auto"
    component: common.Component = None
    architecture: Architecture = None
    base_model: Annotated[str | None, Option("Hub id of the base model.", metavar="ORG/NAME")] = None
    strict: Annotated[bool, Option("Write nothing if a change is left out, or the models look swapped.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeLoraOptions(RankOptions):
    """The options of `resize_lora`."""

    source: Annotated[AnyPath, Argument("LoRA: a PEFT directory or a safetensors file.", "SRC")] = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    alpha: Alpha = None
