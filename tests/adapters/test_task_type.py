"""PEFT's task type is only written where PEFT's forward for it is one that the model understands."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from adapters import families
from adapters.peft_world import randomise

from ckpt_tools import api

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
AUDIO = {"conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_conv_pos_embeddings": 4}
AUDIO |= {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "feat_extract_norm": "layer"}
SOUND = {"input_values": torch.randn(1, 400, generator=torch.Generator().manual_seed(0))}
TEXT = {"input_ids": torch.arange(1, 8)[None]}


def whisper():
    import transformers as t

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 10}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = t.WhisperConfig(vocab_size=40, num_mel_bins=8, **sizes, **special)
    inputs = {"input_features": torch.ones(1, 8, 20), "decoder_input_ids": TEXT["input_ids"]}
    return t.WhisperForConditionalGeneration(config), inputs, ["q_proj", "v_proj"], None


def wav2vec2():
    import transformers as t

    model = t.Wav2Vec2ForSequenceClassification(t.Wav2Vec2Config(vocab_size=8, num_labels=3, **SIZES, **AUDIO))
    return model, SOUND, ["q_proj", "v_proj"], None


def vit():
    import transformers as t

    model = t.ViTForImageClassification(t.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SIZES))
    return model, {"pixel_values": torch.ones(1, 3, 8, 8)}, ["q_proj", "v_proj"], None


def clip():
    import transformers as t

    part = {**SIZES, "projection_dim": 8}
    config = t.CLIPConfig(
        text_config={**part, "vocab_size": 40},
        vision_config={**part, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    return t.CLIPModel(config), {**TEXT, "pixel_values": torch.ones(1, 3, 8, 8)}, ["q_proj"], None


def t5():
    import transformers as t

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = t.T5Config(vocab_size=40, decoder_start_token_id=0, **sizes)
    inputs = {**TEXT, "decoder_input_ids": TEXT["input_ids"]}
    return t.T5ForConditionalGeneration(config), inputs, ["q", "v"], "SEQ_2_SEQ_LM"


def llama():
    import transformers as t

    return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=40, **SIZES)), TEXT, ["q_proj"], "CAUSAL_LM"


WORLDS = (whisper, wav2vec2, vit, clip, t5, llama)


@pytest.mark.parametrize("build", WORLDS, ids=lambda build: build.__name__)
def test_task_type_is_one_that_peft_s_forward_can_do(tmp_path, build):
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    model, inputs, targets, expected = build()
    model.eval().save_pretrained(tmp_path / "base")
    with torch.no_grad():
        before = model(**inputs)[0]
    with warnings.catch_warnings(action="ignore"):
        adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=targets))
    randomise(adapted, lambda name: "lora_" in name)
    with torch.no_grad():
        answer = adapted.eval()(**inputs)[0]
    assert not torch.allclose(answer, before, atol=1e-4)
    factors = {name: tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    families.save_dcp({"model": factors}, tmp_path / "dcp")
    plain = type(model).from_pretrained(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "peft")
    for number, (source, alpha, task) in enumerate([("dcp", 4, expected), ("peft", None, None)]):
        # What PEFT's own configuration does not say stays unsaid.
        assert api.export_lora(tmp_path / source, tmp_path / f"out{number}", alpha=alpha, base=tmp_path / "base").ok
        config = json.loads((tmp_path / f"out{number}/adapter_config.json").read_text())
        assert config["task_type"] == task
    with warnings.catch_warnings(action="ignore"):  # FutureWarning of transformers about PEFT's calls
        warnings.simplefilter("error", UserWarning)
        loaded = PeftModel.from_pretrained(plain, tmp_path / "out0").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs)[0], answer, rtol=0, atol=0)
