"""`check-lora --for peft` against PEFT: it says "whole" where PEFT gives the trained outputs back, and nowhere else."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from adapters.peft_world import randomise
from adapters.test_merge import adapt, assert_merged, llama, world as merged
from adapters.test_merge_base import embedding_config
from adapters.world_adapters import Config, Damage, Tensors, change as reshape, drop, rename, say
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_tools import api
from ckpt_tools.adapters.check import check_lora
from ckpt_tools.errors import CkptError, UsageError

ROOT = "base_model.model."
IDS = torch.arange(10)[None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.norm = nn.Linear(8, 8), nn.Linear(8, 16, bias=False), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.v(torch.tanh(self.q(x)))[..., :8])


class Toy(nn.Module):
    """Every kind of module that PEFT wraps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.config = {"model_type": "toy", "tie_word_embeddings": False}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.conv(x.transpose(1, 2)[..., None].expand(-1, -1, -1, 4))[..., 0].transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS)


def whole(_: Tensors, __: Config) -> None:
    pass


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: max(1, len(tensor) // 2)]


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:1]])


LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q"]}
LOHA = {"r": 2, "alpha": 4, "target_modules": ["q", "conv"], "use_effective_conv2d": True}
LOKR = {"r": 1, "alpha": 4, "target_modules": ["q", "conv"], "decompose_both": True, "decompose_factor": 2}
OFT = {"oft_block_size": 2, "target_modules": ["q", "conv"]}
BOFT = {"boft_block_size": 2, "target_modules": ["q", "conv"]}
INDEX = {"layers_to_transform": [0, 2], "layers_pattern": "layers"}

CASES: dict[str, tuple[str, Config, Damage]] = {
    "lora": ("Lora", LORA, whole),
    "lora of every kind of module": ("Lora", LORA | {"target_modules": ["q", "v", "conv", "embed", "head"]}, whole),
    "lora, all-linear": ("Lora", LORA | {"target_modules": "all-linear"}, whole),
    "lora, some layers": ("Lora", LORA | INDEX, whole),
    "lora, a layer excluded": ("Lora", LORA | {"exclude_modules": ["layers.1.q"]}, whole),
    "lora, a pattern excluded": ("Lora", LORA | {"exclude_modules": r".*layers\.1.*"}, whole),
    "lora with all biases": ("Lora", LORA | {"bias": "all"}, whole),
    "lora with its biases": ("Lora", LORA | {"bias": "lora_only"}, whole),
    "lora with biases of its own": ("Lora", LORA | {"lora_bias": True}, whole),
    "lora with a saved head": ("Lora", LORA | {"modules_to_save": ["head"]}, whole),
    "lora with saved norms": ("Lora", LORA | {"modules_to_save": ["norm"], "target_modules": ["v"]}, whole),
    "lora of parameters": (
        "Lora", {"r": 2, "lora_alpha": 4, "target_modules": [], "target_parameters": ["layers.0.v.weight"]}, whole,
    ),
    "lora of parameters with all biases": (
        "Lora", LORA | {"target_modules": ["v"], "target_parameters": ["layers.0.q.weight"], "bias": "all"}, whole,
    ),
    "dora": ("Lora", LORA | {"use_dora": True, "target_modules": ["q", "conv"]}, whole),
    "loha": ("LoHa", LOHA, whole),
    "loha, flat convolutions": ("LoHa", LOHA | {"use_effective_conv2d": False}, whole),
    "lokr": ("LoKr", LOKR, whole),
    "lokr, full": ("LoKr", LOKR | {"r": 64}, whole),
    "lokr, Tucker": ("LoKr", LOKR | {"use_effective_conv2d": True}, whole),
    "oft": ("OFT", OFT, whole),
    "oft, one block for all": ("OFT", OFT | {"block_share": True}, whole),
    "boft": ("BOFT", BOFT, whole),
    # What PEFT refuses.
    "no targets": ("Lora", LORA, say(target_modules=None)),
    "targets nowhere": ("Lora", LORA, say(target_modules=["k"])),
    "no rank": ("Lora", LORA, say(r=None)),
    "rank of 0": ("Lora", LORA, say(r=0)),
    "no alpha": ("Lora", LORA, say(lora_alpha=None)),
    "bias unknown": ("Lora", LORA, say(bias="some")),
    "pattern and layers": ("Lora", LORA | {"target_modules": r".*\.q"}, say(layers_to_transform=[0])),
    "pattern of layers alone": ("Lora", LORA, say(layers_pattern="layers")),
    "tokens that are not there": ("Lora", LORA, say(trainable_token_indices=[1])),
    "head that is not there": ("Lora", LORA, say(modules_to_save=["head"])),
    "head without its bias": ("Lora", LORA | {"modules_to_save": ["head"]}, drop("head.bias")),
    "norm without its bias": ("Lora", LORA | {"modules_to_save": ["norm"]}, drop("layers.1.norm.bias")),
    "A with too many columns": ("Lora", LORA, reshape("lora_A", lambda t: torch.cat([t, t], 1))),
    "B with too few rows": ("Lora", LORA, reshape("lora_B", half)),
    "magnitude too long": ("Lora", LORA | {"use_dora": True}, reshape("magnitude", longer)),
    "loha w2_a too long": ("LoHa", LOHA, reshape("hada_w2_a", longer)),
    "loha core cut": ("LoHa", LOHA, reshape("hada_t1", lambda t: t[..., :1])),
    "lokr w1 too long": ("LoKr", LOKR, reshape("lokr_w1", longer)),
    "lokr w2_b cut": ("LoKr", LOKR, reshape("lokr_w2_b", lambda t: t[:, :1])),
    "oft cut": ("OFT", OFT, reshape("oft_R", half)),
    "oft of blocks and a number": ("OFT", OFT, say(r=4)),
    "oft of other blocks": ("OFT", OFT, say(oft_block_size=4)),
    "boft too long": ("BOFT", BOFT, reshape("boft_R", longer)),
    "boft scale cut": ("BOFT", BOFT, reshape("q.boft_s", half)),
    # What PEFT loads without, or with a warning, and what then is another adapter.
    "excluded later": ("Lora", LORA, say(exclude_modules=["layers.1.q"])),
    "excluded by a pattern": ("Lora", LORA, say(exclude_modules=r".*layers\.1.*")),
    "layers chosen later": ("Lora", LORA, say(**INDEX)),
    "target saved as well": ("Lora", LORA | {"target_modules": ["q", "head"]}, say(modules_to_save=["head"])),
    "biases lost": ("Lora", LORA | {"bias": "all"}, drop("norm.bias")),
    "biases of targets lost": ("Lora", LORA | {"bias": "lora_only"}, drop("1.q.base_layer.bias")),
    "lora_bias unset": ("Lora", LORA | {"lora_bias": True}, say(lora_bias=False)),
    "lora_bias lost": ("Lora", LORA | {"lora_bias": True}, drop("lora_B.bias")),
    "magnitudes lost": ("Lora", LORA | {"use_dora": True}, drop("magnitude")),
    "a layer lost": ("Lora", LORA, drop("layers.2.")),
    "a B lost": ("Lora", LORA, drop("layers.2.q.lora_B")),
    "a factor of loha lost": ("LoHa", LOHA, drop("layers.0.q.hada_w2_b")),
    "a layer of loha lost": ("LoHa", LOHA, drop("layers.0.q")),
    "a layer of lokr lost": ("LoKr", LOKR, drop("layers.1.q")),
    "oft lost": ("OFT", OFT, drop("layers.1.q")),
    "boft scale lost": ("BOFT", BOFT, drop("layers.1.q.boft_s")),
    "names of another model": ("LoKr", LOKR, rename("base_model.model.", "base_model.model.model.")),
    "a suffix lost": ("Lora", LORA, rename("lora_A.weight", "lora_A")),
    # What was saved under other names, or of other settings.
    "dora forgotten": ("Lora", LORA | {"use_dora": True}, say(use_dora=False)),
    "adapter's name in the names": ("Lora", LORA, rename(".weight", ".default.weight")),
    "another adapter's name": ("Lora", LORA, rename(".weight", ".other.weight")),
    "without the root": ("Lora", LORA, rename("base_model.model.", "")),
    "another root": ("Lora", LORA, rename("base_model.model.", "module.base_model.model.")),
    "compiled": ("Lora", LORA, rename("base_model.model.", "base_model.model._orig_mod.")),
    "targets too few": ("Lora", LORA | {"target_modules": ["q", "v"]}, say(target_modules=["q"])),
    "targets by pattern": ("Lora", LORA | {"target_modules": r".*layers\.0\.(q|v)"}, whole),
    "kohya's suffixes": ("Lora", LORA, rename("lora_A", "lora_down")),
    "another rank": ("Lora", LORA, say(r=3)),
    "rank pattern": ("Lora", LORA | {"rank_pattern": {"layers.1.q": 3}}, whole),
    "rank pattern forgotten": ("Lora", LORA | {"rank_pattern": {"layers.1.q": 3}}, say(rank_pattern={})),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    save_file(Toy().state_dict(), directory / "model.safetensors")
    return directory


def trained(family: str, config: Config, directory: Path) -> torch.Tensor:
    """Save an adapter with something in every factor; returns the outputs of the model that has it."""
    import peft

    with warnings.catch_warnings(action="ignore"):
        options = {"target_modules": None} | config
        model = peft.get_peft_model(Toy(), getattr(peft, f"{family}Config")(**options))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.3)
        model.save_pretrained(directory)
    return outputs(model)


@pytest.mark.parametrize("case", CASES)
def test_peft_rules_say_what_peft_does(case: str, base: Path, tmp_path: Path) -> None:
    import peft

    family, config, damage = CASES[case]
    meant = trained(family, config, tmp_path)
    file, document = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors, settings = load_file(file), json.loads(document.read_text())
    damage(tensors, settings)
    save_file(tensors, file)
    document.write_text(json.dumps(settings))
    with warnings.catch_warnings(action="ignore"):
        try:
            loaded = peft.PeftModel.from_pretrained(Toy(), tmp_path)
            found = outputs(loaded)
        except Exception:  # whatever it raises: the question is whether it does
            found = None
    result = check_lora(tmp_path, base=base, loaders=["peft"])
    (report,) = result.loaders
    plain = family == "Lora" and {"q", "v"} >= {*config["target_modules"]} and "bias" not in config
    if found is not None and plain and case != "a B lost":
        ups = {
            name.removeprefix(ROOT).partition(".lora_B")[0]
            for name, t in loaded.named_parameters()
            if "lora_B" in name and t.any()
        }
        assert {module for module in report.matched if module[-1] in "qv"} == ups
    assert result.ok is (found is not None and torch.allclose(found, meant, atol=1e-5)), report.findings
    if damage is whole:
        assert result.ok
        assert (report.is_whole, report.unmatched) == (True, ())
        return
    codes = {finding.code for finding in report.findings if finding.severity == "error"}
    if found is None and case not in ("no targets", "targets nowhere"):  # said in another way, and refused as well
        assert (report.loads, codes) == (False, {"loader-rejects"})
    elif found is not None:
        assert report.loads is True
        assert bool(codes) is not result.ok, result.findings


def test_targets_that_the_file_has_nothing_for_are_an_error(base: Path, tmp_path: Path) -> None:
    """Nothing tells whether they were lost or never trained; PEFT itself never saves such an adapter."""
    trained("Lora", LORA, tmp_path)
    document = tmp_path / "adapter_config.json"
    document.write_text(json.dumps(json.loads(document.read_text()) | {"target_modules": ["q", "v"]}))
    result = check_lora(tmp_path, base=base, loaders=["peft"])
    assert [(f.code, f.severity) for f in result.findings] == [("loader-incomplete", "error")]
    document.write_text(json.dumps(json.loads(document.read_text()) | {"target_modules": ["q"]}))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    drop("layers.2.")(tensors, {})
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    result = check_lora(tmp_path, base=base, loaders=["peft"])
    (finding,) = result.findings
    assert (finding.code, finding.severity) == ("loader-incomplete", "error")
    assert "layers.2.q" in finding.what


def test_resized_embedding_is_told_and_another_width_refused(base: Path, tmp_path: Path) -> None:
    trained("Lora", LORA | {"modules_to_save": ["embed"]}, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "embed" in name)
    save_file(tensors | {name: torch.randn(14, 8)}, file)
    result = check_lora(tmp_path, base=base, loaders=["peft"])
    assert [(f.code, f.severity) for f in result.findings] == [("loader-needs", "warning")]
    assert "resized" in result.findings[0].what
    save_file(tensors | {name: torch.randn(12, 4)}, file)
    assert [f.code for f in check_lora(tmp_path, base=base, loaders=["peft"]).findings] == ["loader-rejects"]


def test_layer_that_predicts_further_tokens_is_no_lost_one(base: Path, tmp_path: Path) -> None:
    """Checkpoints of DeepSeek-V3 and GLM-4.5 hold a layer that transformers does not load."""
    trained("Lora", LORA, tmp_path / "adapter")
    tensors = load_file(base / "model.safetensors")
    tensors |= {name.replace("layers.2", "layers.3"): t for name, t in tensors.items() if "layers.2" in name}
    (tmp_path / "base").mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "base" / "model.safetensors")
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 3}))
    assert not check_lora(tmp_path / "adapter", base=tmp_path / "base", loaders=["peft"]).ok
    config.write_text(json.dumps({"num_hidden_layers": 3, "num_nextn_predict_layers": 1}))
    assert not check_lora(tmp_path / "adapter", base=tmp_path / "base", loaders=["peft"]).findings


# Settings against tensors: what was lost, contradicts the options or is another adapter's is never passed over


def test_adapter_in_a_directory_beside_the_default_one_is_the_one_that_is_taken(tmp_path):
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]))
        model.add_adapter("two", LoraConfig(r=2, lora_alpha=9, target_modules=["o_proj"]))
        randomise(model, lambda name: "lora_" in name)
        model.save_pretrained(tmp_path / "both")
    api.export_lora(tmp_path / "both", tmp_path / "out", adapter="two")
    expected = load_file(tmp_path / "both" / "two" / "adapter_model.safetensors")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 9


@pytest.mark.parametrize("lost", ["all", "one"])
def test_magnitudes_that_were_lost_are_an_error_everywhere(tmp_path, lost):
    _, base, expected = merged(tmp_path, "dora")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    whole = load_file(file)
    gone = [name for name in whole if "magnitude" in name and (lost == "all" or "q_proj" in name)]
    save_file({name: tensor for name, tensor in whole.items() if name not in gone}, file)
    report = api.check_lora(tmp_path / "adapter", loaders=["peft"])
    (finding,) = [f for f in report.findings if f.code == "adapter-missing-factor"]
    assert len(gone) == 1 or f"({len(gone)} times: " in finding.what
    assert not report.ok
    with pytest.raises(CkptError, match="use_dora is true"):
        api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    assert not api.export_lora(tmp_path / "adapter", tmp_path / "out").ok
    assert not (tmp_path / "out").exists()

    save_file(whole, file)
    assert api.check_lora(tmp_path / "adapter", base=base, loaders=["peft"]).ok
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    assert_merged(tmp_path / "out", expected, base)


def test_lora_bias_that_was_lost_is_an_error(tmp_path):
    config = embedding_config(target_modules=["q_proj"], lora_bias=True)
    _, base, _ = merged(tmp_path, config, llama(attention_bias=True))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    assert api.check_lora(tmp_path / "adapter", base=base, loaders=["peft"]).ok
    save_file({name: tensor for name, tensor in load_file(file).items() if not name.endswith("bias")}, file)
    report = api.check_lora(tmp_path / "adapter", loaders=["peft"])
    assert any(f.code == "adapter-missing-factor" and "B_bias" in f.what for f in report.findings)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"config": ['target_modules=["k_proj"]']}, "does not match"),
        ({"config": ['modules_to_save=["lm_head"]']}, "whole: none"),
        ({"architecture": "nonsense"}, "unknown model family"),
    ],
)
def test_options_that_the_tensors_contradict_are_refused_not_ignored(tmp_path, options, what):
    adapt(llama(), embedding_config(target_modules=["q_proj"]), tmp_path / "adapter")
    with pytest.raises(UsageError, match=what) as caught:
        api.export_lora(tmp_path / "adapter", tmp_path / "out", **options)
    assert "architecture" not in options or "flux1" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.k_proj.base_layer.bias", "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.base_layer.bias", "model.layers.0.self_attn.nothing.bias",
    ],
)  # fmt: skip
@pytest.mark.parametrize("with_base", [True, False])
def test_simulated_peft_takes_the_base_s_own_tensors_as_the_real_one_does(tmp_path, name, with_base):
    from peft import PeftModel

    config = embedding_config(target_modules=["q_proj"])
    model, base, _ = merged(tmp_path, config, llama(attention_bias=True))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    plain = name.replace(".base_layer", "")
    before = model.state_dict().get(plain, torch.zeros(32))
    save_file(load_file(file) | {f"base_model.model.{name}": before + 1}, file)
    with warnings.catch_warnings(action="ignore"):
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").merge_and_unload().state_dict()
    is_taken = plain in loaded and torch.allclose(loaded[plain], before + 1)
    report = api.check_lora(tmp_path / "adapter", base=base if with_base else None, loaders=["peft"])
    if with_base or "nothing" not in name:
        assert report.loaders[0].is_whole is is_taken


@pytest.mark.parametrize("options", [{}, {"target_modules": ["q_proj"], "bias": "all"}], ids=["embedding", "biases"])
def test_what_peft_saves_itself_is_ok(tmp_path, options):
    _, base, _ = merged(tmp_path, embedding_config(**options), llama(attention_bias=True))
    assert api.check_lora(tmp_path / "adapter", loaders=["peft"]).verdict == "unknown"
    assert api.check_lora(tmp_path / "adapter", base=base, loaders=["peft"]).ok
