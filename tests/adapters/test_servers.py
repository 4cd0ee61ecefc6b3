"""`check-lora --for sglang` and `--for invokeai`: what their own code was seen to do (`bin/loaders`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapters.image_models import ALL, adapter, linears, lora, to_target
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.adapters.check import check_lora
from ckpt_tools.adapters.ecosystems.loader_report import LoaderReport

Tensors = dict[str, torch.Tensor]
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ROOT = "base_model.model.model."


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of two layers, of 16 channels each."""
    base = tmp_path_factory.mktemp("llama")
    paths = [f"layers.{number}.{path}" for number in range(2) for path in (*ATTENTION, *MLP)]
    weights = {f"model.{path}.weight": torch.randn(16, 16) for path in paths}
    save_file(weights | {f"{name}.weight": torch.randn(20, 16) for name in ("model.embed_tokens", "lm_head")},
              base / "model.safetensors")  # fmt: skip
    return base


def served(directory: Path, modules: tuple[str, ...], *, root: str = ROOT, rank: int = 4, **config: object) -> Path:
    """A directory of PEFT, of these modules in both layers."""
    directory.mkdir()
    tensors = {}
    for path in (f"layers.{number}.{each}" for number in range(2) for each in modules):
        tensors[f"{root}{path}.lora_A.weight"] = torch.randn(rank, 16)
        tensors[f"{root}{path}.lora_B.weight"] = torch.randn(16, rank)
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({path.rpartition(".")[2] for path in modules})
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": targets} | config
    (directory / "adapter_config.json").write_text(json.dumps(given))
    return directory


QV = (ATTENTION[0], ATTENTION[2])


@pytest.mark.parametrize(
    ("modules", "options", "problem"),
    [
        ((*ATTENTION, *MLP), {}, ""),
        (QV, {}, ""),
        (("mlp.gate_proj",), {}, ""),  # it fills up with zeros
        (QV, {"root": "model."}, ""),
        (QV, {"root": ""}, ""),
        (QV, {"root": "base_model.model.model.language_model."}, ""),
        (QV, {"target_modules": "all-linear"}, ""),
        (QV, {"bias": None}, ""),
        (QV, {"rank": 300}, ""),
        (QV, {"use_rslora": True}, "sglang applies 0.5 times the trained change"),
        (QV, {"alpha_pattern": {"v_proj": 16}}, "sglang applies 0.5 times the trained change"),
        (QV, {"r": 2}, "and the one rank is 2"),
        (QV, {"use_dora": True}, "it does not support DoRA"),
        (QV, {"target_modules": ".*_proj"}, "it takes a list of names"),
        (QV, {"target_modules": ["q_proj", "o_proj"]}, ""),  # q_proj stands for v_proj, too
        (QV, {"target_modules": ["o_proj"]}, "matches none of its target modules"),
        (QV, {"init_lora_weights": "pissa"}, "SGLang ignores init_lora_weights"),
        (QV, {"root": f"{ROOT}vision_tower."}, "gives this one's change to another"),
        (QV, {"peft_type": "LOHA"}, "supports only LORA"),
        (QV, {"lora_alpha": None}, "lora_alpha must be a number"),
        (ATTENTION[:1], {}, "layer 0 adapts q_proj without v_proj"),
        (ATTENTION[1:3], {}, "without q_proj"),
        (("mlp.up_proj",), {}, "layer 0 adapts up_proj without gate_proj"),
        ((*QV, "cross.q_proj", "cross.v_proj"), {}, "gives this one's change to another"),
        ((*QV, "mlp.gate_up_proj"), {}, "the base model has no such module"),
    ],
)
def test_sglang_takes_what_it_joins_and_says_what_it_does_not(
    modules: tuple[str, ...], options: dict[str, object], problem: str, llama: Path, tmp_path: Path
) -> None:
    result = check_lora(served(tmp_path / "adapter", modules, **options), base=llama, loaders=["sglang"])
    errors = "; ".join(finding.what for finding in result.findings if finding.severity == "error")
    assert result.ok is (not problem), errors
    assert problem in errors


def test_sglang_reads_of_the_rest_the_embeddings_that_are_targets(llama: Path, tmp_path: Path) -> None:
    path = served(tmp_path / "adapter", QV, target_modules=["q_proj", "v_proj", "embed_tokens"])
    file = path / "adapter_model.safetensors"
    more = {f"{ROOT}embed_tokens.lora_embedding_A": torch.randn(4, 20), f"{ROOT}embed_tokens.lora_embedding_B":
            torch.randn(16, 4)}  # fmt: skip
    save_file(load_file(file) | more, file)
    assert check_lora(path, base=llama, loaders=["sglang"]).ok
    save_file(load_file(file) | {"base_model.model.lm_head.weight": torch.randn(20, 16)}, file)
    (report,) = check_lora(path, base=llama, loaders=["sglang"]).loaders
    assert (report.loads, report.unmatched) == (True, ("base_model.model.lm_head.weight",))
    save_file(load_file(file) | {f"{ROOT}layers.0.self_attn.q_proj.lora_B.bias": torch.randn(16)}, file)
    assert check_lora(path, base=llama, loaders=["sglang"]).loaders[0].loads is False


def test_without_a_base_sglang_is_not_known(tmp_path: Path) -> None:
    assert check_lora(served(tmp_path / "adapter", QV), loaders=["sglang"]).verdict == "unknown"


# InvokeAI


@functools.cache
def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Those of a model's blocks; of a U-Net, of those with transformers."""
    shapes = linears(ALL[name][1]())
    parts = ("up_blocks.0", "mid_block") if "mid_block.resnets.0.conv1" in shapes else ("block", "layers")
    return {path: shape for path, shape in shapes.items() if any(part in path for part in parts)}


def written(name: str, target: str) -> Tensors:
    torch.manual_seed(0)
    modules = [lora(path, shape) for path, shape in shapes_of(name).items()]
    return dict(to_target(adapter(modules), target, architecture=ALL[name][0]).tensors)


def only(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if any(part in name for part in parts)}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


def judged(tensors: Tensors, name: str, file: Path) -> LoaderReport:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    return check_lora(file, architecture=ALL[name][0], loaders=["invokeai"]).loaders[0]


FILES = [
    ("sdxl", "kohya", None, "whole"),
    ("sdxl", "diffusers", None, "cannot convert"),
    ("sdxl", "kohya", without("attn2", "transformer_blocks_2"), "it finds no block"),
    ("sd1", "kohya", None, "whole"),
    ("flux1", "kohya", None, "whole"),
    ("flux1", "comfyui", None, "cannot convert"),  # it takes no alpha beside diffusion_model.
    ("flux1", "comfyui", without(".alpha"), "whole"),
    ("flux1", "diffusers", None, "whole"),
    ("flux1", "diffusers", without("add_q_proj"), "recognises none"),
    ("flux1", "diffusers", without("transformer.transformer_blocks.1.attn.to_k"), "it joins q, k and v"),
    ("flux1", "kohya", renamed("lora_unet_", "lycoris_"), "recognises none"),
    ("flux2", "kohya", None, "whole"),
    ("flux2", "diffusers", None, "whole"),
    ("qwen_image", "kohya", None, "whole"),
    ("qwen_image", "comfyui", None, "recognises none"),
    ("z_image", "kohya", None, "recognises none"),
    ("wan", "kohya", None, "no module has that name"),  # k_img and v_img
    ("wan", "kohya", without("_img"), "whole"),
    ("wan", "comfyui", without("_img"), "whole"),
    ("wan", "diffusers", None, "whole"),
    ("sd3", "kohya", None, "loads none of"),
    ("krea2", "diffusers", None, "not known"),
]


@pytest.mark.parametrize(
    ("name", "target", "change", "said"),
    FILES,
    ids=[f"{name}-{target}-{at}" for at, (name, target, *_) in enumerate(FILES)],
)
def test_invokeai_reads_the_formats_of_its_families(
    name: str, target: str, change: Callable[[Tensors], Tensors] | None, said: str, tmp_path: Path
) -> None:
    tensors = written(name, target)
    report = judged(tensors if change is None else change(tensors), name, tmp_path / "style.safetensors")
    errors = "; ".join(finding.what for finding in report.findings)
    assert report.is_whole is (said == "whole"), errors
    assert said in f"{errors}; whole"


def test_invokeai_reads_no_scale_beside_diffusers_names(tmp_path: Path) -> None:
    tensors = written("flux1", "diffusers")
    save_file(tensors, tmp_path / "a.safetensors", metadata={"lora_alpha": "8"})
    result = check_lora(tmp_path / "a.safetensors", architecture="flux1", loaders=["invokeai"])
    assert "invokeai applies 0.5 times the trained change" in result.findings[0].what
    assert result.findings[0].hint == "write the scale where invokeai reads it: ckpt export-lora SRC DST --to kohya"


def test_invokeai_takes_the_magnitudes_of_columns(tmp_path: Path) -> None:
    name, file = "diffusion_model.blocks.0.self_attn.q", tmp_path / "a.safetensors"
    pair = {f"{name}.lora_down.weight": torch.randn(4, 32), f"{name}.lora_up.weight": torch.randn(32, 4)}
    scaled = pair | {f"{name}.alpha": torch.tensor(4.0)}
    assert judged(scaled | {f"{name}.dora_scale": torch.ones(1, 32)}, "wan", file).is_whole
    report = judged(scaled | {f"{name}.dora_scale": torch.ones(32, 1)}, "wan", file)
    assert [finding.code for finding in report.findings] == ["loader-misreads"]


@pytest.mark.parametrize(
    ("prefix", "ends", "takers"),
    [
        ("lora_unet_", ("lora_down.weight", "lora_up.weight", "alpha"), {"comfyui", "kohya", "invokeai"}),
        ("diffusion_model.", ("lora_A.weight", "lora_B.weight"), {"comfyui", "invokeai"}),
        ("diffusion_model.", ("lora_down.weight", "lora_up.weight", "alpha"), {"comfyui", "invokeai"}),
    ],
)
def test_anima_is_known_by_its_names(prefix: str, ends: tuple[str, ...], takers: set[str], tmp_path: Path) -> None:
    paths = ["self_attn.q_proj", "cross_attn.output_proj", "mlp.layer1"]
    tensors = {}
    for path in (f"blocks.{number}.{each}" for number in range(2) for each in paths):
        for end in ends:
            name = f"{prefix}{path if prefix.endswith('.') else path.replace('.', '_')}.{end}"
            tensors[name] = (
                torch.tensor(4.0) if end == "alpha" else torch.randn(16, 4).T if end[5] in "dA" else torch.randn(16, 4)
            )
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    loaders = ["comfyui", "kohya", "invokeai", "diffusers"]
    result = check_lora(tmp_path / "a.safetensors", loaders=loaders)
    assert result.architecture == "anima"
    assert {report.loader for report in result.loaders if report.is_whole} == takers


@pytest.mark.parametrize("prefix", ["transformer.", "diffusion_model."])
def test_onetrainers_parts_of_a_fused_weight_are_the_modules_of_diffusers(prefix: str, tmp_path: Path) -> None:
    """Its ORIGINAL layout: `img_attn.qkv.0` to `.2` and `linear1.0` to `.3`, each with factors of its own."""
    rows = {f"double_blocks.0.img_attn.qkv.{at}": 32 for at in range(3)} | {"single_blocks.1.linear1.3": 128}
    tensors, wanted = {}, {}
    places = ("to_q", "to_k", "to_v")
    for name, height in rows.items():
        down, up = torch.randn(4, 32), torch.randn(height, 4)
        tensors |= {f"{prefix}{name}.lora_down.weight": down, f"{prefix}{name}.lora_up.weight": up}
        tensors[f"{prefix}{name}.alpha"] = torch.tensor(2.0)
        at = int(name[-1])
        path = f"transformer_blocks.0.attn.{places[at]}" if "qkv" in name else "single_transformer_blocks.1.proj_mlp"
        wanted[f"transformer.{path}"] = 0.5 * up.double() @ down.double()
    save_file(tensors, tmp_path / "a.safetensors")
    api.export_lora(tmp_path / "a.safetensors", tmp_path / "out", to="diffusers", architecture="flux1")
    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert {name.partition(".lora_")[0] for name in found} == {*wanted}
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), "pt") as file:
        scale = scale_in(json.loads(file.metadata().get("lora_adapter_metadata", "{}")))
    for path, change in wanted.items():
        got = scale * found[f"{path}.lora_B.weight"].double() @ found[f"{path}.lora_A.weight"].double()
        assert (got - change).abs().max() < 1e-6 * change.abs().max()


def scale_in(said: dict[str, float]) -> float:
    return said.get("transformer.lora_alpha", 1) / said.get("transformer.r", 1)
