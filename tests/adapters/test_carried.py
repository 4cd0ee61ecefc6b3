"""PEFT's types that ckpt carries, against PEFT itself: out of a live model's DCP, and checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ckpt_tools.adapters.check import check_lora
from ckpt_tools.adapters.ecosystems.peft import loader as asked
from ckpt_tools.api import export_lora, merge_lora
from ckpt_tools.errors import CkptError, UnreadableError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
QVD = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
PROMPT = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
CASES: Mapping[str, tuple[str, dict]] = {
    "AdaLoRA": ("ADALORA", QVD | {"init_r": 4, "target_r": 2, "total_step": 10, "lora_alpha": 3}),
    "AdaMSS": ("ADAMSS", QVD),
    "BEFT": ("BEFT", {"target_modules": ["v_proj"]}),
    "C3A": ("C3A", QVD | {"block_size": 4, "block_size_pattern": {"v_proj": 2}}),
    "DEFT": ("DEFT", QVD),
    "DEFT, para": ("DEFT", QVD | {"para": True, "r": 2}),
    "DeLoRA": ("DELORA", QVD | {"rank_pattern": {"q_proj": 3}}),
    "FourierFT": ("FOURIERFT", QVD | {"n_frequency": 8, "random_loc_seed": 2**40 + 9}),
    "GLoRA": ("GLORA", QVD),
    "GraLoRA": ("GRALORA", QVD | {"r": 4, "gralora_k": 2}),
    "GraLoRA, hybrid": ("GRALORA", QVD | {"r": 4, "gralora_k": 2, "hybrid_r": 3}),
    "HiRA": ("HIRA", QVD),
    "HiRA, embedding": ("HIRA", {"target_modules": ["embed_tokens", "q_proj"]}),
    "HRA": ("HRA", QVD | {"r": 3}),
    "IA3": ("IA3", QVD | {"feedforward_modules": ["down_proj"]}),
    "Lily": ("LILY", QVD | {"r": 2}),
    "LN tuning": ("LN_TUNING", {"target_modules": ["input_layernorm"]}),
    "MiSS": ("MISS", QVD | {"r": 5}),
    "MiSS, mini": ("MISS", QVD | {"r": 3, "mini_r": 4, "init_weights": "mini"}),
    "OSF": ("OSF", QVD),
    "PEANuT": ("PEANUT", QVD | {"r": 4, "depth": 1}),
    "PSOFT": ("PSOFT", QVD | {"r": 2}),
    "PVeRA": ("PVERA", QVD | {"r": 4}),
    "RandLoRA": ("RANDLORA", QVD | {"r": 3}),
    "RoAd": ("ROAD", QVD | {"group_size": 4}),
    "SHiRA": ("SHIRA", QVD | {"r": 2}),
    "SuperTuning": ("SUPERTUNING", QVD),
    "TinyLoRA": ("TINYLORA", QVD),
    "Uni-LoRA": ("UNILORA", QVD),
    "VB-LoRA": ("VBLORA", QVD | {"r": 2, "num_vectors": 8, "vector_length": 4, "topk": 2}),
    "VB-LoRA, the largest": (
        "VBLORA",
        QVD | {"r": 2, "num_vectors": 8, "vector_length": 4, "topk": 2, "save_only_topk_weights": True},
    ),
    "VeRA": ("VERA", QVD | {"r": 4}),
    "VeRA, drawn anew": ("VERA", QVD | {"r": 4, "save_projection": False}),
    "WaveFT": ("WAVEFT", QVD | {"n_frequency": 8}),
    "prompt": ("PROMPT_TUNING", PROMPT),
    "P-tuning": ("P_TUNING", PROMPT),
    "prefix": ("PREFIX_TUNING", PROMPT),
    "prefix, projected": ("PREFIX_TUNING", PROMPT | {"prefix_projection": True, "encoder_hidden_size": 8}),
}
UNPROVEN = frozenset({"AdaMSS", "SHiRA", "Uni-LoRA", "prefix", "prefix, projected"})
"""What PEFT makes of these depends on more than names and shapes of the base."""
OF_ANY_SIZE = frozenset({"FourierFT", "WaveFT", "MiSS, mini", "PSOFT"})
"""Their tensors do not depend on the weight's shape: PEFT loads them for any."""
NOT_IN_A_STATE_DICT = {"SHiRA": "shira_indices", "P-tuning": "computes when it saves", "prefix, projected": "computes"}
OTHERS = ("vllm", "diffusers", "kohya", "comfyui")
QUICK = ("AdaLoRA", "IA3", "VeRA", "prompt")


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(8)[None]).logits


@dataclass
class Bench:
    """Small models with biases, and what PEFT trained on them."""

    root: Path

    def base(self, kind: str = "base", hidden: int = 16) -> Path:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        path = self.root / kind
        if not path.exists():
            torch.manual_seed(0)
            sizes = {"hidden_size": hidden, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
            model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    nn.init.normal_(parameter)
            model.save_pretrained(path)
        return path

    def fresh(self) -> nn.Module:
        from transformers import Qwen2ForCausalLM

        return Qwen2ForCausalLM.from_pretrained(self.base())

    def loaded(self, path: Path) -> nn.Module:
        import peft

        return peft.PeftModel.from_pretrained(self.fresh(), path)

    def trained(self, name: str) -> tuple[Path, Path, Tensor]:
        """Return PEFT's own directory, a DCP of the live model with the configuration beside, and what it computes."""
        import peft

        path, kind = self.root / name, CASES[name]
        base = self.fresh()
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind[0]](**kind[1]))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        if not path.exists():
            model.save_pretrained(path / "peft")
            dcp.save({"model": model.state_dict()}, checkpoint_id=path / "dcp", no_dist=True)
            shutil.copy(path / "peft" / CONFIG, path / "dcp" / CONFIG)
        return path / "peft", path / "dcp", outputs(model)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("carried"))


class Here:
    """Asks PEFT in this process; test_check_world.py has the child, which takes seconds to import it."""

    def __init__(self, _function, job, _answer, **_options):
        from transformers import Qwen2Config, Qwen2ForCausalLM

        with torch.device("meta"):
            model = Qwen2ForCausalLM(Qwen2Config(**json.loads(job.base)))
        self.result = partial(asked.judge, model, json.loads(job.config), job.shapes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture(autouse=True)
def _without_a_child(monkeypatch):
    monkeypatch.setattr(asked, "Child", Here)


def test_without_peft_or_a_base_nothing_is_proven(bench, monkeypatch):
    directory, _, _ = bench.trained("VeRA")
    result = check_lora(directory)
    assert (result.verdict, "--base" in " ".join(result.not_checked)) == ("unknown", True)
    monkeypatch.setattr(asked.importlib.util, "find_spec", lambda name: None if name == "peft" else name)
    result = check_lora(directory, base=bench.base())
    assert (result.verdict, "pip install 'ckpt-tools[hf]'" in " ".join(result.not_checked)) == ("unknown", True)


@pytest.mark.full(but=QUICK)
@pytest.mark.parametrize("name", CASES)
def test_peft_directory_is_checked_as_peft_loads_it(bench, name):
    directory, _, meant = bench.trained(name)
    torch.testing.assert_close(outputs(bench.loaded(directory)), meant, rtol=0, atol=1e-6 if "largest" in name else 0)
    result = check_lora(directory, base=bench.base())
    assert result.verdict == ("unknown" if name in UNPROVEN else "loads"), (result.findings, result.not_checked)
    assert not [each for each in result.findings if each.severity == "error"]


@pytest.mark.full(but=QUICK)
@pytest.mark.parametrize("name", CASES)
def test_export_from_a_live_models_dcp_keeps_every_byte(bench, name, tmp_path):
    directory, source, meant = bench.trained(name)
    if name in NOT_IN_A_STATE_DICT:
        try:
            what = " ".join(each.what for each in export_lora(source, tmp_path / "out").findings)
        except CkptError as error:
            what = error.what
        assert NOT_IN_A_STATE_DICT[name] in what
        assert not (tmp_path / "out").exists()
        return
    export_lora(source, tmp_path / "out")
    there, here = load_file(directory / FILE), load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(there[key], tensor) for key, tensor in here.items() if key in there)
    # What modules share once more, the base's own, and all logits in the place of the largest.
    again = (".randlora_", "embed_tokens.base_layer.weight", "_topk_")
    assert all(any(part in key for part in again) for key in there.keys() - here.keys())
    ours, theirs = (json.loads((path / CONFIG).read_text()) for path in (tmp_path / "out", directory))
    assert ours == {name: value for name, value in theirs.items() if value is not None}
    assert torch.equal(outputs(bench.loaded(tmp_path / "out")), meant)
    verdict = check_lora(tmp_path / "out", base=bench.base()).verdict
    assert verdict == ("unknown" if name in UNPROVEN else "loads")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES))
def test_peft_directory_comes_out_as_it_was(bench, name, tmp_path):
    directory, _, _ = bench.trained(name)
    export_lora(directory, tmp_path / "out")
    there, here = load_file(directory / FILE), load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(there[key], tensor) for key, tensor in here.items())
    assert torch.equal(outputs(bench.loaded(tmp_path / "out")), outputs(bench.loaded(directory)))
    assert not any(check_lora(tmp_path / "out", base=bench.base(), loaders=(each,)).ok for each in OTHERS)


def damaged(name: str, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return what may happen to an adapter: a tensor lost, cut, empty, or without its end."""
    first = next(key for key in sorted(tensors, reverse=True) if not key.endswith(("randlora_A", "randlora_B")))
    others = {key: tensor for key, tensor in tensors.items() if key != first}
    kinds = {
        "lost": others,
        "cut": others | {first: tensors[first].flatten()[:-1].clone()},
        "empty": others | {first: tensors[first][:0]},
        "renamed": others | {f"{first}_": tensors[first]},
    }
    if "layers.1" in first:
        kinds["a layer more"] = tensors | {first.replace("layers.1", "layers.9"): tensors[first].clone()}
    if "indices" not in first:
        kinds["not finite"] = others | {first: tensors[first] * torch.nan}
    return kinds


@pytest.mark.full(but=QUICK)
@pytest.mark.parametrize("name", sorted(CASES))
def test_damaged_adapter_never_loads(bench, name, tmp_path):
    directory, _, _ = bench.trained(name)
    for kind, tensors in damaged(name, load_file(directory / FILE)).items():
        path = tmp_path / kind.replace(" ", "-")
        path.mkdir()
        shutil.copy(directory / CONFIG, path / CONFIG)
        save_file(tensors, path / FILE)
        try:
            result = check_lora(path, base=bench.base())
        except UnreadableError:
            continue
        if kind == "a layer more" and name not in UNPROVEN:
            assert any("layers.9" in each for each in result.loaders[0].unmatched)
        wanted = {"unknown", "fails"} if name in UNPROVEN and kind != "not finite" else {"fails"}
        assert result.verdict in wanted, kind


@pytest.mark.full(but=QUICK)
@pytest.mark.parametrize("name", sorted(CASES.keys() - UNPROVEN - OF_ANY_SIZE))
def test_adapter_of_another_base_fails(bench, name):
    directory, _, _ = bench.trained(name)
    assert check_lora(directory, base=bench.base("other", hidden=24)).verdict == "fails"


def test_a_configuration_that_is_not_there_is_asked_for(bench, tmp_path):
    _, source, _ = bench.trained("VeRA")
    shutil.copytree(source, tmp_path / "dcp", ignore=shutil.ignore_patterns(CONFIG))
    with pytest.raises(UsageError, match="do not show its configuration") as caught:
        export_lora(tmp_path / "dcp", tmp_path / "out")
    shutil.copy(source / CONFIG, tmp_path / "dcp")
    assert "adapter_config.json" in str(caught.value.hint)
    assert export_lora(tmp_path / "dcp", tmp_path / "out").ok
    with pytest.raises(UsageError, match="must be written whole"):
        export_lora(tmp_path / "dcp", tmp_path / "some", exclude=("**.layers.1.**",))


def test_only_peft_takes_a_carried_type(bench, tmp_path):
    directory, _, _ = bench.trained("IA3")
    with pytest.raises(UsageError, match="IA³ cannot be written for libraries other than PEFT"):
        export_lora(directory, tmp_path / "out", to="kohya")
    with pytest.raises(UsageError, match="IA³ cannot be merged by ckpt") as caught:
        merge_lora(bench.base(), directory, tmp_path / "out")
    assert "merge_and_unload" in str(caught.value.hint)


def test_adalora_that_was_pruned(bench, tmp_path):
    """A module may lose all its ranks; which it keeps the configuration's rank_pattern says."""
    directory, _, _ = bench.trained("AdaLoRA")
    config, tensors = json.loads((directory / CONFIG).read_text()), load_file(directory / FILE)
    kept = [True, False, True, False]
    for key in [key for key in tensors if key.endswith("lora_E")]:
        path = key.removesuffix(".lora_E")
        mask = torch.tensor(kept if "layers.1" in key else [False] * 4)
        for role in ("lora_A", "lora_E"):
            tensors[f"{path}.{role}"] = tensors[f"{path}.{role}"][mask]
        tensors[f"{path}.lora_B"] = tensors[f"{path}.lora_B"][:, mask].contiguous()
        config.setdefault("rank_pattern") or config.update(rank_pattern={})
        config["rank_pattern"][key.removeprefix("base_model.model.")] = mask.tolist()
    save_file(tensors, tmp_path / FILE)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    bench.loaded(tmp_path)
    result = check_lora(tmp_path, base=bench.base())
    assert result.verdict == "unknown", result.findings  # PEFT resizes its modules by their values
    config["rank_pattern"] = None
    (tmp_path / CONFIG).write_text(json.dumps(config))
    assert check_lora(tmp_path, base=bench.base()).verdict == "fails"
