"""Models and settings of PEFT that are easily got wrong: PEFT and transformers say what is right."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
import toys
from adapters import families
from adapters.families import save_dcp
from adapters.image_models import sdxl, sdxl_inputs
from adapters.peft_world import randomise
from adapters.test_merge import TOLERANCE, save_model
from adapters.world_models import LANGUAGE

from ckpt_tools import api
from ckpt_tools.errors import CkptError, UsageError

SMALL = {"intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40}
KINDS = {
    "llama": ("llama", SMALL | {"attention_bias": True}),
    "tied": ("llama", SMALL | {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3-moe", SMALL),
    "mixtral": ("mixtral", SMALL),
    "gpt_neox": ("gpt-neox", SMALL),
    "bert": ("bert-classifier", SMALL),
    "vit": ("vit", {"intermediate_size": 48, "num_hidden_layers": 1, "image_size": 16}),
}


def build(kind: str):
    if kind == "square":
        import transformers

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
        experts = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 32}
        layers = {"num_hidden_layers": 1, "sliding_window": 8, "layer_types": ["full_attention"]}
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **experts, **layers)).eval()
    name, settings = KINDS[kind]
    return toys.build(name, **settings)


def answers(model) -> torch.Tensor:
    shape = (2, 3, 16, 16)
    given = {"input_ids": torch.arange(1, 15).reshape(2, 7)}
    if model.config.model_type == "vit":
        given = {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(1))}
    with torch.no_grad():
        return model(**given).logits


class World:
    """A model, a random adapter of it, and what PEFT makes of the two."""

    def __init__(self, tmp_path, kind, *, method="Lora", **options) -> None:
        import peft

        options = ({"r": 4, "lora_alpha": 8} if method == "Lora" else {}) | options
        model, config = build(kind), getattr(peft, f"{method}Config")(**options)
        self.base, self.adapter = save_model(model, tmp_path / "base"), tmp_path / "adapter"
        with warnings.catch_warnings(action="ignore"):
            live = peft.get_peft_model(copy.deepcopy(model), config)
            trained = {name for name, p in live.named_parameters() if p.requires_grad}
            randomise(live, trained.__contains__)
            live.save_pretrained(self.adapter)
        self.live, self.kind = live.eval(), type(model)
        self.answers = answers(self.live)
        assert float((self.answers - answers(model)).abs().max()) > 1e-3

    def plain(self, path):
        with warnings.catch_warnings(action="ignore"):
            return self.kind.from_pretrained(path).eval()

    def check_merged(self, path) -> None:
        assert float((answers(self.plain(path)) - self.answers).abs().max()) <= 10 * TOLERANCE

    def load(self, path):
        from peft import PeftModel

        with warnings.catch_warnings(action="ignore"):
            return PeftModel.from_pretrained(self.plain(self.base), path).eval()

    def check_loads(self, path) -> None:
        assert torch.equal(answers(self.load(path)), self.answers)


# Parameters of stacked experts


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
PATTERNED = {"target_modules": [], "target_parameters": EXPERTS}
PATTERNED |= {"rank_pattern": {EXPERTS[0]: 2}, "alpha_pattern": {EXPERTS[1]: 3}}


def test_patterns_for_one_of_two_parameters_of_a_module_are_exported_without_a_base(tmp_path):
    world = World(tmp_path, "qwen3_moe", **PATTERNED)
    assert api.export_lora(world.adapter, tmp_path / "out").ok
    world.check_loads(tmp_path / "out")


@pytest.mark.parametrize("parameter", ["experts.gate_up_proj", "mlp.experts.down_proj"])
@pytest.mark.parametrize("kind", ["square", "mixtral"])
def test_experts_are_merged_as_peft_does(tmp_path, kind, parameter):
    world = World(tmp_path, kind, target_modules=["q_proj"], target_parameters=[parameter])
    assert api.check_lora(world.adapter, base=world.base).verdict == "loads"
    api.merge_lora(world.base, world.adapter, tmp_path / "merged")
    world.check_merged(tmp_path / "merged")
    (world.base / "config.json").rename(world.base / "other.json")
    if kind == "square" and "down_proj" in parameter:
        with pytest.raises(UsageError, match="are square"):
            api.merge_lora(world.base, world.adapter, tmp_path / "blind")


# Names in a model and on disk


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mixtral", {"target_modules": ["q_proj", "gate"]}),
        ("mixtral", {"target_modules": [], "target_parameters": ["experts.down_proj", "gate.weight"]}),
        ("gpt_neox", {"target_modules": ["lm_head", "dense"]}),
        ("vit", {"target_modules": ["q_proj", "o_proj", "fc1", "fc2"], "modules_to_save": ["classifier"]}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["experts.gate_up_proj"], "use_rslora": True}),
        ("qwen3_moe", PATTERNED),
    ],
)
def test_modules_whose_names_on_disk_are_others_are_found(tmp_path, kind, options):
    world = World(tmp_path, kind, **options)
    api.merge_lora(world.base, world.adapter, tmp_path / "merged")
    world.check_merged(tmp_path / "merged")
    result = api.export_lora(world.adapter, tmp_path / "exported", base=world.base)
    assert result.ok, result.findings
    world.check_loads(tmp_path / "exported")


def test_head_that_a_base_ties_is_a_module_of_its_model(tmp_path):
    world = World(tmp_path, "tied", target_modules=["q_proj", "lm_head"])
    result = api.export_lora(world.adapter, tmp_path / "exported", base=world.base)
    assert result.ok, result.findings
    world.check_loads(tmp_path / "exported")


# Heads


@pytest.mark.parametrize("options", [{}, {"task_type": "SEQ_CLS"}])
def test_task_whose_head_is_not_in_the_adapter_is_not_claimed(tmp_path, options):
    world = World(tmp_path, "bert", target_modules=["query", "dense"], **options)
    result = api.export_lora(world.adapter, tmp_path / "exported", base=world.base)
    assert result.config["task_type"].value == options.get("task_type")
    world.check_loads(tmp_path / "exported")
    if options:  # its head was trained, and is left out here
        result = api.export_lora(world.adapter, tmp_path / "part", base=world.base, exclude=("**classifier**",))
        assert result.config["task_type"].value is None
        assert "classifier" in result.config["task_type"].source
        world.load(tmp_path / "part")


# Convolutions


@pytest.mark.parametrize("both", [False, True])
def test_lokr_of_a_convolution_stays_one_without_its_base(tmp_path, both):
    options = {"r": 1, "alpha": 5, "decompose_both": both, "decompose_factor": 4, "init_weights": False}
    world = World(tmp_path, "vit", method="LoKr", target_modules=["projection", "fc1"], **options)
    result = api.export_lora(world.adapter, tmp_path / "exported")
    assert result.config["peft_type"].value == "LOKR"
    world.check_loads(tmp_path / "exported")


def test_oft_of_a_convolution_which_no_weights_can_say_is_not_merged(tmp_path):
    options = {"oft_block_size": 8, "target_modules": ["projection", "fc1"], "use_cayley_neumann": False}
    world = World(tmp_path, "vit", method="OFT", **options)
    merged = copy.deepcopy(world.live).merge_and_unload()
    assert float((answers(merged) - world.answers).abs().max()) > 1e-3  # PEFT's own is not what was trained
    with pytest.raises(UsageError, match="rotates patches"):
        api.merge_lora(world.base, world.adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What a checkpoint without a configuration or an optimizer does not say


def save_state(model, path):
    save_dcp({"model": model.state_dict()}, path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_that_were_trained_beside_the_factors_are_not_lost(tmp_path, dtype):
    world = World(tmp_path, "llama", target_modules=["q_proj"], bias="all")
    run = save_state(world.live, tmp_path / "run")
    with pytest.raises(UsageError, match="differ from the base's") as caught:
        api.merge_lora(world.base, run, tmp_path / "out", alpha=8)
    assert "--config bias=all" in (caught.value.hint or "")
    api.merge_lora(world.base, run, tmp_path / "out", alpha=8, config=("bias=all",))
    world.check_merged(tmp_path / "out")
    api.merge_lora(world.base, run, tmp_path / "factors", alpha=8, include=("**lora_**",))
    assert float((answers(world.plain(tmp_path / "factors")) - world.answers).abs().max()) > 1e-3
    # The same weights in another precision are no difference.
    plain = World(tmp_path / "plain", "llama", target_modules=["q_proj"])
    run = save_state(plain.live.to(dtype), tmp_path / "plain" / "run")
    api.merge_lora(plain.base, run, tmp_path / "plain" / "out", alpha=8)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_base_that_was_changed_to_begin_with_is_noticed_and_taken_from_the_checkpoint(tmp_path, init):
    world = World(tmp_path, "llama", target_modules=["q_proj", "v_proj"], init_lora_weights=init)
    run, said = save_state(world.live, tmp_path / "run"), [f"init_lora_weights={init}"]
    what = r"model\.layers\.0\.self_attn\.v_proj\.weight in .* differs from the base's"
    with pytest.raises(UsageError, match=what) as caught:
        api.merge_lora(world.base, run, tmp_path / "out", alpha=8)
    assert "init_lora_weights=pissa" in str(caught.value.hint)
    assert "--include" not in str(caught.value.hint)  # which leads to another model
    api.merge_lora(world.base, run, tmp_path / "out", alpha=8, config=said)
    world.check_merged(tmp_path / "out")
    with pytest.raises(UsageError, match="cannot be scaled"):
        api.merge_lora(world.base, run, tmp_path / "half", alpha=8, scale=0.5, config=said)


@pytest.mark.parametrize("trained", ["biases", "pissa"])
def test_export_against_its_base_notices_what_the_factors_do_not_hold(tmp_path, trained):
    options = {"bias": "all"} if trained == "biases" else {"init_lora_weights": "pissa"}
    world = World(tmp_path, "llama", target_modules=["q_proj", "v_proj"], **options)
    run = save_state(world.live, tmp_path / "run")
    with pytest.raises(UsageError, match="base"):
        api.export_lora(run, tmp_path / "out", alpha=8, base=world.base)
    said = "bias=all" if trained == "biases" else "init_lora_weights=pissa"
    assert api.export_lora(run, tmp_path / "out", alpha=8, base=world.base, config=(said,)).ok
    world.check_loads(tmp_path / "out")


# Fields of PEFT's configuration


def test_velora_is_a_lora_once_it_is_trained(tmp_path):
    from peft.tuners.lora.config import VeloraConfig

    world = World(tmp_path, "llama", target_modules=["q_proj"], velora_config=VeloraConfig())
    api.merge_lora(world.base, world.adapter, tmp_path / "merged")
    world.check_merged(tmp_path / "merged")
    assert "velora_config" not in api.export_lora(world.adapter, tmp_path / "out").config
    world.check_loads(tmp_path / "out")


def test_bdlora_is_refused_by_its_name(tmp_path):
    from peft import BdLoraConfig

    blocks = BdLoraConfig(target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"], nblocks=2)
    world = World(tmp_path, "llama", target_modules=["q_proj", "o_proj"], use_bdlora=blocks)
    with pytest.raises(UsageError, match="use_bdlora"):
        api.export_lora(world.adapter, tmp_path / "out")
    with pytest.raises(UsageError, match="use_bdlora") as caught:
        api.merge_lora(world.base, world.adapter, tmp_path / "out")
    assert "--to" not in (caught.value.hint or "")


def test_adapter_that_peft_does_not_load_exactly_is_said_to_be_one(tmp_path):
    world = World(tmp_path, "llama", target_modules=["q_proj"], init_lora_weights="pissa_niter_4")
    result = api.export_lora(world.adapter, tmp_path / "out")
    assert any("randomised algorithm" in note for note in result.conversion.notes)


def test_replicated_layers_have_no_names_in_the_base(tmp_path):
    world = World(tmp_path, "llama", target_modules=["q_proj"], layer_replication=[[0, 1], [0, 1]])
    with pytest.raises(UsageError, match="layer_replication"):
        api.export_lora(world.adapter, tmp_path / "out", base=world.base)
    assert api.export_lora(world.adapter, tmp_path / "out").ok
    world.check_loads(tmp_path / "out")


def test_tied_modules_of_which_one_is_missing_are_refused(tmp_path):
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    world = World(tmp_path, "tied", target_modules=["q_proj"], **options)
    assert api.export_lora(world.adapter, tmp_path / "out").ok
    world.check_loads(tmp_path / "out")
    with pytest.raises(UsageError, match="only one of the embedding and the head"):
        api.export_lora(world.adapter, tmp_path / "part", exclude=("**lm_head**",))


def test_orientation_that_is_neither_true_nor_false_is_refused(tmp_path):
    world = World(tmp_path, "llama", target_modules=["q_proj"])
    path = world.adapter / "adapter_config.json"
    path.write_text(path.read_text().replace('"fan_in_fan_out": false', '"fan_in_fan_out": "yes"'))
    with pytest.raises(UsageError, match="must be true or false"):
        api.merge_lora(world.base, world.adapter, tmp_path / "out")


# Values


def test_rows_that_are_finite_in_a_base_with_others_that_are_not_stay_finite(tmp_path):
    from safetensors.torch import load_file, save_file

    world = World(tmp_path, "llama", target_modules=["q_proj"])
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(world.base / "model.safetensors")
    tensors[name][3, 5] = float("nan")
    save_file(tensors, world.base / "model.safetensors", {"format": "pt"})
    api.merge_lora(world.base, world.adapter, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")[name]
    assert int(found.isnan().sum()) == 1
    file = world.adapter / "adapter_model.safetensors"
    factors = load_file(file)
    factors[f"base_model.model.{name[:-7]}.lora_B.weight"][7, 0] = float("inf")
    save_file(factors, file, {"format": "pt"})
    with pytest.raises(CkptError, match="not finite"):
        api.merge_lora(world.base, world.adapter, tmp_path / "broken")


# Image models


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    model = sdxl()
    torch.manual_seed(1)
    return model, sdxl_inputs()


CONVOLUTIONS = ["conv1", "conv_shortcut", "downsamplers.0.conv", "attn1.to_q", "conv_in"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dora", "loha", "lokr"])
def test_convolutions_of_sdxl_are_what_diffusers_loads_and_what_is_merged(tmp_path, unet, kind):
    import peft
    from diffusers.loaders.lora_pipeline import StableDiffusionXLLoraLoaderMixin as Loader

    model, given = unet
    config = {
        "dora": peft.LoraConfig(r=4, lora_alpha=6, target_modules=CONVOLUTIONS, use_dora=True),
        "loha": peft.LoHaConfig(r=2, alpha=3, target_modules=CONVOLUTIONS, init_weights=False),
        "lokr": peft.LoKrConfig(r=2, alpha=3, target_modules=CONVOLUTIONS, init_weights=False),
    }[kind]
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path / "base")
        live = peft.get_peft_model(copy.deepcopy(model), config)
        trained = {name for name, p in live.named_parameters() if p.requires_grad}
        randomise(live, trained.__contains__)
        live.save_pretrained(tmp_path / "adapter")

    def draw(net) -> torch.Tensor:
        with torch.no_grad():
            return net.eval()(**given, return_dict=False)[0]

    wanted = draw(live)
    bound = 1e-5 * max(1.0, float(wanted.abs().max()))
    result = api.export_lora(tmp_path / "adapter", tmp_path / "out", to="diffusers", architecture="sdxl")
    assert result.ok
    file = next((tmp_path / "out").glob("*.safetensors"))
    with warnings.catch_warnings(action="ignore"):
        state, alphas, metadata = Loader.lora_state_dict(
            str(tmp_path / "out"), unet_config=model.config, return_lora_metadata=True
        )
        loaded = copy.deepcopy(model)
        Loader.load_lora_into_unet(state, network_alphas=alphas, unet=loaded, metadata=metadata)
    assert float((draw(loaded) - wanted).abs().max()) <= bound
    api.merge_lora(tmp_path / "base", file, tmp_path / "merged")  # ranks of the header's patterns, axis of magnitudes
    merged = type(model).from_pretrained(tmp_path / "merged")
    assert float((draw(merged) - wanted).abs().max()) <= bound


# Experts that are stacked in parameters (PEFT's target_parameters), out of trainable-only checkpoints

GPT_OSS = LANGUAGE["gpt-oss"]


@pytest.mark.parametrize("parameters", [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")])
@pytest.mark.parametrize("targets", [[], ["q_proj"]])
def test_gpt_oss_is_exported_with_its_base_and_refused_without(tmp_path, parameters, targets):
    from peft import LoraConfig, PeftModel, get_peft_model

    names = [f"mlp.experts.{name}" for name in parameters]
    GPT_OSS.save(tmp_path / "base")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, target_parameters=names)
    with warnings.catch_warnings(action="ignore"):
        adapted = get_peft_model(GPT_OSS.build(), config)
    randomise(adapted, lambda name: "lora_" in name)
    expected = GPT_OSS.outputs(adapted)
    assert not torch.allclose(expected, GPT_OSS.outputs(GPT_OSS.build()), atol=1e-2)
    factors = {name: tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    families.save_dcp({"model": factors}, tmp_path / "dcp")
    with pytest.raises(UsageError, match="target_parameters") as caught:
        api.export_lora(tmp_path / "dcp", tmp_path / "none", alpha=8)
    assert "--base" in caught.value.hint
    options = [{"base": tmp_path / "base"}, {"config": (f"target_parameters={json.dumps(names)}", "r=4")}]
    for number, given in enumerate(options):
        assert api.export_lora(tmp_path / "dcp", tmp_path / f"out{number}", alpha=8, **given).ok
        with warnings.catch_warnings(action="ignore"):  # FutureWarning of transformers about PEFT's calls
            warnings.simplefilter("error", UserWarning)
            loaded = PeftModel.from_pretrained(GPT_OSS.build(), tmp_path / f"out{number}").eval()
        torch.testing.assert_close(GPT_OSS.outputs(loaded), expected, rtol=0, atol=0)
