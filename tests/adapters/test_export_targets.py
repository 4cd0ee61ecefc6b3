"""From a training checkpoint into every ecosystem, and from there back to PEFT: the same answers."""

from __future__ import annotations

import warnings

import pytest
import torch
from adapters import families, image_models
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt_tools import api
from ckpt_tools.errors import UsageError

MODELS = {
    "flux1": (image_models.flux1, image_models.flux1_inputs, ["to_q", "add_k_proj", "proj_mlp", "norm_out.linear"]),
    "flux2": (image_models.flux2, image_models.flux2_inputs, ["to_q", "to_k", "to_v", "linear_in"]),
    "sd3": (image_models.sd3, image_models.sd3_inputs, ["to_q", "to_k", "to_v", "proj"]),
}


def build(kind):
    torch.manual_seed(4)
    return MODELS[kind][0]()


def answer(model, kind):
    torch.manual_seed(6)
    with torch.no_grad():
        return model(**MODELS[kind][1](), return_dict=False)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Per model: PEFT's own adapted model saved as DCP, and what it answered."""
    from peft import LoraConfig, get_peft_model

    found = {}
    for kind in MODELS:
        with warnings.catch_warnings(action="ignore"):
            model = get_peft_model(build(kind), LoraConfig(r=4, lora_alpha=6, target_modules=MODELS[kind][2]))
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        path = tmp_path_factory.mktemp(kind) / "dcp"
        families.save_dcp({"model": model.eval().state_dict()}, path)
        found[kind] = path, answer(model, kind)
    return found


def of_peft(path, kind):
    from peft import PeftModel

    with warnings.catch_warnings(action="error"):
        return answer(PeftModel.from_pretrained(build(kind), path).eval(), kind)


@pytest.mark.parametrize("target", ["diffusers", "kohya", "comfyui"])
@pytest.mark.parametrize("kind", MODELS)
def test_adapter_goes_into_every_ecosystem_and_back(trained, tmp_path, kind, target):
    source, expected = trained[kind]
    assert not torch.allclose(answer(build(kind), kind), expected, atol=1e-2)
    result = api.export_lora(source, tmp_path / "there", to=target, alpha=6, architecture=kind)
    assert result.ok, result.findings
    (file,) = (tmp_path / "there").iterdir()
    assert [name for name, _ in result.conversion.files] == [file.name]
    assert result.conversion.num_tensors == len(load_file(file))
    assert result.config["alpha"].value == 6
    back = api.export_lora(tmp_path / "there", tmp_path / "back", architecture=kind)
    assert back.ok, back.findings
    # Fused modules come back with factors of a higher rank: sums in another order.
    torch.testing.assert_close(of_peft(tmp_path / "back", kind), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_adapter_of_a_diffusion_model_goes_to_peft_as_it_is(trained, tmp_path, kind):
    source, expected = trained[kind]
    assert api.export_lora(source, tmp_path / "out", alpha=6).ok
    torch.testing.assert_close(of_peft(tmp_path / "out", kind), expected, rtol=0, atol=0)


def test_header_says_what_the_target_needs(trained, tmp_path):
    source, _ = trained["flux1"]
    api.export_lora(source, tmp_path / "out", to="kohya", alpha=6, dtype="bf16")
    (file,) = (tmp_path / "out").iterdir()
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["ss_network_dim"] == "4"
        assert {opened.get_tensor(name).dtype for name in opened.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_unknown_architecture_is_refused(trained, tmp_path):
    source, _ = trained["flux1"]
    with pytest.raises(UsageError, match="unknown model family 'flux9'") as caught:
        api.export_lora(source, tmp_path / "out", to="kohya", alpha=6, architecture="flux9")
    assert "flux1" in caught.value.hint


def test_kohya_s_names_without_a_base_or_a_family_are_refused(tmp_path):
    from safetensors.torch import save_file

    tensors = {"lora_unet_a_b.lora_down.weight": torch.randn(4, 8), "lora_unet_a_b.lora_up.weight": torch.randn(6, 4)}
    save_file(tensors, tmp_path / "k.safetensors")
    with pytest.raises(UsageError) as caught:
        api.export_lora(tmp_path / "k.safetensors", tmp_path / "out")
    assert "--architecture" in caught.value.hint or "--base" in caught.value.hint
    save_file({"a.b.weight": torch.ones(6, 8)}, tmp_path / "base.safetensors")
    result = api.export_lora(tmp_path / "k.safetensors", tmp_path / "out", base=tmp_path / "base.safetensors")
    assert result.config["target_modules"].value == ["b"]
