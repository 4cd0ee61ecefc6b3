"""`ckpt check-lora`: every loader's rules beside the loader itself where it is installed, and the known pains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from adapters.families import save_dcp
from adapters.image_models import COMPONENT, MODELS, adapter, linears, lora, to_target
from adapters.test_check_peft import Toy
from adapters.test_diffusers import load as load_in_diffusers
from safetensors.torch import save_file
from torch import nn

from ckpt_tools.adapters.check import check_lora, simulate
from ckpt_tools.adapters.ecosystems.loader_report import AdapterFile, LoaderReport
from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.cli import main

Tensors = dict[str, torch.Tensor]
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"


def describe(tensors: Tensors, **others: object) -> AdapterFile:
    heads = {
        name: TensorEntry(
            fqn=name,
            shape=tuple(tensor.shape),
            dtype=BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")],
            chunks=(),
        )
        for name, tensor in tensors.items()
    }
    return AdapterFile(**({"file": DIFFUSERS_FILE, "tensors": heads} | others))


# diffusers: simulated against itself


def layers(name: str, *, only: Callable[[str], bool] = lambda _: True, **options: object) -> list:
    torch.manual_seed(0)
    return [lora(path, shape, **options) for path, shape in linears(MODELS[name][0]()).items() if only(path)]


def written(name: str, target: str, only: Callable[[str], bool] = lambda _: True, **options: object) -> Tensors:
    return dict(to_target(adapter(layers(name, only=only, **options)), target, architecture=name).tensors)


def in_blocks(path: str) -> bool:
    """Layers of every kind; of SDXL's hundreds, those of two resolutions."""
    return "blocks" in path and not path.startswith(("down_blocks.2", "up_blocks.1"))


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    for old, new in pairs:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def with_alphas(tensors: Tensors, dtype: torch.dtype = torch.float32) -> Tensors:
    modules = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    return tensors | {f"{module}.alpha": torch.tensor(2, dtype=dtype) for module in modules}


def with_dora_scale(tensors: Tensors) -> Tensors:
    ups = {name: tensor for name, tensor in tensors.items() if name.endswith(".lora_up.weight")}
    return tensors | {
        name.replace("lora_up.weight", "dora_scale"): torch.ones(tensor.shape[0], 1) for name, tensor in ups.items()
    }


def loha(name: str) -> Tensors:
    tensors: Tensors = {}
    prefix = "diffusion_model.double_blocks.0.img_attn.proj" if "flux" in name else "lora_unet_middle_block_1_proj_in"
    for role in ("w1_a", "w2_a"):
        tensors[f"{prefix}.hada_{role}"] = torch.randn(32, 2)
    for role in ("w1_b", "w2_b"):
        tensors[f"{prefix}.hada_{role}"] = torch.randn(2, 32)
    return tensors


def lokr() -> Tensors:
    module = "diffusion_model.double_blocks.0.img_attn.proj"
    return {f"{module}.lokr_w1": torch.randn(4, 4), f"{module}.lokr_w2": torch.randn(8, 8)}


def has_encoder(name: str) -> Tensors:
    base = written(name, "diffusers", in_blocks)
    layer = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
    return base | {f"{layer}.lora_A.weight": torch.randn(2, 8), f"{layer}.lora_B.weight": torch.randn(8, 2)}


OF_EVERY_MODEL: dict[str, Callable[[str], Tensors]] = {
    "diffusers' names": lambda name: written(name, "diffusers"),
    "kohya's names": lambda name: written(name, "kohya", in_blocks),
    "kohya's names, all": lambda name: written(name, "kohya"),
    "ComfyUI's names": lambda name: written(name, "comfyui", in_blocks),
    "ComfyUI's names, all": lambda name: written(name, "comfyui"),
    "float alphas": lambda name: with_alphas(written(name, "diffusers", in_blocks)),
    "integer alphas": lambda name: with_alphas(written(name, "diffusers", in_blocks), torch.int64),
    "DoRA": lambda name: written(name, "diffusers", lambda p: p.endswith("to_q"), dora=True),
    "dora_scale": lambda name: with_dora_scale(written(name, "kohya", in_blocks)),
    "lora_down under diffusers' paths": lambda name: renamed(
        written(name, "diffusers", in_blocks), ("lora_A", "lora_down"), ("lora_B", "lora_up")
    ),
    "PEFT's names": lambda name: renamed(
        written(name, "diffusers", in_blocks), (f"{COMPONENT[name]}.", "base_model.model.")
    ),
    "no prefix": lambda name: renamed(written(name, "diffusers", in_blocks), (f"{COMPONENT[name]}.", "")),
    "lora_A under native names": lambda name: renamed(
        {k: v for k, v in written(name, "comfyui", in_blocks).items() if not k.endswith(".alpha")},
        ("lora_down", "lora_A"),
        ("lora_up", "lora_B"),
    ),
}
CASES: dict[str, tuple[str, Callable[[], Tensors]]] = {
    **{f"{name}: {what}": (name, partial(make, name)) for what, make in OF_EVERY_MODEL.items() for name in MODELS},
    **{f"{name}: LoHa": (name, lambda name=name: loha(name)) for name in ("flux1", "flux2", "sdxl")},
    "flux2: LoKr": ("flux2", lokr),
    "flux1: LoKr": ("flux1", lokr),
    "flux1: MLP of the text encoder": ("flux1", lambda: has_encoder("flux1")),
    "sdxl: old processors": (
        "sdxl",
        lambda: renamed(
            written("sdxl", "diffusers", lambda p: p.endswith(("to_q", "to_k"))),
            (".to_q.lora_A", ".processor.to_q_lora.down"),
            (".to_q.lora_B", ".processor.to_q_lora.up"),
            (".to_k.lora_A", ".processor.to_k_lora.down"),
            (".to_k.lora_B", ".processor.to_k_lora.up"),
        ),
    ),
}


def really(name: str, tensors: Tensors, tmp_path: Path) -> set[str] | None:
    """Load with diffusers; the modules that have an adapter with something in it, or None when it raises."""
    file = tmp_path / DIFFUSERS_FILE
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    model = MODELS[name][0]()
    try:
        load_in_diffusers(name, file, **{COMPONENT[name]: model})
    except Exception:  # whatever it raises: the question is whether it does
        return None
    changed = set()
    for path, module in model.named_modules():
        for attribute in ("lora_B", "lokr_w2"):
            factors = getattr(module, attribute, None)
            if factors and any(bool(getattr(f, "weight", f).ne(0).any()) for f in factors.values()):
                changed.add(path)
    return changed


QUICK = [
    "flux1: kohya's names", "flux2: DoRA", "sd3: ComfyUI's names, all", "sdxl: dora_scale", "flux2: LoKr",
    "flux1: LoHa",
]  # fmt: skip


@pytest.mark.full(but=QUICK)
@pytest.mark.parametrize("case", CASES)
def test_simulated_diffusers_is_the_real_one(case: str, tmp_path: Path) -> None:
    name, make = CASES[case]
    tensors = make()
    if case == "flux1: kohya's names" or case == "flux1: ComfyUI's names" or case == "flux1: dora_scale":
        # diffusers has the real widths of the single blocks written in; see test_naming for these.
        tensors = {key: tensor for key, tensor in tensors.items() if "single" not in key}
    if case in ("flux1: kohya's names, all", "flux1: ComfyUI's names, all"):
        tensors = {key: tensor for key, tensor in tensors.items() if "linear1" not in key}
    report = simulate(describe(tensors, architecture=name, is_named=True), "diffusers")
    truth = really(name, tensors, tmp_path)
    assert report.loads is (truth is not None), report.findings
    if truth is not None:
        assert {path.partition(".")[2] for path in report.matched} == truth


# PEFT: simulated against itself


def peft_directory(directory: Path, **config: object) -> Path:
    """An adapter that PEFT itself saved, with something in every factor."""
    import peft

    torch.manual_seed(0)
    options = {"r": 2, "lora_alpha": 4, "target_modules": ["q"]} | config
    model = peft.get_peft_model(Toy(), peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(directory)
    return directory


def edit(directory: Path, *, names: Mapping[str, str] | None = None, **config: object) -> None:
    from safetensors.torch import load_file

    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    for old, new in (names or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, file)
    path = directory / "adapter_config.json"
    document = json.loads(path.read_text()) | config
    path.write_text(json.dumps({key: value for key, value in document.items() if value != "REMOVED"}))


def base_directory(directory: Path) -> Path:
    directory.mkdir()
    save_file(Toy().state_dict(), directory / "model.safetensors")
    return directory


# ComfyUI: simulated against the simulation of its patching


@pytest.mark.parametrize("target", ["kohya", "comfyui", "diffusers"])
@pytest.mark.parametrize("name", ["flux1", "flux2", "sd3"])
def test_simulated_comfyui_uses_the_names_that_its_key_map_has(name: str, target: str) -> None:
    from adapters.comfyui_keys import patched
    from adapters.test_names import native_weights

    tensors = written(name, target)
    native = native_weights(name, MODELS[name][0]())
    report = simulate(describe(tensors, architecture=name), "comfyui")
    _, unused = patched(name, native, tensors)
    assert set(report.unmatched) == unused


def test_comfyui_leaves_out_peft_names_of_a_unet_and_peft_magnitudes() -> None:
    unet = simulate(describe(written("sdxl", "diffusers", in_blocks), architecture="sdxl"), "comfyui")
    assert any("attn1.to_q" in name for name in unet.unmatched)
    assert not any("ff.net" in name for name in unet.unmatched)
    dora = written("flux1", "diffusers", lambda path: path.endswith("to_q"), dora=True)
    report = simulate(describe(dora, architecture="flux1"), "comfyui")
    assert all(name.endswith("lora_magnitude_vector") for name in report.unmatched)
    assert [finding.code for finding in report.findings] == ["loader-ignores"]


# vLLM: its own rules, as documented


@pytest.mark.parametrize(
    ("config", "names", "problem"),
    [
        ({"use_dora": True}, {}, "DoRA"),
        ({"peft_type": "LOHA"}, {}, "LOHA"),
        ({"lora_alpha": "REMOVED"}, {}, "has no lora_alpha"),
        ({"r": 1024}, {}, "the maximum is 512"),
        ({"bias": "all"}, {}, "bias is 'all'"),
        ({"bias": None}, {}, "bias is None"),
        ({"rank_pattern": {"layers.1.q": 0}}, {}, "a rank is 0"),
        ({"modules_to_save": ["lm_head"]}, {}, "not 'lm_head'"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "init_lora_weights is 'pissa_niter_4'"),
        ({"alora_invocation_tokens": [1, 2]}, {}, "aLoRA"),
        ({"layer_replication": [[0, 1]]}, {}, "layer_replication"),
        ({"lora_alpha": None}, {}, "lora_alpha must be a number, got None"),
        ({}, {"lora_B.weight": "lora_B.bias"}, "unsupported LoRA weight"),
        ({}, {"lora_A.weight": "lora_A.default.weight"}, "unsupported LoRA weight"),
    ],
)
def test_vllm_refuses_what_it_does_not_support(
    config: dict[str, object], names: dict[str, str], problem: str, tmp_path: Path
) -> None:
    directory = peft_directory(tmp_path / "adapter")
    edit(directory, names=names, **config)
    result = check_lora(directory, loaders=["vllm"])
    assert not result.ok
    assert any(f.code == "loader-rejects" and problem in f.what for f in result.findings), result.findings


def test_vllm_takes_a_plain_adapter_and_names_the_rank_it_needs(tmp_path: Path) -> None:
    base = base_directory(tmp_path / "base")
    result = check_lora(peft_directory(tmp_path / "adapter"), base=base, loaders=["vllm"])
    assert result.ok
    assert result.loaders[0].is_whole
    assert check_lora(tmp_path / "adapter", loaders=["vllm"]).verdict == "unknown"
    larger = check_lora(peft_directory(tmp_path / "larger", r=24), base=base, loaders=["vllm"])
    assert larger.ok
    assert "--max-lora-rank 32" in larger.findings[0].what


def test_vllm_uses_its_own_embedding_for_the_one_that_peft_saves_along(tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "adapter")
    file = directory / "adapter_model.safetensors"
    from safetensors.torch import load_file

    save_file(load_file(file) | {"base_model.model.embed_tokens.base_layer.weight": torch.randn(4, 8)}, file)
    result = check_lora(directory, loaders=["vllm"])
    assert [finding.code for finding in result.findings] == ["loader-needs"]
    assert not result.loaders[0].unmatched


def test_vllm_has_no_image_models() -> None:
    report = simulate(describe(written("flux1", "diffusers", in_blocks), architecture="flux1"), "vllm")
    assert [finding.code for finding in report.findings] == ["loader-no-op"]


# The command, and what users suffer


def save_as(directory: Path, tensors: Tensors, file: str = DIFFUSERS_FILE) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / file)
    return directory


def test_flux1_lora_a_under_diffusion_model_is_a_silent_no_op_in_diffusers(tmp_path: Path) -> None:
    tensors = OF_EVERY_MODEL["lora_A under native names"]("flux1")
    result = check_lora(save_as(tmp_path / "a", tensors), loaders=["diffusers", "comfyui"])
    assert result.architecture is None  # HunyuanVideo has these names in ComfyUI, to the same effect
    codes = {report.loader: [finding.code for finding in report.findings] for report in result.loaders}
    assert codes == {"diffusers": ["loader-no-op"], "comfyui": []}
    assert not result.ok


def test_flux2_unswapped_last_layer_is_said(tmp_path: Path) -> None:
    result = check_lora(save_as(tmp_path / "a", written("flux2", "comfyui")), loaders=["diffusers"])
    assert [finding.code for finding in result.findings] == ["loader-misreads", "loader-misreads"]
    assert check_lora(save_as(tmp_path / "a", written("flux2", "comfyui", in_blocks)), loaders=["diffusers"]).ok


def test_kohya_takes_its_own_names_and_says_what_needs_lycoris() -> None:
    blocks = simulate(describe(written("flux1", "kohya", in_blocks), architecture="flux1"), "kohya")
    assert blocks.is_whole
    assert not blocks.findings
    everything = simulate(describe(written("flux1", "kohya"), architecture="flux1"), "kohya")
    assert [finding.code for finding in everything.findings] == ["loader-needs"]
    foreign = simulate(describe(written("flux1", "comfyui", in_blocks), architecture="flux1"), "kohya")
    assert [finding.code for finding in foreign.findings] == ["loader-no-op"]
    flux2 = simulate(describe(written("flux2", "kohya", in_blocks), architecture="flux2"), "kohya")
    assert flux2.is_whole  # musubi-tuner reads these


def of_every_family(name: str) -> dict[str, Tensors]:
    """A module of kohya's names in each family that LyCORIS loads."""
    module = "lora_unet_input_blocks_4_1_proj_in" if name == "sdxl" else "lora_unet_double_blocks_0_img_attn_proj"
    factors = {
        "lora": {"lora_down.weight": (2, 8), "lora_up.weight": (8, 2)},
        "loha": {"hada_w1_a": (8, 2), "hada_w1_b": (2, 8), "hada_w2_a": (8, 2), "hada_w2_b": (2, 8)},
        "lokr": {"lokr_w1": (2, 2), "lokr_w2": (4, 4)},
        "oft": {"oft_blocks": (4, 2, 2)},
        "full": {"diff": (8, 8)},
    }
    return {
        family: {f"{module}.{role}": torch.randn(shape) for role, shape in roles.items()}
        for family, roles in factors.items()
    }


@pytest.mark.parametrize("name", ["flux1", "sdxl"])
@pytest.mark.parametrize("family", ["lora", "loha", "lokr", "oft", "full"])
def test_kohya_looks_up_an_alpha_for_every_module(name: str, family: str) -> None:
    """networks.lora takes the rank where it is missing, networks.lora_flux and LyCORIS itself do not."""
    from lycoris.modules import get_module, make_module

    tensors = of_every_family(name)[family]
    module = next(iter(tensors)).partition(".")[0]
    whole = tensors | {f"{module}.alpha": torch.tensor(2.0)}
    assert simulate(describe(whole, architecture=name), "kohya").is_whole
    assert make_module(*get_module(whole, module), module, nn.Linear(8, 8)) is not None
    report = simulate(describe(tensors, architecture=name), "kohya")
    is_taken = family == "full" or (name, family) == ("sdxl", "lora")
    assert report.is_whole is is_taken
    if family not in ("full", "lora"):  # loras go through kohya's own code, which is not installed
        with pytest.raises(TypeError):
            make_module(*get_module(tensors, module), module, nn.Linear(8, 8))


def test_file_called_checkpoint_is_overlooked_by_diffusers(tmp_path: Path) -> None:
    tensors = written("flux1", "diffusers", in_blocks)
    directory = save_as(tmp_path / "a", tensors, "checkpoint-10.safetensors")
    result = check_lora(directory, loaders=["diffusers"])
    assert [finding.code for finding in result.findings] == ["loader-rejects"]
    assert "checkpoint" in result.findings[0].what
    assert check_lora(directory / "checkpoint-10.safetensors", architecture="flux1", loaders=["diffusers"]).ok


def test_base_tells_the_family_and_misses_foreign_modules(tmp_path: Path) -> None:
    modules = [lora("lora_unet_double_blocks_0_img_attn_qkv", (96, 32)), lora("lora_unet_img_in", (32, 4))]
    tensors: Tensors = {}
    for module in modules:
        tensors[f"{module.path}.lora_down.weight"] = module.factors["A"]
        tensors[f"{module.path}.lora_up.weight"] = module.factors["B"]
        tensors[f"{module.path}.alpha"] = torch.tensor(2.0)
    source = save_as(tmp_path / "a", tensors, "x.safetensors")
    without = check_lora(source, loaders=["comfyui"])
    assert without.architecture is None
    assert (without.verdict, without.findings) == ("loads", ())  # ComfyUI does with FLUX.1 what it does with FLUX.2
    base = save_as(tmp_path / "base", dict(MODELS["flux2"][0]().state_dict()), "model.safetensors")
    result = check_lora(source, base=base, loaders=["comfyui"])
    assert (result.architecture, result.ok) == ("flux2", True)
    foreign = save_as(tmp_path / "sd3", dict(MODELS["sd3"][0]().state_dict()), "model.safetensors")
    codes = [finding.code for finding in check_lora(source, base=foreign, loaders=["comfyui"]).findings]
    assert "adapter-unmatched" in codes


@pytest.mark.parametrize("target", ["diffusers", "kohya", "comfyui"])
@pytest.mark.parametrize("name", MODELS)
def test_base_of_an_image_model_tells_the_shapes(name: str, target: str, tmp_path: Path) -> None:
    """Under every naming, against diffusers' checkpoint: what is right is, and half a factor is not."""
    base = save_as(tmp_path / "base", dict(MODELS[name][0]().state_dict()), "model.safetensors")
    tensors = written(name, target, in_blocks)

    def findings(tensors: Tensors) -> list[tuple[str, str]]:
        result = check_lora(save_as(tmp_path / "a", tensors), base=base, architecture=name)
        return [(f.code, f.severity) for f in result.findings if f.code.startswith("adapter-")]

    assert findings(tensors) == []
    ups = [key for key in tensors if key.endswith((".lora_B.weight", ".lora_up.weight"))]
    downs = [key for key in tensors if key.endswith((".lora_A.weight", ".lora_down.weight"))]
    for key, cut in ((ups[3], slice(None, 8)), (downs[-1], (slice(None), slice(None, 4)))):
        assert findings(tensors | {key: tensors[key][cut]}) == [("adapter-shape", "error")]


def test_command_prints_one_document_and_exits_3_for_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = peft_directory(tmp_path / "adapter", use_dora=True)
    assert main(["check-lora", str(directory), "--for", "vllm", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["type"], document["rank"]) == (False, "dora", 2)
    assert document["alpha"]["value"] == 4
    assert "adapter_config.json" in document["alpha"]["source"]
    assert document["targets"] == ["layers.*.q"]
    assert [finding["code"] for finding in document["findings"]] == ["loader-rejects"]
    assert main(["check-lora", str(directory), "--for", "peft", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["verdict"], document["findings"]) == (False, "unknown", [])
    assert document["not_checked"] == ["the modules' names and shapes in the base model (--base)"]
    base = base_directory(tmp_path / "base")
    assert main(["check-lora", str(directory), "--base", str(base), "--for", "peft", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["loaders"][0]["matched_modules"] == 3
    assert document["loaders"][0]["unmatched_tensors"] == 0


def test_image_loaders_have_nothing_to_say_to_a_language_model(tmp_path: Path) -> None:
    result = check_lora(peft_directory(tmp_path / "adapter"), architecture="llm")
    reports = {report.loader: (report.loads, report.changes) for report in result.loaders}
    assert reports == {
        "peft": (True, True),
        "diffusers": (False, False),
        "comfyui": (True, False),
        "kohya": (True, False),
        "invokeai": (True, False),
        "vllm": (True, True),
        "sglang": (None, True),
    }
    hints = {finding.hint for report in result.loaders for finding in report.findings if finding.severity == "error"}
    assert hints == {"ckpt export-lora SRC DST --to peft"}  # not to an ecosystem that has no names for it


def test_adapter_that_its_own_loader_does_not_take_is_an_error(tmp_path: Path) -> None:
    tensors = renamed(written("flux1", "diffusers", in_blocks), ("transformer.", "module."))
    result = check_lora(save_as(tmp_path / "a", tensors), architecture="flux1")
    assert result.judges == ("diffusers",)
    assert "loader-no-op" in {finding.code for finding in result.findings}
    assert not result.ok


@pytest.mark.parametrize("trainer", ["peft", "torchtitan"])
def test_training_checkpoint_is_checked_but_no_loader_reads_it(tmp_path: Path, trainer: str) -> None:
    path, ends = {
        "peft": ("model.base_model.model.layers.0.q", ("lora_A.default.weight", "lora_B.default.weight")),
        "torchtitan": ("layers.0.attention.wq", ("lora_a.weight", "lora_b.weight")),  # whose rows have another order
    }[trainer]
    factors = {f"{path}.{end}": torch.randn(shape) for end, shape in zip(ends, ((2, 8), (8, 2)), strict=True)}
    save_dcp(factors | {f"{path}.weight": torch.randn(8, 8)} if trainer == "torchtitan" else factors, tmp_path / "run")
    result = check_lora(tmp_path / "run")
    assert (result.verdict, result.ok, result.findings, result.num_modules) == ("unknown", False, (), 1)
    assert result.loaders == ()
    assert any("export-lora" in text for text in result.not_checked)
    (finding,) = check_lora(tmp_path / "run", loaders=["vllm"]).findings
    assert (finding.code, "--base DIR" in finding.hint) == ("loader-format", trainer == "torchtitan")


@pytest.mark.full
def test_check_imports_no_torch(tmp_path: Path) -> None:
    directory, base = peft_directory(tmp_path / "adapter"), base_directory(tmp_path / "base")
    code = (
        "import sys; from ckpt_tools.cli import main\n"
        f"assert main(['check-lora', {str(directory)!r}, '--base', {str(base)!r}, '-q']) == 0\n"
        "assert not {'torch', 'peft', 'diffusers', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_report_counts_a_tensor_once() -> None:
    report = simulate(describe(written("flux2", "comfyui", in_blocks), architecture="flux2"), "diffusers")
    assert isinstance(report, LoaderReport)
    assert report.num_matched + len(report.unmatched) == len(written("flux2", "comfyui", in_blocks))
    assert len(report.matched) > report.num_matched / 2  # q, k and v of one fused module
