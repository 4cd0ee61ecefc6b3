"""OpenRLHF's options by how many words follow them, of the command lines before and after they got dots.

Source: the `add_argument` calls of OpenRLHF's `cli/train_*.py` in May 2025, on the FSDP2 branch of March 2026, and in
August 2026; the notes of its FSDP2 plan (`--backend`, `--fsdp_tensor_parallel_size`).
"""

from __future__ import annotations

from ckpt_tools.preflight.configs.schema import words

PLAN = words("backend fsdp_tensor_parallel_size sequence_parallel")
"""Options that the FSDP2 plan adds."""
OLD_SWITCHES = words(
    """
    actor_init_on_gpu adam_offload apply_chat_template async_train bf16 colocate_actor_ref colocate_all_models
    colocate_critic_reward compute_fp32_loss deepcompile deepspeed_enable_sleep disable_ds_ckpt
    disable_fast_tokenizer disable_fsdp2_ckpt dynamic_filtering enable_ema enable_prefix_caching
    enable_vllm_is_correction enforce_eager flash_attn force_init_value_head fsdp2_cpu_offload
    fsdp2_enable_sleep fsdp2_tp_loss_parallel fsdp2_tp_sequence_parallel full_determinism
    gradient_checkpointing gradient_checkpointing_use_reentrant ipo load_checkpoint load_in_4bit margin_loss
    multiturn no_advantage_std_norm normalize_reward overlap_comm packing_samples perf pretrain_mode
    ref_offload ref_reward_offload resume_training save_hf_ckpt save_value_network teacher_offload
    use_ds_universal_ckpt use_dynamic_batch use_kl_loss use_liger_kernel use_ms vllm_enable_sleep
    vllm_sync_with_ray
    """
)
"""Options without dots that take no word."""
OLD_LISTS = words(
    """
    adam_betas dynamic_filtering_reward_range eps_clip_low_high reward_clip_range reward_tokens target_modules
    vllm_is_truncated_threshold
    """
)
"""Options without dots that take several."""
OLD = (
    OLD_SWITCHES
    | OLD_LISTS
    | words(
        """
    actor_learning_rate actor_num_gpus_per_node actor_num_nodes advantage_estimator agent_func_path
    async_queue_size attn_implementation aux_loss_coef beta chosen_key ckpt_path ckpt_save_path
    critic_learning_rate critic_model_name_or_path critic_num_gpus_per_node critic_num_nodes critic_pretrain
    dataset dataset_probs dataset_split dcp_checkpoint_from_path desirable_loss_weight ds_tensor_parallel_size
    dual_clip ema_beta entropy_loss_coef eps_clip eval_dataset eval_n_samples_per_prompt eval_split eval_steps
    eval_temperature freezing_actor_steps fsdp2_cp_size fsdp2_reshard_after_forward fsdp2_tp_size gamma
    generate_max_len grad_accum_dtype hf_max_shard_size_gb init_kl_coef input_key input_template kd_coef
    kl_estimator kl_horizon kl_target l2 label_key lambd learning_rate local_rank logging_steps lora_alpha
    lora_dropout lora_rank loss lr_scheduler lr_warmup_ratio max_checkpoints_to_keep max_ckpt_mem max_ckpt_num
    max_epochs max_len max_new_tokens max_norm max_samples max_tool_response_length micro_rollout_batch_size
    micro_train_batch_size min_lr_ratio model_name_or_path n_samples_per_prompt nll_loss_coef num_episodes
    output_key overlong_buffer_len overlong_penalty_factor param_dtype placeholder_token policy_loss_type
    pretrain prompt_data prompt_data_probs prompt_key prompt_max_len prompt_split ptx_coef
    ref_model_name_or_path ref_num_gpus_per_node ref_num_nodes ref_pretrain rejected_key remote_rm_url
    reward_model_name_or_path reward_num_gpus_per_node reward_num_nodes reward_pretrain ring_attn_size
    ring_head_stride rollout_batch_size rollout_max_tokens_per_gpu save_path save_steps seed
    stop_properly_penalty_coef teacher_model temperature tokenizer_chat_template top_p train_batch_size
    train_max_tokens_per_gpu train_split undesirable_loss_weight use_tensorboard use_wandb value_clip
    value_head_prefix vllm_generate_batch_size vllm_gpu_memory_utilization vllm_is_correction_type
    vllm_max_model_len vllm_num_engines vllm_sync_backend vllm_tensor_parallel_size wandb_group wandb_org
    wandb_project wandb_run_name zero_stage zpg
    """
    )
)
"""All options without dots."""
NEW_SWITCHES = words(
    """
    actor.freeze_visual_encoder actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant
    algo.advantage.is_correction_enable algo.advantage.no_std_norm algo.dynamic_filtering_enable
    algo.kl.use_loss ckpt.disable_ds ckpt.load_enable ckpt.save_hf critic.save_value_network
    data.apply_chat_template data.disable_fast_tokenizer data.multiturn ds.adam_offload ds.deepcompile
    ds.enable_sleep ds.load_in_4bit ds.overlap_comm ds.packing_samples ds.use_liger_kernel
    ds.use_universal_ckpt model.compute_fp32_loss_enable model.gradient_checkpointing_enable
    model.gradient_checkpointing_reentrant model.ipo_enable model.margin_loss_enable
    model.pretrain_mode_enable muon.nesterov muon.no_nesterov ref.offload reward.normalize_enable
    reward.offload train.async_enable train.colocate_actor_ref train.colocate_all train.colocate_critic_reward
    train.dynamic_batch_enable train.enable_ema train.full_determinism_enable train.partial_rollout_enable
    use_ms vllm.enable_prefix_caching vllm.enable_sleep vllm.enforce_eager vllm.sync_with_ray
    """
)
"""Options of today that take no word."""
NEW_LISTS = words(
    """
    actor.eps_clip_low_high adam.betas algo.advantage.is_correction_threshold algo.dynamic_filtering_range
    ds.lora.target_modules reward.clip_range
    """
)
"""Options of today that take several."""
NEW = (
    NEW_SWITCHES
    | NEW_LISTS
    | words(
        """
    actor.aux_loss_coef actor.dual_clip actor.entropy_coef actor.eps_clip actor.model_name_or_path
    actor.num_gpus_per_node actor.num_nodes actor.policy_loss_type adam.eps adam.lr adam.weight_decay
    algo.advantage.estimator algo.advantage.gamma algo.advantage.is_correction_type algo.advantage.lambd
    algo.kl.estimator algo.kl.horizon algo.kl.init_coef algo.kl.target ckpt.best_metric_key ckpt.max_mem
    ckpt.max_num ckpt.output_dir ckpt.path ckpt.save_steps critic.freezing_steps critic.model_name_or_path
    critic.num_gpus_per_node critic.num_nodes critic.value_clip data.chosen_key data.dataloader_num_workers
    data.dataset data.dataset_probs data.dataset_split data.image_key data.input_key data.input_template
    data.label_key data.max_images_per_prompt data.max_len data.max_samples data.output_key
    data.prompt_dataset data.prompt_key data.prompt_probs data.prompt_split data.rejected_key
    data.tokenizer_chat_template ds.attn_implementation ds.experts_implementation ds.grad_accum_dtype
    ds.lora.alpha ds.lora.dropout ds.lora.rank ds.param_dtype ds.ring_attn_head_stride ds.ring_attn_size
    ds.tensor_parallel_size ds.value_head_prefix ds.zero_stage ds.zpg eval.dataset eval.n_samples_per_prompt
    eval.split eval.steps eval.temperature local_rank logger.logging_steps logger.tensorboard_dir
    logger.wandb.group logger.wandb.key logger.wandb.org logger.wandb.project logger.wandb.run_name
    lr_scheduler lr_warmup_ratio max_norm min_lr_ratio model.aux_loss_coef model.beta model.loss_type
    model.model_name_or_path model.nll_loss_coef muon.lr muon.momentum muon.ns_steps optim
    ref.model_name_or_path ref.num_gpus_per_node ref.num_nodes reward.model_name_or_path
    reward.num_gpus_per_node reward.num_nodes reward.overlong_buffer_len reward.overlong_penalty_factor
    reward.remote_url reward.stop_properly_penalty_coef rollout.batch_size rollout.max_new_tokens
    rollout.max_tokens_per_gpu rollout.micro_batch_size rollout.n_samples_per_prompt rollout.temperature
    rollout.top_p rollout.vllm_generate_batch_size train.agent_func_path train.async_queue_size
    train.batch_size train.ema_beta train.max_epochs train.max_tokens_per_gpu train.micro_batch_size
    train.num_episodes train.seed vllm.gpu_memory_utilization vllm.num_engines vllm.sync_backend
    vllm.tensor_parallel_size
    """
    )
)
"""All options of today."""
