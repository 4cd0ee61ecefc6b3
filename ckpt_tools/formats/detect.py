"""Which format a path holds, from file names alone; and which other tool's layout it is, with the way out."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

from ckpt_tools.checkpoint import Format
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.dcp import METADATA_NAME
from ckpt_tools.formats.hf import INDEX_SUFFIX, SHARDED_FILE
from ckpt_tools.text import escape_name

FORMATS: tuple[Format, ...] = ("safetensors", "hf", "dcp", "hf-sharded")
"""Values of `--from`."""

_WEIGHTS = (
    "*.safetensors", "*.distcp", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx",
    "*.onnx_data", "*.gguf", "*.npz", "*.ot", "*.tflite", "*.index.json",
)  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_HF_ASSETS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab*", "merges.txt", "*.model", "chat_template*", "*processor*.json", "*.jinja", "*.py", "README.md",
    "LICENSE*", "modules.json", "*_Pooling/config.json", "*sentence*.json",
)  # fmt: skip


def detect(files: Mapping[str, int], *, path: str) -> Format:
    """Return the format of a directory.

    Args:
        files: Relative name → size, as `Source.list_files` gives them.
        path: The directory as the user named it, for messages.

    Raises:
        UnreadableError: Nothing that ckpt reads; the message names the layout when it is known.
    """
    top = [name for name in files if "/" not in name]
    if METADATA_NAME in top:
        return "dcp"
    if any(SHARDED_FILE.fullmatch(name) for name in top):
        return "hf-sharded"
    if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in top):
        return "hf"
    raise _explain(files, top, escape_name(path))


def _explain(files: Mapping[str, int], top: list[str], path: str) -> UnreadableError:
    if any(name.endswith(".distcp") for name in top):
        hint = "use the checkpoint before it, or save it again"
        if any(re.fullmatch(r"__\d+\.metadata", name) for name in top):
            hint = "use_collectives=False writes one metadata file per rank and no .metadata: save without it"
        return UnreadableError(
            "a DCP checkpoint without .metadata: the save was killed before it finished",
            where=path,
            hint=hint,
        )
    directories = sorted({name.partition("/")[0] for name in files if "/" in name})
    found = [
        directory
        for directory in directories
        if any(
            name.rpartition("/")[2] == METADATA_NAME or name.endswith((".safetensors", INDEX_SUFFIX))
            for name in files
            if name.startswith(directory + "/")
        )
    ]
    if any(name.startswith("pytorch_model_fsdp") for name in directories):
        child = escape_name(next(name for name in directories if name.startswith("pytorch_model_fsdp")))
        return UnreadableError(
            "an accelerate checkpoint: the model lies in a directory of its own",
            where=path,
            hint=f"use {path.rstrip('/')}/{child} for the model"
            + (f", {path.rstrip('/')}/optimizer_0 for the optimizer" if "optimizer_0" in directories else ""),
        )
    if any(re.fullmatch(r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt", name) for name in top):
        return UnreadableError(
            "a verl checkpoint: one pickled DTensor state dict per rank, which ckpt does not execute",
            where=path,
            hint=_verl_hint(files, path.rstrip("/")),
        )
    if "zero_to_fp32.py" in top or ("latest" in top and any(d.startswith("global_step") for d in directories)):
        return UnreadableError(
            "a DeepSpeed checkpoint, which ckpt does not read",
            where=path,
            hint="run its zero_to_fp32.py with --safe_serialization, then use the result",
        )
    if "metadata.pkl" in top:
        return UnreadableError(
            "a torch_checkpointing checkpoint (metadata.pkl), which ckpt does not read",
            where=path,
            hint="save with torch.distributed.checkpoint, or export safetensors from the trainer",
        )
    if any(re.fullmatch(r"pytorch_model_fsdp(_\d+)?\.bin", name) for name in top):
        return UnreadableError(
            "accelerate's pickle of a whole model (FULL_STATE_DICT), which ckpt does not execute",
            where=path,
            hint="save with SHARDED_STATE_DICT: ckpt reads its pytorch_model_fsdp_0. Of an adapter under FSDP2, older "
            "accelerate put rank 0's part alone into this file",
        )
    if any(re.fullmatch(r"pytorch_model_fsdp.*\.bin|.*_rank\d+\.bin", name) for name in top):
        return UnreadableError(
            "a directory of per-rank pickles (use_dcp=False), which ckpt does not execute",
            where=path,
            hint="save with SHARDED_STATE_DICT and DCP, or FULL_STATE_DICT and safetensors",
        )
    if any(name.endswith(_PICKLES) for name in top):
        return UnreadableError(
            "only pickled weights, which ckpt does not execute",
            where=path,
            hint="convert them to safetensors first (model.save_pretrained in a trusted environment)",
        )
    if found:
        shown = ", ".join(escape_name(name) for name in found[-4:])
        latest = max(found, key=_step)
        return UnreadableError(
            f"a directory of checkpoints, not a checkpoint (it holds {shown})",
            where=path,
            hint=f"use {path.rstrip('/')}/{escape_name(latest)}",
        )
    return UnreadableError(
        "no tensors here: neither .metadata nor safetensors files",
        where=path,
        hint="pass a safetensors file, a model directory or a DCP checkpoint directory",
    )


def _verl_hint(files: Mapping[str, int], path: str) -> str:
    """Point at the weights beside verl's own files when there are any: often it saves config and tokenizer alone."""
    if any(name.startswith("huggingface/") and name.endswith(".safetensors") for name in files):
        return f"use {path}/huggingface, which holds the model's weights"
    merge = f"python -m verl.model_merger merge --backend fsdp --local_dir {path} --target_dir MERGED"
    return f"merge it with verl itself: {merge}; or let it save `hf_model` too (checkpoint.save_contents)"


def pickle_hint(name: str) -> str | None:
    """Return the way out for a file of pickled weights that is named alone; None when it is none."""
    base = name.rpartition("/")[2]
    return _explain({base: 0}, [base], base).hint if base.endswith(_PICKLES) else None


def _step(name: str) -> tuple[int, str]:
    """Order checkpoint directories by the last number in their name."""
    numbers = re.findall(r"\d{1,18}", name)
    return (int(numbers[-1]) if numbers else -1, name)


def is_weights(name: str) -> bool:
    """Does a file of this name hold weights (in any tool's format)?"""
    base = name.rpartition("/")[2]
    return base == METADATA_NAME or any(fnmatch.fnmatchcase(base, pattern) for pattern in _WEIGHTS)


def is_step_file(name: str) -> bool:
    """Does a trainer keep a file of this name beside the DCP files of a step? Pickles of its own do, weights do not."""
    return "/" not in name and (name.endswith((*_PICKLES, ".pkl")) or not is_weights(name))


def is_hf_asset(name: str) -> bool:
    """Is a file of this name one that transformers or a tokenizer needs?"""
    return not is_weights(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in _HF_ASSETS)
