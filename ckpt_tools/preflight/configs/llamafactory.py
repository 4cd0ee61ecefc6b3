"""LLaMA-Factory's YAML or JSON, and the command lines of `llamafactory-cli train`.

Two generations: arguments on top of transformers' own (`hparams/`), and those of `USE_V1` (`v1/`), with a plugin of its
own for each of `peft_config`, `quant_config` and `dist_config`.

Source: LLaMA-Factory 0.9.5: `hparams/*_args.py` (fields and defaults; `HfArgumentParser.parse_dict` stops at other
keys), `hparams/parser.py:get_train_args`, `model/adapter.py:init_adapter` (what is trained is widened to f32, except
with `pure_bf16`, BAdam or ZeRO-3), `model/model_utils/{checkpointing,quantization}.py`; `v1/config/*.py`,
`v1/accelerator/interface.py:DistributedStrategy`, `v1/plugins/` (`fsdp2.py:get_mp_policy`, `peft.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ckpt_tools.preflight.configs.deepspeed import deepspeed_rows
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.field_rows import Given, ReaderInput, Table, TrainerReader, read_table
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import section
from ckpt_tools.preflight.configs.trainer import (
    ARGUMENT_ROWS,
    arguments_of,
    check_fsdp,
    has_llamafactory_options,
    prepared,
    trainer_engine,
)
from ckpt_tools.preflight.spec import AdapterSpec, Engine

_PROGRAMS = ("llamafactory-cli", "lmf")
_OTHER_ENGINES = ("use_mca", "use_hyper_parallel", "use_kt")
"""Switches of engines that are not Trainer's: Megatron's adapter, HyperParallel, KTransformers."""
_MEGATRON = known("llamafactory", "megatron")
"""Options that only Megatron's adapter takes, which `USE_MCA=1` in the environment chooses too."""
_OPTIMIZERS = {"use_galore": "galore", "use_apollo": "apollo", "use_badam": "badam", "use_adam_mini": "adam-mini"}
_ALL = (("all",), ())


_OPTIONS = section("llamafactory")


def _engine(given: Given) -> Engine:
    asks_for_megatron = isinstance(given.values, Mapping) and _MEGATRON & given.values.keys()
    is_other = asks_for_megatron or any(getattr(given.raw, name) for name in _OTHER_ENGINES)
    return "other" if is_other else trainer_engine(given)


def _dtypes(given: Given) -> tuple[str | None, str | None, str | None]:
    raw = given.raw
    compute = "bf16" if raw.bf16 or raw.pure_bf16 else "f16" if raw.fp16 else None
    trained = compute if raw.pure_bf16 or raw.use_badam else "f32"
    return compute, compute if given.is_fsdp else None, trained


def _adapter(given: Given) -> AdapterSpec | None:
    raw = given.raw
    kind = raw.finetuning_type or "lora"
    if kind == "lora":
        rank = 8 if raw.lora_rank is None else raw.lora_rank
        return AdapterSpec(rank=rank, alpha=raw.lora_alpha or 2.0 * rank, targets=_targets(raw.lora_target))
    return AdapterSpec(kind=kind, rank=raw.oft_rank, targets=_targets(raw.oft_target)) if kind == "oft" else None


def _targets(named: tuple[str, ...] | None) -> tuple[str, ...]:
    return ("all-linear",) if named is None or named in _ALL else named


def _quantize(given: Given) -> str | None:
    raw = given.raw
    if raw.quantization_bit is None:
        return None
    if raw.quantization_method in (None, "bnb", "BNB"):
        return "int8" if raw.quantization_bit == 8 else raw.quantization_type or "nf4"
    return f"{raw.quantization_method}-{raw.quantization_bit}bit"


def _optimizer(given: Given) -> str:
    chosen = (name for option, name in {**_OPTIMIZERS, "use_muon": "muon"}.items() if getattr(given.raw, option))
    return next(chosen, given.raw.optim or "adamw_torch_fused")


_TABLE: Table = {
    **ARGUMENT_ROWS,
    **read_table(
        "llamafactory", engine=_engine, dtypes=_dtypes, adapter=_adapter, quantize=_quantize, optimizer=_optimizer
    ),
}


_V1_OPTIONS = section("llamafactory.v1")


def _v1_engine(given: Given) -> Engine:
    name = given.raw.dist_config.name
    if name is None:
        return "none" if given.spec.world_size == 1 else "ddp"
    return {"fsdp2": "fsdp2", "deepspeed": "deepspeed"}.get(name, "other")  # type: ignore[return-value]


def _v1_axes(given: Given) -> dict[str, int]:
    """Return the axes that shard and replicate the model; context parallelism shares their ranks."""
    sizes = given.raw.dist_config
    if given.spec.engine == "ddp":
        return {"dp_replicate": -1}
    axes = {"dp_replicate": sizes.mp_replicate_size or 1, "dp_shard": sizes.mp_shard_size or -1}
    return axes if given.spec.engine == "fsdp2" else {"dp_shard": -1}


def _v1_adapter(given: Given) -> AdapterSpec | None:
    peft = given.raw.peft_config
    if peft.name != "lora":
        return None
    rank, alpha = 8 if peft.r is None else peft.r, 16.0 if peft.lora_alpha is None else peft.lora_alpha
    return AdapterSpec(rank=rank, alpha=alpha, targets=_targets(peft.target_modules))


def _v1_quantize(given: Given) -> str | None:
    quant = given.raw.quant_config
    bits = {4: quant.quantization_type or "nf4", 8: "int8", None: None}
    return bits.get(quant.quantization_bit, f"{quant.quantization_bit}bit")


_V1_TABLE = read_table(
    "llamafactory.v1",
    engine=_v1_engine,
    axes=_v1_axes,
    param_dtype=lambda given: "f32" if given.raw.bf16 is False else "bf16",
    adapter=_v1_adapter,
    quantize=_v1_quantize,
)


def _program(command: Sequence[str], at: int) -> int:
    name = os.path.basename(command[at])
    if name in _PROGRAMS:
        return 2 if "".join(command[at + 1 : at + 2]) == "train" else 0
    return int(command[at].endswith("src/train.py"))


def _looks_like(document: Document) -> bool:
    values = document.values
    if values is None:
        options = {word.partition("=")[0].removeprefix("--") for word in document.words}
        starts = any(_program(command, at) for command in document.commands for at in range(len(command)))
        return starts or "finetuning_type" in options
    return has_llamafactory_options(values)


def _prepare(document: Document) -> ReaderInput:
    arguments, words = arguments_of(document, _program)
    if "model" in arguments and "model_name_or_path" not in arguments:
        by_engine: Mapping[Engine, Table] = {"deepspeed": deepspeed_rows("dist_config.config_file")}
        return ReaderInput(model=_V1_OPTIONS, table=_V1_TABLE, by_engine=by_engine, values=arguments, words=words)
    return prepared(arguments, document, model=_OPTIONS, table=_TABLE, words=words, check=check_fsdp)


READER = TrainerReader(name="llamafactory", looks_like=_looks_like, prepare=_prepare)
