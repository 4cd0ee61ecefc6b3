"""The committed table of names: every section has a meaning, and it says what the installed transformers says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from names.zoo import all_names

from ckpt_tools.checkpoint.names import load_table, match_names
from ckpt_tools.checkpoint.names.patterns import patterns

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_every_architecture_resolves_to_names():
    table = load_table()
    names = {name: table.expected(name, {}) for name in table.architectures}
    assert len(names) >= 1500
    empty = [name for name, found in names.items() if found is None or not any(patterns(found.names))]
    assert empty == []


@pytest.mark.full
def test_every_class_of_transformers_is_in_the_table_or_has_a_reason() -> None:
    check = [sys.executable, str(ROOT / "bin/lib/hub_gaps.py")]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    gaps = (ROOT / "bin/lib/hub_gaps.tsv").read_text().splitlines()[1:]
    assert {*load_table().architectures, *(line.partition("\t")[0] for line in gaps)} == {
        name for name in all_names() if "pretrained" not in name.lower()
    }


def test_names_are_found_without_torch_and_transformers():
    code = (
        "import sys; from ckpt_tools.checkpoint.names import load_table; load_table().expected('LlamaForCausalLM', {});"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_part_is_chosen_by_its_config():
    table = load_table()
    qwen = table.expected("LlavaForConditionalGeneration", {"text_config": {"model_type": "qwen2"}})
    llama = table.expected("LlavaForConditionalGeneration", {"text_config": {"model_type": "llama"}})
    bias = "model.language_model.layers.*.self_attn.q_proj.bias"
    assert dict(patterns(qwen.names))[bias]
    assert not dict(patterns(llama.names))[bias]
    assert table.expected("LlavaForConditionalGeneration", {"text_config": {"model_type": "mine"}}) is None


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ((), {"gate_up_proj"}),
        (("experts.gate_up_proj",), {"experts.down_proj", "gate.weight"}),
        (("experts.gate_up_proj", "experts.down_proj", "gate.weight"), set()),
        (("gate_proj.weight", "up_proj.weight", "down_proj.weight"), set()),
        (("experts.0.gate_proj.weight", "experts.0.down_proj.weight", "gate.weight"), {"experts.gate_up_proj"}),
    ],
)
def test_a_layer_is_dense_or_has_experts_and_has_all_of_it(names, missing):
    config = {"num_hidden_layers": 1}
    expected = load_table().expected("Qwen3MoeForCausalLM", config)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    given = [f"model.layers.0.self_attn.{name}.weight" for name in attention]
    given += [f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")]
    given += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    held = match_names([*given, *(f"model.layers.0.mlp.{name}" for name in names)], expected, config)
    assert held.foreign == ()
    found = {name.removeprefix("model.layers.0.mlp.") for name in (*held.missing, *held.incomplete)}
    assert found == missing if names else len(found) == 1


def test_a_bias_that_one_layer_has_lost_is_missed():
    expected = load_table().expected("FalconMambaModel", {"num_hidden_layers": 2})
    names = ["dt_proj.bias", "dt_proj.weight", "A_log", "D"]
    names += [f"{name}.weight" for name in ("conv1d", "in_proj", "out_proj", "x_proj")]
    given = [f"layers.{number}.mixer.{name}" for number in (0, 1) for name in names]
    given += [f"layers.{number}.norm.weight" for number in (0, 1)] + ["embeddings.weight", "norm_f.weight"]
    biases = [f"layers.{number}.mixer.conv1d.bias" for number in (0, 1)]  # use_conv_bias says whether there are any
    config = {"num_hidden_layers": 2}
    assert match_names(given, expected, config).is_whole
    assert match_names([*given, *biases], expected, config).is_whole
    assert match_names([*given, biases[0]], expected, config).missing == (biases[1],)


def test_quantised_side_tensors_belong_to_their_weights():
    config = {"num_hidden_layers": 0, "quantization_config": {"quant_method": "fp8"}}
    expected = load_table().expected("LlamaForCausalLM", config)
    given = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "lm_head.weight_scale_inv"]
    assert match_names(given, expected, config).is_whole
    assert match_names(given, expected, {"num_hidden_layers": 0}).foreign == ("lm_head.weight_scale_inv",)


SAMPLE = ["BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration", "Qwen3MoeForCausalLM"]


@pytest.mark.full
def test_the_table_is_that_of_the_installed_transformers():
    import transformers

    if load_table().source != f"transformers {transformers.__version__}":
        pytest.skip(f"the table is of {load_table().source}")
    command = [sys.executable, str(ROOT / "bin/lib/hub_names.py"), "--check", *SAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "")
