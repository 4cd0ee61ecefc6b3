"""verl's sections and their options.

Source: verl, January 2026: `trainer/config/_generated_ppo_trainer.yaml`, `trainer/config/sft_trainer.yaml`,
`workers/config/{engine,actor,model,optimizer}.py`, whose dataclasses take no other option.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from ckpt_tools.checkpoint import Severity
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
    words,
)


class WrapPolicy(Section):
    """`wrap_policy`."""

    known: ClassVar[frozenset[str]] = words("disable")

    min_num_params: Count | None = None
    transformer_layer_cls_to_wrap: Names | None = None


class MixedPrecision(Section):
    """`mixed_precision`."""

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None


class Fsdp(Section):
    """`fsdp_config`."""

    known: ClassVar[frozenset[str]] = words(
        """_target_ entropy_checkpointing entropy_from_logits_with_chunking forward_only forward_prefetch
        full_determinism grad_offload infer_max_token_len_per_gpu infer_micro_batch_size_per_gpu
        max_token_len_per_gpu micro_batch_size_per_gpu seed strategy use_dynamic_bsz use_fused_kernels
        use_orig_params use_remove_padding use_torch_compile"""
    )
    unknown: ClassVar[Severity | None] = "error"  # a dataclass is made of it

    fsdp_size: Count | None = None
    reshard_after_forward: Truth | None = None
    offload_policy: Truth | None = None
    param_offload: Truth | None = None
    optimizer_offload: Truth | None = None
    model_dtype: Dtype | None = None
    dtype: Dtype | None = None
    mixed_precision: MixedPrecision | None = None
    wrap_policy: WrapPolicy | None = None
    ulysses_sequence_parallel_size: Count | None = None


class Optimizer(Section):
    """`optim`."""

    known: ClassVar[frozenset[str]] = words(
        """_target_ optimizer_impl lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps betas
        clip_grad min_lr_ratio num_cycles lr_scheduler_type warmup_style override_optimizer_config lr_scheduler"""
    )
    unknown: ClassVar[Severity | None] = "error"

    optimizer: Word | None = None


class Actor(Section):
    """`actor_rollout_ref.actor`."""

    known: ClassVar[frozenset[str]] = words(
        """_target_ rollout_n ppo_mini_batch_size ppo_micro_batch_size use_dynamic_bsz ppo_max_token_len_per_gpu
        ppo_infer_micro_batch_size_per_gpu ppo_infer_max_token_len_per_gpu clip_ratio clip_ratio_low clip_ratio_high
        clip_ratio_c tau_pos tau_neg freeze_vision_tower policy_loss loss_agg_mode loss_scale_factor entropy_coeff
        calculate_entropy use_kl_loss use_prefix_grouper use_torch_compile kl_loss_coef kl_loss_type ppo_epochs
        shuffle data_loader_seed checkpoint use_fused_kernels profiler router_replay grad_clip
        entropy_from_logits_with_chunking entropy_checkpointing use_remove_padding calculate_sum_pi_squared
        sum_pi_squared_checkpointing use_rollout_log_probs megatron load_weight veomni profile"""
    )
    unknown: ClassVar[Severity | None] = "error"

    strategy: Annotated[str, choice("fsdp", "fsdp2", "megatron", "veomni")] | None = None
    ppo_micro_batch_size_per_gpu: Positive | None = None
    ulysses_sequence_parallel_size: Count | None = None
    fsdp_config: Fsdp | None = None
    optim: Optimizer | None = None


class Model(Section):
    """`actor_rollout_ref.model`, or `model` for SFT."""

    known: ClassVar[frozenset[str]] = words(
        """_target_ hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template external_lib
        override_config enable_activation_offload use_remove_padding exclude_modules lora_adapter_path use_liger
        use_fused_kernels fused_kernel_options tiled_mlp mtp lora"""
    )
    unknown: ClassVar[Severity | None] = "error"

    path: Word | None = None
    enable_gradient_checkpointing: Truth | None = None
    lora_rank: Count | None = None
    lora_alpha: Number | None = None
    lora_adapter_path: Word | None = None
    target_modules: Names | None = None


class ActorRolloutRef(Section):
    """`actor_rollout_ref`."""

    known: ClassVar[frozenset[str]] = words("ref rollout hybrid_engine nccl_timeout")

    model: Model | None = None
    actor: Actor | None = None


class Data(Section):
    """`data`, which scripts extend."""

    unknown: ClassVar[Severity | None] = None

    max_prompt_length: Positive | None = None
    max_response_length: Positive | None = None
    max_length: Positive | None = None
    micro_batch_size_per_gpu: Positive | None = None


class Runner(Section):
    """`trainer`."""

    known: ClassVar[frozenset[str]] = words(
        """balance_batch total_epochs total_training_steps project_name experiment_name logger log_val_generations
        rollout_data_dir validation_data_dir save_freq esi_redundant_time resume_mode val_before_train val_only
        test_freq critic_warmup default_hdfs_dir del_local_ckpt_after_load default_local_dir max_actor_ckpt_to_keep
        max_critic_ckpt_to_keep ray_wait_register_center_timeout device use_legacy_worker_impl seed max_ckpt_to_keep
        checkpoint profile_steps controller_nsight_options worker_nsight_options npu_profile profile_interval"""
    )

    nnodes: Positive | None = None
    n_gpus_per_node: Positive | None = None
    resume_from_path: Word | None = None


class Ppo(Section):
    """A file for PPO, GRPO and the like."""

    known: ClassVar[frozenset[str]] = words(
        """algorithm critic custom_reward_function defaults global_profiler hydra ray_kwargs ray_init reward_manager
        reward_model transfer_queue"""
    )

    actor_rollout_ref: ActorRolloutRef | None = None
    data: Data | None = None
    trainer: Runner | None = None


class SftFsdp(Fsdp):
    """`model.fsdp_config` of the SFT trainer."""

    known: ClassVar[frozenset[str]] = Fsdp.known | words("cpu_offload")

    offload_params: Truth | None = None


class SftModel(Model):
    """`model` of the SFT trainer."""

    partial_pretrain: Word | None = None
    strategy: Annotated[str, choice("fsdp", "fsdp2")] | None = None
    fsdp_config: SftFsdp | None = None


class Sft(Section):
    """A file for the SFT trainer."""

    known: ClassVar[frozenset[str]] = words("defaults hydra use_remove_padding")

    model: SftModel | None = None
    data: Data | None = None
    optim: Optimizer | None = None
    trainer: Runner | None = None
    ulysses_sequence_parallel_size: Count | None = None
