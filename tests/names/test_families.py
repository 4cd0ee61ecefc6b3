"""Families with state spaces, and models in another form than their default one: the whole way that `test_zoo` goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from names.test_zoo import walk

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
_T5 = {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 99}
_T5 |= {
    "architectures": ["T5ForConditionalGeneration"],
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
_RESNET |= {"layer_type": "basic", "out_features": ["stage4"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "GraniteMoeHybridForCausalLM": {
        **_MAMBA,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "projectors_bias": True},
    "NemotronHForCausalLM": {"n_shared_experts": 1},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 4},
    "DetrForObjectDetection": {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET},
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "use_shared_mlp_adapter": True,
        "adapter_rank": 4,
    },
    "Blip2ForConditionalGeneration": {"text_config": _T5, "use_decoder_only_language_model": False},
    "RTDetrForObjectDetection": {
        "backbone_config": {
            "model_type": "rt_detr_resnet",
            "layer_type": "basic",
            "embedding_size": 8,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage2", "stage3", "stage4"],
        },
        "encoder_in_channels": [8, 16, 16],
        "encoder_hidden_dim": 32,
        "d_model": 32,
        "num_queries": 8,
        "learn_initial_query": True,
    },
    "MusicgenForConditionalGeneration": {
        "text_encoder": _T5,
        "audio_encoder": {"model_type": "encodec", "num_filters": 4, "hidden_size": 16, "codebook_dim": 16},
        "decoder": {
            "model_type": "musicgen_decoder",
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_codebooks": 8,
            "vocab_size": 99,
            "audio_channels": 2,
        },
    },
}
"""Class → what differs from the small default config."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_goes_the_whole_way(name: str, tmp_path: Path) -> None:
    assert walk(name, tmp_path, FAMILIES[name]) == ""


def test_form_that_the_table_of_names_does_not_know_is_asked_for(tmp_path: Path) -> None:
    given = FAMILIES["MusicgenForConditionalGeneration"]
    one_layer = {**given, "audio_encoder": {**given["audio_encoder"], "num_lstm_layers": 1}}
    assert walk("MusicgenForConditionalGeneration", tmp_path, one_layer) == ""
