"""Trainers whose configs are recognised by what only they have, and not read.

Source: the examples of each trainer's repository, November 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.plain_values import find_value

_MAX_DEPTH = 6
_MISSING = object()


class NotReadError(UsageError):
    """The config of a trainer that preflight does not read: it was not checked."""

    exit_code = 3

    def __init__(self, name: str, *, where: str) -> None:
        super().__init__(
            f"this is a config of {name}, which preflight does not read",
            where=where,
            hint="ckpt estimate and ckpt smoke take the model, the mesh and the dtypes as options",
        )
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """One trainer, and how to tell its files."""

    name: str
    keys: tuple[str, ...] = ()
    """Dotted keys with blanks between them; a file that has all of one text is this trainer's."""
    classes: tuple[str, ...] = ()
    """Begins of the import paths that its files name as `_component_`, `_target_`, `class_path` or `recipe`."""
    programs: tuple[str, ...] = ()
    """Words of a command line that start it: `swift sft`, `torchtune`; those with a dot or slash end a longer word."""
    options: tuple[str, ...] = ()
    """Begins of words that only its command lines have."""


OTHERS: tuple[Other, ...] = (
    Other(name="torchtune", classes=("torchtune.", "recipes."), programs=("tune run",)),
    Other(
        name="llm-foundry",
        keys=(
            "device_train_microbatch_size global_train_batch_size",
            "max_duration train_loader",
            "max_duration eval_interval",
            "variables model train_loader",
            "icl_tasks models",
        ),
        programs=("train/train.py", "composer"),
    ),
    Other(
        name="SkyRL",
        keys=("trainer.policy generator", "trainer.placement", "trainer.policy environment"),
        programs=("skyrl_train.entrypoints.", "skyrl.train.entrypoints.", "skyrl_train."),
        options=("trainer.policy.", "trainer.placement.", "generator.inference_engine"),
    ),
    Other(
        name="prime-rl",
        keys=(
            "orchestrator trainer",
            "orchestrator inference",
            "model.name optim max_steps",
            "model.name data max_steps optim",
            "model.ac optim",
            "trainer.model inference",
        ),
        programs=("uv run rl", "uv run sft", "prime_rl."),
    ),
    Other(
        name="NeMo-Automodel",
        keys=("step_scheduler checkpoint", "recipe step_scheduler"),
        classes=("nemo_automodel.",),
        programs=("automodel", "nemo_automodel."),
    ),
    Other(
        name="NeMo-RL",
        keys=("policy.dtensor_cfg", "policy.megatron_cfg", "policy.train_global_batch_size"),
        programs=("examples/run_grpo_math.py", "examples/run_grpo.py", "examples/run_sft.py", "examples/run_dpo.py"),
    ),
    Other(name="NeMo", keys=("trainer exp_manager",), classes=("nemo.",)),
    Other(
        name="EasyR1",
        keys=("worker.actor", "worker.rollout"),
        programs=("verl.trainer.main",),
        options=("worker.actor.", "worker.rollout."),
    ),
    Other(
        name="GPT-NeoX",
        keys=(
            "pipe_parallel_size",
            "pipe-parallel-size",
            "train_micro_batch_size_per_gpu num_layers",
            "train_micro_batch_size_per_gpu num-layers",
        ),
    ),
    Other(
        name="litgpt",
        keys=("checkpoint_dir train.micro_batch_size", "train.global_batch_size train.micro_batch_size"),
        classes=("litgpt.",),
        programs=("litgpt",),
    ),
    Other(
        name="Lightning",
        keys=(
            "trainer.accelerator",
            "trainer.max_epochs",
            "model.class_path data.class_path",
            "model.class_path trainer",
        ),
        classes=("lightning.", "pytorch_lightning."),
    ),
    Other(
        name="nanotron",
        keys=("parallelism.dp parallelism.tp", "tokens.micro_batch_size parallelism"),
        programs=("run_train.py --config-file",),
    ),
    Other(name="slime", options=("--rollout-", "--num-rollout", "--hf-checkpoint", "--actor-num-gpus-per-node")),
    Other(
        name="Megatron-LM",
        programs=("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py", "pretrain_mamba.py", "pretrain_vlm.py"),
        options=("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--use-mcore-models"),
    ),
    Other(
        name="ms-swift",
        keys=("train_type model", "tuner_type model", "rlhf_type"),
        programs=("swift sft", "swift pt", "swift rlhf", "megatron sft", "megatron pt", "megatron rlhf"),
    ),
    Other(
        name="SimpleTuner",
        keys=("model_family pretrained_model_name_or_path", "--model_family", "data_backend_config"),
        programs=("simpletuner",),
    ),
    Other(
        name="kohya's sd-scripts",
        keys=("network_module pretrained_model_name_or_path", "pretrained_model_name_or_path unet_lr"),
        programs=("train_network.py", "sdxl_train_network.py", "flux_train_network.py", "sd3_train_network.py"),
        options=("--network_module",),
    ),
    Other(name="diffusion-pipe", keys=("model.type pipeline_stages", "micro_batch_size_per_gpu pipeline_stages")),
    Other(name="trlx", keys=("train.seq_length train.trainer", "method.name train model.model_path")),
    Other(
        name="ROLL",
        keys=("actor_train actor_infer", "actor_train exp_name", "sft_train exp_name", "student exp_name"),
        programs=("start_rlvr_pipeline.py", "start_agentic_pipeline.py"),
    ),
    Other(name="AReaL", keys=("allocation_mode actor", "experiment_name trial_name actor")),
    Other(
        name="OLMo", keys=("device_train_microbatch_size max_duration", "device_train_microbatch_size model.d_model")
    ),
    Other(
        name="open-instruct",
        keys=("with_tracking checkpointing_steps", "with_tracking use_slow_tokenizer", "dataset_mixer_list"),
        programs=("open_instruct/finetune.py", "open_instruct/grpo_fast.py"),
    ),
    Other(name="xtuner", programs=("xtuner",)),
    Other(name="unsloth", programs=("unsloth", "unsloth-cli.py")),
)
"""In this order: the first that fits."""


def refuse_others(document: Document) -> None:
    """Raise NotReadError if a config belongs to a trainer that is recognised and not read."""
    for other in OTHERS:
        if _is_of(document, other):
            raise NotReadError(other.name, where=document.path)


def _is_of(document: Document, other: Other) -> bool:
    values = document.values
    if values is not None:
        has_keys = any(
            all(find_value(values, key, _MISSING) is not _MISSING for key in row.split()) for row in other.keys
        )
        return has_keys or (bool(other.classes) and _names_class(values, other.classes, 0))
    return any(_starts(command, other) for command in document.commands)


def _names_class(node: object, begins: tuple[str, ...], depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    if isinstance(node, Mapping):
        return any(
            (key in ("_component_", "_target_", "class_path", "recipe") and str(value).startswith(begins))
            or _names_class(value, begins, depth + 1)
            for key, value in node.items()
        )
    return isinstance(node, list) and any(_names_class(item, begins, depth + 1) for item in node)


def _starts(command: Sequence[str], other: Other) -> bool:
    return any(_is_program(command, program.split()) for program in other.programs) or (
        bool(other.options) and any(word.lstrip("+~").startswith(other.options) for word in command)
    )


def _is_program(command: Sequence[str], words: Sequence[str]) -> bool:
    """Do these words stand one after the other in a command? The first may end a path, or begin a module's name."""
    first, *rest = words
    for at, word in enumerate(command):
        begins = word.startswith(first) if first.endswith(".") else word == first or word.endswith(f"/{first}")
        if begins and list(command[at + 1 : at + len(words)]) == rest:
            return True
    return False
