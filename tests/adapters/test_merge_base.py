"""Merges into bases with ties, of other dtypes and quantised: what cannot be said in their weights is refused."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
import toys
import transformers
from adapters.families import loras, save_dcp
from adapters.peft_world import randomise
from adapters.test_merge import (
    adapt,
    assert_merged,
    llama,
    pair,
    save_model,
    tensors_of,
    world,
    write_adapter,
    write_base,
)
from quantised.test_dequantize import BLOCK, SIZES, hub_model, in_blocks, write
from quantised.test_packed import GPTQ, gptq as of_gptq
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError


def embedding_config(**options):
    from peft import LoraConfig

    return LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "embed_tokens"]} | options))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(7)[None]).logits


def adapted_logits(model, adapter) -> torch.Tensor:
    from peft import PeftModel

    with warnings.catch_warnings(action="ignore"):
        return logits(PeftModel.from_pretrained(copy.deepcopy(model), adapter))


# Tied embeddings


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("gpt2", "llava"))])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["EMBEDDING"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": "all-linear", "modules_to_save": ["EMBEDDING"]},
        {"target_modules": ["EMBEDDING"], "ensure_weight_tying": True},
    ],
    ids=["embedding", "head", "whole", "tying"],
)
def test_change_of_a_tied_weight_is_refused_and_untied_gives_what_was_trained(tmp_path, kind, options):
    nested = {"text_config": toys.KINDS["llava"][2]["text_config"] | {"tie_word_embeddings": True}}
    model = toys.build(kind, tie_word_embeddings=True, **(nested if kind == "llava" else {}))
    leaf = "wte" if kind == "gpt2" else "embed_tokens"
    options = {key: [leaf] if value == ["EMBEDDING"] else value for key, value in options.items()}
    base = save_model(model, tmp_path / "base")
    adapt(model, embedding_config(**options), tmp_path / "adapter")
    with pytest.raises(UsageError) as caught:
        api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    assert "--untie" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()

    api.merge_lora(base, tmp_path / "adapter", tmp_path / "out", untie=True)
    assert api.verify(tmp_path / "out").ok
    expected = adapted_logits(model, tmp_path / "adapter")
    assert torch.allclose(logits(type(model).from_pretrained(tmp_path / "out")), expected, atol=2e-5)
    assert not torch.allclose(logits(model), expected, atol=1e-2)


def test_what_is_not_tied_and_what_shares_more_cannot_be_untied(tmp_path):
    model = toys.build("t5")
    adapt(model, embedding_config(target_modules=["shared"]), tmp_path / "adapter")
    with pytest.raises(UsageError, match="encoder"):
        api.merge_lora(save_model(model, tmp_path / "t5"), tmp_path / "adapter", tmp_path / "out", untie=True)
    adapt(llama(), embedding_config(), tmp_path / "other")
    with pytest.raises(UsageError, match="this one does not"):
        api.merge_lora(save_model(llama(), tmp_path / "base"), tmp_path / "other", tmp_path / "out", untie=True)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_tied_pair_stored_twice_in_dcp_is_refused(tmp_path, target):
    model = llama(tie_word_embeddings=True)
    save_dcp({"model": model.state_dict()}, tmp_path / "base")
    adapt(model, embedding_config(target_modules=["q_proj", target]), tmp_path / "adapter")
    with pytest.raises(UsageError, match="hold the same values"):
        api.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=r"needs the base's config\.json"):
        api.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", untie=True)
    model.config.save_pretrained(tmp_path / "base")
    api.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", untie=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    api.gather(tmp_path / "out", tmp_path / "full")
    expected = adapted_logits(model, tmp_path / "adapter")
    assert torch.allclose(logits(type(model).from_pretrained(tmp_path / "full")), expected, atol=2e-5)


def test_equal_pair_that_the_config_calls_untied_merges(tmp_path):
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    _, base, expected = world(tmp_path, embedding_config(), model)
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    assert_merged(tmp_path / "out", expected, base)


def test_untied_dcp_without_a_config_merges(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = llama()
    save_dcp({"model": model.state_dict()}, tmp_path / "base")
    expected = adapt(model, embedding_config(), tmp_path / "adapter")
    api.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    state = {"model": {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=tmp_path / "out")
    assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in state["model"].items())


# Arithmetic


def test_sum_with_a_base_of_float64_is_not_rounded(tmp_path):
    save_file({"a.weight": torch.full((4, 4), 1.0 + 2.0**-40, dtype=torch.float64)}, tmp_path / "base.safetensors")
    factors = {"a.lora_down.weight": torch.ones(1, 4), "a.lora_up.weight": torch.ones(4, 1), "a.alpha": torch.ones(())}
    save_file(factors, tmp_path / "adapter.safetensors")
    api.merge_lora(tmp_path / "base.safetensors", tmp_path / "adapter.safetensors", tmp_path / "out")
    assert set(tensors_of(tmp_path / "out")["a.weight"].flatten().tolist()) == {2.0 + 2.0**-40}


@pytest.mark.parametrize("scale", ["0", "-0.0", "nan", "-inf"])
def test_scale_that_means_nothing_is_a_usage_error(tmp_path, capsys, scale):
    _, base, _ = world(tmp_path)
    capsys.readouterr()
    arguments = ["merge-lora", str(base), str(tmp_path / "adapter"), str(tmp_path / "out"), "--scale", scale, "--json"]
    assert main(arguments) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["where"] == "--scale"
    assert not (tmp_path / "out").exists()


# The config beside the weights of a merge that casts, and what a dry run says of the files

CONFIG = b'{\n  "model_type": "llama",\n  "text_config": {"torch_dtype": "float32"},\n  "torch_dtype": "float32"\n}\n'


@pytest.mark.parametrize("dtype", ["keep", "bf16", "f32"])
@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_merge_writes_the_config_and_the_files_of_its_plan(kind, dtype, tmp_path):
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    source = write_base(tmp_path / "base", {f"{name}.weight": torch.randn(8, 8) for name in names})
    (source / "config.json").write_bytes(CONFIG)
    adapter, out = write_adapter(tmp_path / "adapter", loras({names[0]: pair(8, 8)})), tmp_path / "out"
    if kind == "dcp":
        api.shard(source, tmp_path / "run", mesh="dp_shard=2")
        source = tmp_path / "run"
    planned = api.merge_lora(source, adapter, out, dtype=dtype, dry_run=True)
    result = api.merge_lora(source, adapter, out, dtype=dtype)
    wanted = CONFIG.replace(b"float32", b"bfloat16") if dtype == "bf16" else CONFIG
    assert (out / "config.json").read_bytes() == wanted
    said = "config.json now has 'bfloat16', not 'float32': the weights were cast"
    assert (said in result.notes) == (said in planned.notes) == (dtype == "bf16")
    assert dict(result.files) == {str(p.relative_to(out)): p.stat().st_size for p in out.rglob("*") if p.is_file()}
    assert [name for name, _ in planned.files] == [name for name, _ in result.files]
    rough = {".metadata", "ckpt_manifest.json"} if kind == "dcp" else set()
    assert {row for row in planned.files if row[0] not in rough} <= set(result.files)
    assert api.verify(out).findings == ()


# Quantised releases: what `gather --dequantize` makes of them, and the adapter added to that


def fp8(path):
    tensors = in_blocks(hub_model(transformers.Qwen3MoeForCausalLM, path))
    return write(path, tensors, {"quant_method": "fp8", "weight_block_size": BLOCK})


def mxfp4(path):
    tensors = hub_model(transformers.GptOssForCausalLM, path)
    made = torch.Generator().manual_seed(7)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=made, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 125, shape, generator=made, dtype=torch.uint8)
    return write(path, tensors, {"quant_method": "mxfp4"})


def nf4(path):
    return bitsandbytes(path, load_in_4bit=True, bnb_4bit_quant_type="nf4")


def int8(path):
    return bitsandbytes(path, load_in_8bit=True)


def gptq(path):
    tensors = hub_model(transformers.LlamaForCausalLM, path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        parts = of_gptq(columns, rows, scales=torch.linspace(0.01, 0.02, columns // 32 * rows).reshape(-1, rows).half())
        tensors |= {name.replace("weight", part.removeprefix("a.")): each for part, each in parts.items()}
    return write(path, tensors, GPTQ)


def bitsandbytes(path, **options):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    hub_model(transformers.LlamaForCausalLM, path)
    settings = transformers.BitsAndBytesConfig(**options)
    transformers.LlamaForCausalLM.from_pretrained(path, quantization_config=settings).save_pretrained(path)
    return str(path)


def adapt_experts(kind, path) -> None:
    """Write an adapter of attention, and of the experts where there are any."""
    from peft import LoraConfig, get_peft_model

    parameters = [] if kind is transformers.LlamaForCausalLM else ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=parameters)
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(kind(kind.config_class(**SIZES)), config)
        randomise(model, lambda name: "lora_" in name, 1)
        model.save_pretrained(path)


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (fp8, transformers.Qwen3MoeForCausalLM),  # experts one by one, 8-bit blocks
        pytest.param(mxfp4, transformers.GptOssForCausalLM, marks=pytest.mark.full),  # stacked, and turned
        pytest.param(nf4, transformers.LlamaForCausalLM, marks=pytest.mark.full),
        pytest.param(int8, transformers.LlamaForCausalLM, marks=pytest.mark.full),
        (gptq, transformers.LlamaForCausalLM),
    ],
)
def test_a_quantised_base_is_decoded_and_merged_into(tmp_path, capsys, scheme, kind):
    from peft import PeftModel

    base = scheme(tmp_path / "base")
    adapt_experts(kind, tmp_path / "adapter")
    assert main(["merge-lora", base, str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    assert "decoded to BF16" in capsys.readouterr().err
    assert main(["gather", base, str(tmp_path / "plain"), "--dequantize", "-q"]) == 0
    api.merge_lora(tmp_path / "plain", tmp_path / "adapter", tmp_path / "expected")
    found, expected, before = (tensors_of(tmp_path / each) for each in ("out", "expected", "plain"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    changed = {name.partition("self_attn.")[2] for name in found if not torch.equal(found[name], before[name])}
    assert "q_proj.weight" in changed
    assert kind is transformers.LlamaForCausalLM or "" in changed  # the experts
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    loaded = kind.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(loaded[name], found[name])
    with warnings.catch_warnings(action="ignore"):
        plain = kind.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        judge = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    for name, weight in judge.items():  # as PEFT merges into what was decoded, rounded once
        torch.testing.assert_close(loaded[name], weight.to(torch.bfloat16), rtol=2**-7, atol=1e-6)
