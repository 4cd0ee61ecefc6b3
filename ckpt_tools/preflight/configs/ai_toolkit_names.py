"""ai-toolkit's options that nothing here reads: they are known, so that a misspelt one stands out.

Source: what the classes of ai-toolkit's `toolkit/config_modules.py` and `jobs/process/BaseSDTrainProcess.py` ask for,
August 2026.
"""

from __future__ import annotations

from ckpt_tools.preflight.configs.schema import words

PROCESS = words(
    """
    adapter datasets decorator device do_lorm ema_config embedding first_sample guidance is_ui job_id log_dir
    logging lorm_extract_mode lorm_extract_mode_param name output_folder performance_log_every sample save
    slider sqlite_db_path torch_profiler training_folder trigger_word type
    """
)
"""Options of a process of type sd_trainer, diffusion_trainer and the like."""
TRAIN = words(
    """
    adapter_assist_name_or_path adapter_assist_type adapter_lr adaptive_scaling_factor attention_backend
    audio_loss_multiplier batch_noise_correction_scale blank_prompt_preservation
    blank_prompt_preservation_multiplier blended_blur_noise bypass_guidance_embedding cache_text_embeddings
    cfg_rescale cfg_scale content_or_style correct_pred_norm correct_pred_norm_multiplier ddp
    diff_output_preservation diff_output_preservation_class diff_output_preservation_multiplier
    differential_guidance_scale diffusion_feature_extractor_path diffusion_feature_extractor_weight
    disable_sampling do_batch_noise_correction do_blank_stabilization do_cfg do_differential_guidance
    do_fft_loss do_fft_velocity_equiv_weight do_guidance_loss do_guidance_loss_cfg_zero do_paramiter_swapping
    do_prior_divergence do_random_cfg do_signal_amplification do_signal_correction_noise dynamic_noise_offset
    ema_config embedding_lr force_consistent_noise force_first_sample free_u gradient_accumulation
    gradient_accumulation_steps guidance_loss_schedule guidance_loss_target img_multiplier inverted_mask_prior
    inverted_mask_prior_multiplier latent_feature_extractor_path latent_feature_loss_weight latent_multiplier
    learnable_snr_gos linear_timesteps linear_timesteps2 loss_target loss_type lr lr_scheduler
    lr_scheduler_params match_adapter_assist match_adapter_chance match_noise_norm max_cfg_scale
    max_denoising_steps max_grad_norm max_loss max_loss_debug max_negative_prompts merge_network_on_save
    merge_network_on_save_strength min_denoising_steps min_snr_gamma negative_prompt next_sample_timesteps
    noise_multiplier noise_offset noise_scheduler noisy_latent_multiplier num_train_timesteps
    optimal_noise_pairing_samples optimizer_params paramiter_swapping_factor pred_scaler prompt_dropout_prob
    prompt_saturation_chance random_noise_multiplier random_noise_shift refiner_lr reg_weight sdp
    short_and_long_captions short_and_long_captions_encoder_split show_turbo_outputs
    signal_amplification_strength signal_correction_noise_scale single_item_batching skip_first_sample
    snr_gamma standardize_images standardize_latents start_step steps switch_boundary_every t0_loss_target
    t0_velocity_equiv_weight target_noise_multiplier target_norm_std target_norm_std_value text_encoder_lr
    timestep_type train_refiner train_text_encoder train_turbo train_unet unconditional_prompt unet_lr
    unload_text_encoder use_ddp validation_config weight_jitter xformers
    """
)
"""Options of `train`."""
MODEL = words(
    """
    accuracy_recovery_adapter assistant_lora_path attn_masking auto_memory block_compile cache_size_limit
    compile compile_dynamic compile_fullgraph compile_mode experimental_xl extras_name_or_path
    ignore_if_contains in_context inference_lora_path is_auraflow is_flux is_lumina2 is_pixart is_pixart_sigma
    is_ssd is_v2 is_v3 is_v_pred is_vega is_xl latent_space_version layer_offloading_text_encoder_percent
    layer_offloading_transformer_percent lora_path model_kwargs model_paths only_if_contains qtype_te
    quantize_kwargs quantize_te refiner_name_or_path refiner_start_at
    split_model_other_module_param_count_scale te_device te_dtype te_name_or_path text_encoder_bits
    unconditional_lora_path unet_path unet_sample_size use_flux_cfg use_text_encoder_1 use_text_encoder_2
    vae_device vae_dtype vae_path
    """
)
"""Options of `model`."""
NETWORK = words(
    """
    all_layers conv conv_alpha dropout layer_offloading lokr_factor lorm old_lokr_format
    split_multistage_loras transformer_only
    """
)
"""Options of `network`."""
