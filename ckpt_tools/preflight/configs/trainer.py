"""transformers' TrainingArguments, as JSON or YAML, and what TRL's scripts add to them.

Source: transformers 5.23 `training_args.py` (fields, `_process_fsdp_args`, `_apply_legacy_fsdp_to_config`),
`trainer.py`; TRL's `ModelConfig` and `SFTConfig` for adapters, quantisation and lengths.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.preflight.configs.deepspeed import deepspeed_rows
from ckpt_tools.preflight.configs.document import Document, find_file, read_document
from ckpt_tools.preflight.configs.field_rows import Given, ReaderInput, Table, TrainerReader, read_table, row
from ckpt_tools.preflight.configs.fsdp_plugin import (
    SECTION,
    PluginDefaults,
    plugin_mesh,
    plugin_rows,
    v2_strategy,
    without_prefix,
)
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.overrides import Program, read_flags, started
from ckpt_tools.preflight.configs.schema import STRATEGIES, section
from ckpt_tools.preflight.plain_values import as_truth, dtype_name
from ckpt_tools.preflight.spec import AdapterSpec, Engine

DEFAULTS = PluginDefaults(
    auto_wrap_policy="TRANSFORMER_BASED_WRAP", min_num_params=0, full_state_dict=True, cpu_ram_efficient_loading=False
)
"""Source: `_process_fsdp_args`."""
_TRL = ("sft", "dpo", "grpo", "kto", "reward", "rloo", "distillation")
"""Trainers that `trl` starts. Source: TRL 1.16 `cli/commands/__init__.py`."""
_TRL_SCRIPTS = ("trl/scripts/", "trl.scripts.")
_TRL_LENGTH = 1024  # tokens of a sample in `SFTConfig`, `DPOConfig`, `KTOConfig` and `RewardConfig`
_SCRIPTS = known("trainer", "arguments") | {
    "attn_implementation", "block_size", "dataset_config", "dataset_name", "dtype", "max_length", "max_seq_length",
    "model_name_or_path", "model_revision", "torch_dtype", "trust_remote_code",
}  # fmt: skip
"""Arguments that say nothing of TRL: transformers' example scripts have them too."""
_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_OWN = (
    *("output_dir", "fsdp", "fsdp_config", "optim"),
    *("model_name_or_path", "num_train_epochs", "gradient_checkpointing"),
)
"""Options of which such a file has one."""
_OTHERS = (
    *("base_model", "distributed_type", "compute_environment", "actor_rollout_ref"),
    *("parallelism", "training", "trainer"),
)
"""Options that make it somebody else's."""
_LLAMAFACTORY = (
    *("finetuning_type", "cutoff_len", "template model_name_or_path", "stage dataset_dir"),
    *("model dist_config", "model kernel_config", "model model_class", "model init_config"),
)
"""Options that LLaMA-Factory adds to Trainer's, with blanks between those that count together."""
OPTIONS = section("trainer")


def with_fsdp_file(values: Mapping[str, object], path: str) -> tuple[Mapping[str, object], tuple[Finding, ...]]:
    """Return the arguments with the options of the file that `fsdp_config` names in its place."""
    name = values.get(SECTION)
    if not isinstance(name, str):
        return values, ()
    problem = "no such file"
    place = find_file(name, (os.path.dirname(path), ""))  # Trainer itself looks in the current directory
    if place is not None:
        try:
            return {**values, SECTION: read_document(place).values or {}}, ()
        except CkptError as error:
            problem = error.what
    what = f"{name}: {problem}; its options are treated as not set"
    finding = Finding.error("missing-file", SECTION, what, "name a JSON file, or write its options below fsdp_config")
    return {key: value for key, value in values.items() if key != SECTION}, (finding,)


def _fsdp_words(value: object) -> tuple[tuple[str, ...] | None, tuple[Finding, ...]]:
    """Return what `fsdp` says: None for off, and what it says that Trainer does not know."""
    truth = as_truth(value)
    if value in (None, "", [], ()) or truth is False:
        return None, ()
    if truth is True:
        return (), ()
    if isinstance(value, str):
        items = tuple(value.split())
    elif isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        items = tuple(value)
    else:
        items = ("",)
    findings = tuple(
        Finding.error(
            "unknown-value",
            "fsdp",
            f"{item!r} is not an option of fsdp: Trainer rejects it",
            "set fsdp: true and put the rest into fsdp_config",
        )
        for item in items
        if item not in ("auto_wrap", "offload") and item.upper() not in STRATEGIES
    )
    return tuple(item.lower() for item in items), findings


def trainer_engine(given: Given) -> Engine:
    """Return the engine that TrainingArguments ask for."""
    raw = given.raw
    if _fsdp_words(raw.fsdp)[0] is not None:
        if raw.fsdp_config.xla:
            return "other"
        return "fsdp1" if raw.fsdp_config.version == 1 else "fsdp2"
    if raw.deepspeed:
        return "deepspeed"
    return "none" if given.spec.world_size == 1 else "ddp"


def _axes(given: Given) -> dict[str, int]:
    if given.spec.axes:
        return {axis: given.spec.axes.get(axis, 1) for axis in _AXES}
    if given.spec.engine in ("none", "other"):
        return {}
    return {"dp_replicate": -1} if given.spec.engine == "ddp" else {"dp_shard": -1}


def _v2_strategy(given: Given) -> tuple[str, bool | None]:
    items = _fsdp_words(given.raw.fsdp)[0] or ()
    return v2_strategy(given, default="shard_grad_op" not in items or "full_shard" in items)


def _offloads(given: Given) -> bool:
    asked = given.raw.fsdp_config.cpu_offload
    return "offload" in (_fsdp_words(given.raw.fsdp)[0] or ()) if asked is None else asked


def _trl_script(given: Given) -> str | None:
    """Return the trainer of TRL's that runs; '' where only some option shows that it is one of them."""
    for command in given.document.commands:
        for at, word in enumerate(command):
            if _program(command, at) == 2:
                return command[at + 1]
            if any(place in word for place in _TRL_SCRIPTS):
                return word.removesuffix(".py").rpartition("/")[2].rpartition(".")[2]
    names = known("trainer", "trl") - _SCRIPTS
    return "" if isinstance(given.values, Mapping) and names & given.values.keys() else None


def _mixed(given: Given) -> str | None:
    """Return the precision that is asked for; TRL's configs mix in bf16 unless told otherwise."""
    raw = given.raw
    is_default = raw.bf16 is None and not raw.fp16 and _trl_script(given) is not None
    return "bf16" if raw.bf16 or is_default else "f16" if raw.fp16 else None


def _dtypes(given: Given) -> tuple[str | None, str | None, str | None]:
    raw, mixed = given.raw, _mixed(given)
    stored = dtype_name(raw.torch_dtype or raw.dtype)
    # accelerate widens what is trained, unless nothing is mixed.
    is_widened = mixed is not None and given.is_fsdp
    return mixed or stored, (mixed or stored) if given.is_fsdp else None, "f32" if is_widened else stored


def _recomputes(given: Given) -> bool:
    asked = given.raw.gradient_checkpointing
    return bool((_trl_script(given) is not None if asked is None else asked) or given.raw.activation_checkpointing)


def _seq_len(given: Given) -> int | None:
    raw = given.raw
    found = raw.max_length or raw.max_seq_length or raw.model_max_length or raw.block_size
    if found or (raw.max_prompt_length and raw.max_completion_length):
        return found or (raw.max_prompt_length or 0) + (raw.max_completion_length or 0)
    return _TRL_LENGTH if _trl_script(given) in ("sft", "dpo", "kto", "reward") else None


def _adapter(given: Given) -> AdapterSpec | None:
    """Return the adapter of TRL's options. Source: `trl/trainer/model_config.py:ModelConfig` (r 16, alpha 32)."""
    raw = given.raw
    if not raw.use_peft:
        return None
    rank, alpha = 16 if raw.lora_r is None else raw.lora_r, 32.0 if raw.lora_alpha is None else raw.lora_alpha
    return AdapterSpec(rank=rank, alpha=alpha, targets=raw.lora_target_modules or ())


def _quantize(given: Given) -> str | None:
    if given.raw.load_in_4bit:
        return given.raw.bnb_4bit_quant_type or "nf4"
    return "int8" if given.raw.load_in_8bit else None


# A file does not say how many ranks are started; a command line does.
ARGUMENT_ROWS = read_table("trainer.arguments", engine=trainer_engine, axes=_axes, mesh=plugin_mesh)
"""What TrainingArguments say, whoever adds to them."""
_TABLE: Table = {
    **ARGUMENT_ROWS,
    **read_table(
        "trainer", dtypes=_dtypes, recomputes=_recomputes, adapter=_adapter, quantize=_quantize, seq_len=_seq_len
    ),
}
ROWS_BY_ENGINE: Mapping[Engine, Table] = {
    "deepspeed": deepspeed_rows(),
    **plugin_rows(DEFAULTS, offload=row(value=_offloads), v2=row(value=_v2_strategy)),
}


def check_fsdp(given: Given) -> None:
    """Add what `fsdp` says that Trainer does not know."""
    given.findings += _fsdp_words(given.raw.fsdp)[1]


def _check(given: Given) -> None:
    check_fsdp(given)
    left = [name for name in ("bf16", "gradient_checkpointing") if getattr(given.raw, name) is None]
    if left and not given.raw.fp16 and _trl_script(given) is not None:
        what = f"{' and '.join(left)} count as true, as TRL has it since 0.24; releases of 2024 do not"
        given.findings.append(Finding.info("version-default", left[0], what, f"write {left[0]}: true or false"))


def _program(command: Sequence[str], at: int) -> int:
    """Return how many words at a place of a command start a trainer: `trl sft`, `train.py`, `-m trl.scripts.sft`."""
    if os.path.basename(command[at]) == "trl":
        return 2 if "".join(command[at + 1 : at + 2]) in _TRL else 0
    return 1 if command[at].endswith(".py") or "".join(command[max(at - 1, 0) : at]) in ("-m", "--module") else 0


def _looks_like(document: Document) -> bool:
    values = document.values
    if values is None:
        telling = ("--per_device_train_batch_size", "--per-device-train-batch-size", *_TRL_SCRIPTS)
        is_named = any(place in word for place in telling for word in document.words)
        starts = started(document.commands, _program) is not None
        return starts and (is_named or any(os.path.basename(word) == "trl" for word in document.words))
    if has_llamafactory_options(values):
        return False
    return "per_device_train_batch_size" in values or (
        any(name in values for name in _OWN) and not any(name in values for name in _OTHERS)
    )


def has_llamafactory_options(values: Mapping[str, object]) -> bool:
    """Are these LLaMA-Factory's arguments, which has Trainer's and more?"""
    return any(all(name in values for name in names.split()) for names in _LLAMAFACTORY)


def arguments_of(document: Document, program: Program) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Return the arguments of a file, or of the command that starts a program, and what may hold any others."""
    if document.values is not None:
        return document.values, ()
    words = started(document.commands, program)
    return read_flags(document.words if words is None else words)


def prepared(arguments: Mapping[str, object], document: Document, **own: Any) -> ReaderInput:  # noqa: ANN401 - fields of it
    """Make arguments ready that have TrainingArguments among them; `own` is what the trainer has of its own."""
    values, missing = with_fsdp_file(arguments, document.path)
    return without_prefix(ReaderInput(by_engine=ROWS_BY_ENGINE, values=values, findings=missing, **own))


def _prepare(document: Document) -> ReaderInput:
    arguments, words = arguments_of(document, _program)
    return prepared(arguments, document, model=OPTIONS, table=_TABLE, words=words, check=_check)


READER = TrainerReader(name="trainer", looks_like=_looks_like, prepare=_prepare)
