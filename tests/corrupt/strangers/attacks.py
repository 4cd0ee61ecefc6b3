"""Configs that try to reach a loader: through the classes that transformers has, and through one that it will have."""

from __future__ import annotations

from corrupt.strangers.tomorrow import DEEDS

TEXT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "model_type": "llama",
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model",
}  # fmt: skip
LLAMA = TEXT | {"architectures": ["LlamaForCausalLM"]}
PATH, PLACE = "{path}", "{place}"


def of(name, /, **values):
    """Return a config of a class."""
    return {"architectures": [name], **values}


TIMM = {"model_type": "timm_wrapper", "architecture": "resnet18", "model_args": {"checkpoint_path": PATH}}
BY_NAME = {
    "timm-checkpoint": of("TimmWrapperModel", **TIMM),
    "timm-classes": of("TimmWrapperForImageClassification", **TIMM),
    "timm-other-type": of("TimmWrapperModel", architecture="resnet18", model_args={"pretrained_cfg": {"file": PATH}}),
    "timm-local-directory": of("TimmWrapperModel", model_type="bert", architecture=f"local-dir:{PLACE}"),
    "timm-hub": of("TimmWrapperModel", architecture="hf-hub:org/evil"),
    "timm-overlay": of("LlamaForCausalLM", pretrained_cfg_overlay={"file": PATH}),
    "timm-backbone": of("TimmBackbone", model_type="timm_backbone", backbone=PATH),
    "timm-in-detr": of("DetrModel", model_type="detr",
        backbone_config={"model_type": "timm_backbone", "backbone": PATH}),
    "timm-in-llava": of("LlavaForConditionalGeneration", model_type="llava", text_config=TEXT, vision_config=TIMM),
    "timm-untyped": of("PerceptionLMForConditionalGeneration", vision_config={"model_args": {"checkpoint_path": PATH}}),
    "timm-in-gemma3n": of("Gemma3nForConditionalGeneration", model_type="gemma3n",
        vision_config={"model_type": "gemma3n_vision", "model_args": {"checkpoint_path": PATH}}),
    "timm-in-encoder": of("VisionEncoderDecoderModel", encoder=TIMM, decoder=TEXT),
    "timm-in-list": of("LlamaForCausalLM", parts=[{"deep": [TIMM]}]),
    "timm-deep": of("LlavaForConditionalGeneration", text_config=TEXT | {"vision_config": {"a": {"b": TIMM}}}),
    "backbone-path": of("DetrModel", model_type="detr", backbone=PLACE, use_timm_backbone=False),
    "backbone-repository": of("RTDetrModel", model_type="rt_detr", backbone="org/evil"),
    "backbone-pretrained": of("DPTModel", model_type="dpt", backbone=PLACE, use_pretrained_backbone=True),
    "backbone-mask2former": of("Mask2FormerModel", model_type="mask2former", backbone=PLACE),
    "backbone-upernet": of("UperNetForSemanticSegmentation", model_type="upernet", backbone=PLACE),
    "backbone-depth": of("DepthAnythingForDepthEstimation", model_type="depth_anything", backbone=PLACE),
    "backbone-zoe": of("ZoeDepthForDepthEstimation", model_type="zoedepth", backbone="org/evil"),
    "backbone-vitpose": of("VitPoseForPoseEstimation", model_type="vitpose", backbone=PLACE),
    "backbone-grounding": of("GroundingDinoModel", model_type="grounding-dino", backbone=PLACE),
    "backbone-name-for-config": of("DetrModel", model_type="detr", backbone_config=PLACE),
    "text-name-for-config": of("LlavaForConditionalGeneration", text_config=PLACE, vision_config=VISION),
    "kernel": LLAMA | {"_attn_implementation": "org/evil"},
    "kernel-function": LLAMA | {"attn_implementation": "org/evil@main:evil"},
    "kernel-paged": LLAMA | {"_attn_implementation_internal": "paged|org/evil"},
    "kernel-by-part": of("LlavaForConditionalGeneration", attn_implementation={"text_config": "org/evil"}),
    "kernel-nested": of("LlavaForConditionalGeneration", text_config=TEXT | {"attn_implementation": "org/evil"}),
    "kernel-experts": LLAMA | {"experts_implementation": "org/evil"},
    "kernel-config": LLAMA | {"kernel_config": {"RMSNorm": "org/evil:RMSNorm"}},
    "rag-index": of("RagModel", model_type="rag", index_path=PLACE, question_encoder=TEXT, generator=TEXT),
    "rag-passages": of("RagModel", model_type="rag", passages_path=PLACE, question_encoder=TEXT, generator=TEXT),
    "detectron": of("LayoutLMv2Model", model_type="layoutlmv2", detectron2_config_args={"MODEL.WEIGHTS": PATH}),
    "detectron-args": of("LlamaForCausalLM", detectron2_config_args={"_BASE_": PATH}),
}  # fmt: skip
"""What the table of names refuses, in every command."""


def deed(name, /, **more):
    """Return the config of a family of tomorrow that does one deed."""
    return of(
        "TomorrowModel",
        model_type="tomorrow",
        deed=name,
        path=PATH,
        place=PLACE,
        marker="{marker}",
        port="{port}",
        **more,
    )


EVIL = {key: value for key, value in deed("unpickle").items() if key != "architectures"}
SEES = {"model_type": "vit", **{key: value for key, value in VISION.items() if key != "model_type"}}
BY_DEED = {f"deed-{name}": deed(name) for name in DEEDS}
"""What only walls stop, while the model is built."""
NESTED = {
    "in-llava-text": of("LlavaForConditionalGeneration", model_type="llava", text_config=EVIL, vision_config=VISION),
    "in-llava-vision": of("LlavaForConditionalGeneration", model_type="llava", text_config=TEXT, vision_config=EVIL),
    "in-vision-encoder": of(
        "VisionEncoderDecoderModel", model_type="vision-encoder-decoder", encoder=EVIL, decoder=TEXT
    ),
    "in-decoder": of("EncoderDecoderModel", model_type="encoder-decoder", encoder=TEXT, decoder=EVIL),
    "in-speech": of("SpeechEncoderDecoderModel", model_type="speech-encoder-decoder", encoder=EVIL, decoder=TEXT),
    "in-dual-encoder": of(
        "VisionTextDualEncoderModel", model_type="vision-text-dual-encoder", vision_config=SEES, text_config=EVIL
    ),
    "in-rag": of("RagModel", model_type="rag", question_encoder=EVIL, generator=TEXT),
    "in-detr": of("DetrModel", model_type="detr", backbone_config=EVIL),
    "in-depth-anything": of("DepthAnythingForDepthEstimation", model_type="depth_anything", backbone_config=EVIL),
    "in-mask2former": of("Mask2FormerModel", model_type="mask2former", backbone_config=EVIL),
    "in-aya": of("AyaVisionModel", model_type="aya_vision", vision_config=EVIL, text_config=TEXT),
}
"""The same inside of transformers' own classes."""


def fill(value, words):
    """Return a config with its places filled in."""
    if isinstance(value, dict):
        return {key: fill(item, words) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, words) for item in value]
    if value == "{port}":
        return words["port"]
    if isinstance(value, str):
        for name, word in words.items():
            value = value.replace(f"{{{name}}}", str(word))
    return value
