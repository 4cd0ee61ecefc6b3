"""Merges into diffusers' pipelines: what diffusers itself fuses, component by component."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from adapters.families import loras
from adapters.image_models import flux1, sdxl
from adapters.test_diffusers import clip
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError

pytestmark = pytest.mark.full
PARTS = ("unet", "text_encoder", "text_encoder_2")


def pipeline(path):
    """Save a pipeline of SDXL."""
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline

    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=1, latent_channels=4)
    encoders = {"text_encoder": clip(with_projection=False), "text_encoder_2": clip(with_projection=True)}
    made = StableDiffusionXLPipeline(
        unet=sdxl(), vae=vae, **encoders, tokenizer=None, tokenizer_2=None, scheduler=EulerDiscreteScheduler()
    )
    with warnings.catch_warnings(action="ignore"):
        made.save_pretrained(path)
    (path / "README.md").write_text("what it is")
    return load(path)


def load(path):
    from diffusers import StableDiffusionXLPipeline

    with warnings.catch_warnings(action="ignore"):
        return StableDiffusionXLPipeline.from_pretrained(path, tokenizer=None, tokenizer_2=None)


def weights(made) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": tensor.detach()
        for part in (*PARTS, "vae")
        for name, tensor in getattr(made, part).state_dict().items()
    }


def adapter(made, path) -> None:
    """Save a LoRA of three components, as diffusers' training scripts do."""
    from peft import LoraConfig, get_peft_model_state_dict

    layers = {}
    for part, targets in zip(PARTS, (["to_q", "ff.net.2"], ["q_proj"], ["q_proj", "fc1"]), strict=True):
        model = getattr(made, part)
        model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
        layers[f"{part}_lora_layers"] = get_peft_model_state_dict(model)
    made.save_lora_weights(path, **layers)


@pytest.mark.parametrize("names", ["diffusers", "kohya"])
def test_every_component_is_what_diffusers_fuses(tmp_path, names):
    from diffusers.utils import convert_state_dict_to_kohya

    base = weights(pipeline(tmp_path / "base"))
    adapter(load(tmp_path / "base"), tmp_path / "adapter")
    given = tmp_path / "adapter" / "pytorch_lora_weights.safetensors"
    oracle = load(tmp_path / "base")
    with warnings.catch_warnings(action="ignore"):
        oracle.load_lora_weights(given.parent)
        oracle.fuse_lora(components=list(PARTS))
        oracle.unload_lora_weights()
    if names == "kohya":
        flat = convert_state_dict_to_kohya(load_file(given))
        flat = {
            name.replace("lora_text_encoder_2_", "lora_te2_").replace("lora_text_encoder_", "lora_te1_"): each
            for name, each in flat.items()
        }
        given = tmp_path / "kohya.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in flat.items()}, given)
    api.merge_lora(tmp_path / "base", given, tmp_path / "out", dtype="f32")
    found, expected = weights(load(tmp_path / "out")), weights(oracle)
    assert found.keys() == expected.keys()
    changed = {name for name in found if not torch.equal(found[name], base[name])}
    assert {name.partition(".")[0] for name in changed} == set(PARTS)
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
    assert (tmp_path / "out" / "README.md").read_text() == "what it is"


def test_an_adapter_of_one_component_and_what_a_pipeline_lacks(tmp_path, capsys):
    """Names without a component are the trained one's; --component says which, a second transformer's for example."""
    pipeline(tmp_path / "base")
    name, weight = next((n, w) for n, w in sdxl().named_parameters() if n.endswith("attn1.to_q.weight"))
    pair = torch.ones(1, weight.shape[1]), torch.ones(weight.shape[0], 1)
    factors = loras({name.removesuffix(".weight"): pair})
    save_file(factors, tmp_path / "plain.safetensors")
    (tmp_path / "base" / "whole.safetensors").write_bytes(b"a checkpoint of the authors'")
    command = ["merge-lora", str(tmp_path / "base"), str(tmp_path / "plain.safetensors"), str(tmp_path / "out")]
    assert main([*command, "--alpha", "1", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("whole.safetensors" in note for note in notes)
    assert not (tmp_path / "out" / "whole.safetensors").exists()
    before, after = (weights(load(tmp_path / each)) for each in ("base", "out"))
    assert [each for each in after if not torch.equal(before[each], after[each])] == [f"unet.{name}"]
    assert main([*command, "--alpha", "2", "--overwrite"]) == 0  # replaces a pipeline, too
    assert main([*command[:3], str(tmp_path / "other"), "--alpha", "1", "--component", "text_encoder"]) == 2
    assert "not in the base" in capsys.readouterr().err
    save_file({f"text_encoder_3.{key}": factor for key, factor in factors.items()}, tmp_path / "third.safetensors")
    with pytest.raises(UsageError, match="no component 'text_encoder_3'"):
        api.merge_lora(tmp_path / "base", tmp_path / "third.safetensors", tmp_path / "other", alpha=1)
    assert not (tmp_path / "other").exists()


def test_another_weight_does_not_continue_what_an_interrupted_run_left(tmp_path, monkeypatch):
    """A finished component is taken over by the same merge alone."""
    from ckpt_tools.convert import run as running
    from ckpt_tools.errors import StorageError

    made = pipeline(tmp_path / "base")
    adapter(made, tmp_path / "adapter")
    with monkeypatch.context() as patched:
        real = running.carry_assets

        def fails(job, sink):
            if job.parts:
                raise StorageError("no space left")
            return real(job, sink)

        patched.setattr(running, "carry_assets", fails)
        with pytest.raises(StorageError):
            api.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", scale=3.0)
    result = api.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert any("other arguments" in note for note in result.notes)
    api.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "clean")
    found, expected = (weights(load(tmp_path / each)) for each in ("out", "clean"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_cast_model_of_diffusers_keeps_the_name_that_diffusers_looks_for(tmp_path):
    model = flux1()
    model.save_pretrained(tmp_path / "base")
    api.gather(tmp_path / "base", tmp_path / "out", dtype="bf16", max_shard_size="100KB")
    loaded = type(model).from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16()), name
