"""verl's sections and the options of them that are read; the names of the others are in `names/verl.txt`.

Source: verl 0.2 to 0.9.1: `trainer/config/_generated_*_trainer.yaml` and `sft_trainer*.yaml`, `workers/config/{engine,
actor,model,optimizer}.py`, whose dataclasses take no other option.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from ckpt_tools.description.checkpoint import Severity
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import (
    Count,
    Dtype,
    Names,
    Number,
    Positive,
    Section,
    Truth,
    Word,
    choice,
)

STRATEGIES = ("fsdp", "fsdp2", "megatron", "veomni", "torchtitan", "automodel", "mindspeed")
"""Engines. Source: `workers/engine/`."""
Strategy = Annotated[str, choice(*STRATEGIES)]


class WrapPolicy(Section):
    """`wrap_policy`."""

    known: ClassVar[frozenset[str]] = known("verl", "wrap_policy")

    min_num_params: Count | None = None
    transformer_layer_cls_to_wrap: Names | None = None


class MixedPrecision(Section):
    """`mixed_precision`."""

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None


class Fsdp(Section):
    """`fsdp_config`, or `engine` of the SFT trainer."""

    known: ClassVar[frozenset[str]] = known("verl", "fsdp")
    unknown: ClassVar[Severity | None] = "error"  # a dataclass is made of it

    strategy: Strategy | None = None
    fsdp_size: Count | None = None
    reshard_after_forward: Truth | None = None
    offload_policy: Truth | None = None
    param_offload: Truth | None = None
    optimizer_offload: Truth | None = None
    model_dtype: Dtype | None = None
    dtype: Dtype | None = None
    mixed_precision: MixedPrecision = MixedPrecision()
    wrap_policy: WrapPolicy = WrapPolicy()
    ulysses_sequence_parallel_size: Count | None = None


class Optimizer(Section):
    """`optim`; its other options depend on the engine."""

    known: ClassVar[frozenset[str]] = known("verl", "optim")
    unknown: ClassVar[Severity | None] = "error"

    optimizer: Word | None = None


class Actor(Section):
    """`actor_rollout_ref.actor`."""

    known: ClassVar[frozenset[str]] = known("verl", "actor")
    unknown: ClassVar[Severity | None] = "error"

    strategy: Strategy | None = None
    ppo_micro_batch_size_per_gpu: Positive | None = None
    ulysses_sequence_parallel_size: Count | None = None
    fsdp_config: Fsdp = Fsdp()
    optim: Optimizer = Optimizer()


class Model(Section):
    """`actor_rollout_ref.model`, or `model` for SFT."""

    known: ClassVar[frozenset[str]] = known("verl", "model")
    unknown: ClassVar[Severity | None] = "error"

    path: Word | None = None
    enable_gradient_checkpointing: Truth | None = None
    lora_rank: Count | None = None
    lora_alpha: Number | None = None
    lora_adapter_path: Word | None = None
    target_modules: Names | None = None


class ActorRolloutRef(Section):
    """`actor_rollout_ref`."""

    known: ClassVar[frozenset[str]] = known("verl", "actor_rollout_ref")

    model: Model = Model()
    actor: Actor = Actor()


class Data(Section):
    """`data`, which scripts extend."""

    unknown: ClassVar[Severity | None] = None

    max_prompt_length: Positive | None = None
    max_response_length: Positive | None = None
    max_length: Positive | None = None
    micro_batch_size_per_gpu: Positive | None = None


class Runner(Section):
    """`trainer`."""

    known: ClassVar[frozenset[str]] = known("verl", "trainer")

    nnodes: Positive | None = None
    n_gpus_per_node: Positive | None = None
    resume_from_path: Word | None = None


class Ppo(Section):
    """A file for PPO, GRPO and the like."""

    known: ClassVar[frozenset[str]] = known("verl", "ppo")

    actor_rollout_ref: ActorRolloutRef = ActorRolloutRef()
    data: Data = Data()
    trainer: Runner = Runner()


class SftFsdp(Fsdp):
    """`model.fsdp_config` of the SFT trainer before verl 0.7."""

    known: ClassVar[frozenset[str]] = known("verl", "fsdp", "sft_fsdp")

    offload_params: Truth | None = None


class SftModel(Model):
    """`model` of the SFT trainer."""

    partial_pretrain: Word | None = None
    strategy: Strategy | None = None
    fsdp_config: SftFsdp = SftFsdp()


class SftOther(Section):
    """A file for the SFT trainer with an engine that is not FSDP: the engine's options are passed over."""

    known: ClassVar[frozenset[str]] = known("verl", "sft") | {"engine", "optim"}

    model: SftModel = SftModel()
    data: Data = Data()
    trainer: Runner = Runner()
    ulysses_sequence_parallel_size: Count | None = None


class Sft(SftOther):
    """A file for the SFT trainer."""

    engine: Fsdp = Fsdp()
    optim: Optimizer = Optimizer()
