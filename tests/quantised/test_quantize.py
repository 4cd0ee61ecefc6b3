"""`--quantize fp8`: byte for byte what transformers would quantise, and loaded as what it was."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from names import zoo
from safetensors.torch import load_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.cli import main
from ckpt_tools.transfer.quantised import encoded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
KINDS = [transformers.LlamaForCausalLM, transformers.Qwen3MoeForCausalLM, transformers.DeepseekV3ForCausalLM]


def build(kind: type, **others: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    return kind(kind.config_class(**SIZES | others)).to(torch.bfloat16).eval()


def read(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def quantise(*args: object) -> int:
    return main(["gather", *map(str, args), "--quantize", "fp8", "-q"])


def by_transformers(tensors: dict[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    op = Fp8Quantize(SimpleNamespace(quantization_config=config))
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        made |= op.convert({name: tensor}) if name in names else {name: tensor}
    return made


def decoded(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in stored.items():
        if (scale := stored.get(f"{name}_scale_inv")) is not None:
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            found[name] = (tensor.float() * scale).to(torch.bfloat16)
        elif not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.full(but=["Qwen3Moe"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.removesuffix("ForCausalLM"))
def test_a_trained_model_is_quantised_as_transformers_does_it_and_loads_as_it_was(kind, tmp_path) -> None:
    model = build(kind, head_dim=32 if kind is transformers.DeepseekV3ForCausalLM else 64)
    model.save_pretrained(tmp_path / "hub")
    assert main(["shard", str(tmp_path / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=3", "-q"]) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)  # training
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "run", no_dist=True)
    model.save_pretrained(tmp_path / "trained")
    out = tmp_path / "out"
    assert quantise(tmp_path / "run", out, "--assets", tmp_path / "hub", "--max-shard-size", "700kB") == 0
    assert quantise(tmp_path / "dcp", tmp_path / "untrained") == 0  # by the files that it remembers
    assert quantise(tmp_path / "hub", tmp_path / "direct") == 0
    same(read(tmp_path / "untrained"), read(tmp_path / "direct"))
    assert main(["verify", str(out), "--level", "data", "-q"]) == 0

    stored, plain = read(out), read(tmp_path / "trained")
    chosen = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    same(stored, by_transformers(plain, chosen))
    assert len(chosen) > 10

    assert main(["gather", str(out), str(tmp_path / "plain"), "--dequantize", "-q"]) == 0
    same(read(tmp_path / "plain"), decoded(stored))
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    loaded = kind.from_pretrained(out, dtype=torch.bfloat16).eval()  # no GPU: transformers decodes it
    same(dict(loaded.state_dict()), dict(kind.from_pretrained(tmp_path / "plain", dtype="auto").state_dict()))
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        wanted_logits = model(ids).logits.float()
        far = (loaded(ids).logits.float() - wanted_logits).norm() / wanted_logits.norm()
    assert 0.001 < far < 0.2  # of random weights, whose router tips easily


def test_torch_reads_it(tmp_path) -> None:
    build(transformers.LlamaForCausalLM).save_pretrained(tmp_path / "hub")
    assert quantise(tmp_path / "hub", tmp_path / "out", "--max-shard-size", "700kB") == 0
    wanted = decoded(read(tmp_path / "out"))
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path / "out"), target_dtype=torch.bfloat16)
    dcp.load(state, storage_reader=reader, no_dist=True)
    same(state, wanted)


@pytest.mark.full
@pytest.mark.parametrize("at", range(2))
def test_what_is_quantised_is_what_transformers_takes_for_quantised(at: int, monkeypatch, request) -> None:
    """Of every architecture: its modules that become `FP8Linear` or `FP8Experts` by our list are those we encode."""
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    monkeypatch.setattr(encoded, "BLOCK", 1)
    num_right, wrong = 0, {}
    for name in zoo.part(at, 2, whole=request.config.getoption("--zoo"), of=6):
        found = compare(name) if name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) else None
        num_right += found == ""
        wrong |= {name: found} if found else {}
    assert wrong == {}
    assert num_right >= 8


def compare(name: str) -> str | None:
    """Return what is wrong with an architecture; None where nothing small builds, or nothing is quantised."""
    config = zoo.small_config(name)
    if config is None:
        return None
    live, model = zoo.build(name, config, "meta"), zoo.build(name, config, "meta")
    tied = getattr(live, "all_tied_weights_keys", None)
    if tied is None:  # a class that is never loaded by itself
        return None
    entries = [
        TensorEntry(fqn=fqn, dtype=BY_NAME["BF16"], shape=tuple(tensor.shape), chunks=())
        for fqn, tensor in as_saved(live, dict(live.state_dict())).items()
        if fqn not in tied
    ]
    chosen = encoded.choose(entries, (), {})
    if not chosen.weights:
        return None
    settings = transformers.FineGrainedFP8Config(modules_to_not_convert=list(chosen.kept))
    FineGrainedFP8HfQuantizer(settings, pre_quantized=True)._process_model_before_weight_loading(model)
    made = {path for path, module in model.named_modules() if isinstance(module, (FP8Linear, FP8Experts))}
    inside = {
        fqn: tensor
        for fqn, tensor in live.state_dict().items()
        if tensor.ndim > 1 and (fqn.removesuffix(".weight") in made or fqn.rpartition(".")[0] in made)
    }
    wanted = {fqn for fqn in as_saved(live, inside) if not fqn.endswith("bias")} - set(tied)
    if wanted == chosen.weights:
        return ""
    only = [sorted(names)[:3] for names in (wanted - chosen.weights, chosen.weights - wanted)]
    return f"only transformers: {only[0]}, only ckpt: {only[1]}"


def as_saved(model: transformers.PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return revert_weight_conversion(model, {fqn: tensor.to(torch.bfloat16) for fqn, tensor in tensors.items()})
