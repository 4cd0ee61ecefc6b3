"""Models that a config.json of diffusers describes: built, fed, sharded, estimated; or refused with the reason."""

from __future__ import annotations

import json
import sys

import pytest
from forked import call
from smoke.diffusers_models import CONFIGS, config_of

from ckpt_tools.errors import UsageError
from ckpt_tools.models.config import component_of
from ckpt_tools.preflight.shrink_run import describe_cut, shrink_config

IDLE = {"SD3Transformer2DModel": "transformer_blocks.1.", "QwenImageTransformer2DModel": "transformer_blocks.1."}
"""What the last block makes of the text goes nowhere."""


def write(directory, name):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(name)))
    return str(directory)


@pytest.fixture(scope="module")
def built(farm, tmp_path_factory):
    path = tmp_path_factory.mktemp("built") / "found.json"
    farm.call("smoke.diffusers_models:try_all", str(path))
    return json.loads(path.read_text())


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_model_is_built_and_every_parameter_that_may_have_a_gradient_has_one(built, name):
    found = built[name]
    assert found["parameters_off_meta"] == found["buffers_on_meta"] == []
    assert found["same_shapes"]
    assert 0 < found["loss"] < 10
    # A fresh model's zeros would hide everything before them.
    missing = found["without_gradient"] + found["zero_gradient"]
    assert [key for key in missing if not key.startswith(IDLE.get(name, "?"))] == []


@pytest.mark.full
def test_blocks_are_those_that_diffusers_repeats(built):
    assert sorted(built["Flux2Transformer2DModel"]["blocks"]) == [
        "single_transformer_blocks.0", "single_transformer_blocks.1", "transformer_blocks.0", "transformer_blocks.1",
    ]  # fmt: skip
    assert sorted(built["WanTransformer3DModel"]["blocks"]) == ["blocks.0", "blocks.1"]
    assert "mid_block.attentions.0.transformer_blocks.0" in built["UNet2DConditionModel"]["blocks"]
    # They hand a list of cached frames to each other, of which FSDP2 would give them copies.
    assert built["AutoencoderKLWan"]["blocks"] == []


@pytest.mark.full
def test_sharded_model_is_the_reference(farm, tmp_path):
    """Lists of shapes in the batch, and tables of frequencies that no load brings back."""
    report = farm.smoke(model=write(tmp_path / "model", "QwenImageTransformer2DModel"), steps=1)
    assert report.ok, report.findings
    assert report.reload_same_world.bitwise
    assert any("mean squared distance" in note for note in report.notes)


@pytest.mark.full
def test_estimate_runs_the_model_on_as_many_tokens_as_asked(tmp_path):
    from ckpt_tools import api

    model = write(tmp_path / "flux" / "transformer", "Flux2Transformer2DModel")
    found = call(api.estimate, model, mesh="dp_shard=2", seq_len=72)
    (case,) = found.cases
    assert case.tracked is not None, case.why_not_tracked
    assert found.params > 50_000
    assert any("hidden_states 1×64×4, encoder_hidden_states 1×8×24" in note for note in found.notes)


def test_model_without_its_library_says_which(monkeypatch):
    from ckpt_tools.models.recipe_of import recipe_of

    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UsageError, match="building a FluxTransformer2DModel needs diffusers") as caught:
        recipe_of(config_of("FluxTransformer2DModel"), "config.json")
    assert "ckpt-tools[diffusers]" in caught.value.hint


@pytest.mark.full
@pytest.mark.parametrize("name", ["FluxPipeline", "DDPMScheduler", "logging", "AutoModel", "Nothing", "os.path", "", 7])
def test_only_a_class_of_models_is_built(name):
    from ckpt_tools.models.recipe_of import recipe_of

    with pytest.raises(UsageError, match=r"no model class|names no class"):
        recipe_of({"_class_name": name}, "config.json")


@pytest.mark.full
def test_model_that_ckpt_cannot_feed_is_refused_by_the_name_of_what_it_lacks(built):
    what, hint = built["refused"]
    assert what == "ckpt cannot make a batch for a T2IAdapter: its forward needs x"
    assert "--factory" in hint


def test_component_of_a_pipeline_is_the_one_that_is_trained(tmp_path):
    assert component_of(str(tmp_path)) == (str(tmp_path), "")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UsageError, match=r"no component with a config\.json"):
        component_of(str(tmp_path))
    write(tmp_path / "vae", "AutoencoderKL")
    with pytest.raises(UsageError, match="without a transformer or unet: it has vae") as caught:
        component_of(str(tmp_path))
    assert caught.value.hint.endswith("/vae")
    write(tmp_path / "transformer", "FluxTransformer2DModel")
    path, which = component_of(str(tmp_path))
    assert path == str(tmp_path / "transformer")
    assert which == "the transformer of the diffusers pipeline (other components: vae)"


def test_config_of_diffusers_is_cut_in_depth_and_width():
    full = config_of("SD3Transformer2DModel") | {
        "num_layers": 24,
        "num_attention_heads": 24,
        "caption_projection_dim": 384,
    }
    cut = shrink_config(full)
    assert (cut["num_layers"], cut["num_attention_heads"], cut["caption_projection_dim"]) == (2, 2, 32)
    assert cut["attention_head_dim"] == 16
    assert "num_layers 24 → 2" in describe_cut(full, cut)
    flux = shrink_config(config_of("FluxTransformer2DModel") | {"num_single_layers": 38})
    assert flux["num_single_layers"] == 2


@pytest.mark.parametrize(("off", "is_found"), [(5e-7, False), (5e-6, True)])
def test_gradient_that_is_only_rounding_is_none_of_the_references_business(off, is_found):
    """A bias before a norm: what is left of a sum of large terms is rounding, and its largest element is, too."""
    import torch

    from ckpt_tools.preflight.smoke.checks import compare_gradients

    model = torch.nn.Linear(4, 4)
    model.weight.grad, model.bias.grad = torch.ones(4, 4), torch.full((4,), off)
    reference = {"weight": torch.ones(4, 4), "bias": torch.zeros(4)}
    assert bool(compare_gradients(model, reference, 1e-5).findings) is is_found
