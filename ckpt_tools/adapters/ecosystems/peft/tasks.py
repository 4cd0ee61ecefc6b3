"""What PEFT's task types ask of a model.

Source: peft 0.21, peft_model.py: the class of every task hands `input_ids` to the model's forward; transformers 5.23:
the signatures of the models' forward.
"""

from __future__ import annotations

from ckpt_tools.adapters.ecosystems.peft.config_rules import Config
from ckpt_tools.adapters.ecosystems.simulation import Loading, RejectedError

_TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_WITHOUT_IDS = """
    audio-spectrogram-transformer beit bit canary cohere_asr conditional_detr convnext convnextv2 cvt data2vec-audio
    data2vec-vision deformable_detr deit depth_anything detr dinat dinov2 dinov2_with_registers dinov3_convnext
    dinov3_vit dpt efficientnet encodec focalnet glpn hiera hubert ijepa lasr_ctc levit mask2former maskformer mimi
    mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 moonshine moonshine_streaming oneformer parakeet_ctc patchtsmixer
    patchtst pix2struct poolformer pvt pvt_v2 regnet resnet rt_detr rt_detr_v2 sam sam2 segformer sew sew-d
    siglip_vision_model clip_vision_model speech-encoder-decoder speech_to_text speecht5 superpoint swiftformer swin
    swin2sr swinv2 table-transformer time_series_transformer timesfm timesformer unispeech unispeech-sat
    vision-encoder-decoder videomae vit vit_mae vit_msn vitdet vitpose vivit vjepa2 wav2vec2 wav2vec2-bert
    wav2vec2-conformer wavlm whisper yolos zoedepth
"""
"""transformers' types whose models take pictures or sound, and no input_ids."""


def check_task(config: Config, model_type: str | None, loading: Loading) -> None:
    """Say what a task type does to a model.

    Args:
        config: adapter_config.json.
        model_type: transformers' type of the base model, where it is known.
        loading: Told what goes wrong.

    Raises:
        RejectedError: A task that PEFT does not know.
    """
    task = config.get("task_type")
    if task is None:
        return
    if task not in _TASKS:
        raise RejectedError(f"task_type is {task!r}, which is not one of {', '.join(_TASKS)}")
    if model_type is not None and model_type in _WITHOUT_IDS.split():
        loading.say(
            "loader-misreads",
            "error",
            "adapter_config.json",
            f"task_type is {task}: PEFT calls the model with input_ids, which a {model_type} model does not take",
            "set task_type to null: PEFT then hands over what it is called with",
        )
