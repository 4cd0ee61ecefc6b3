"""Which loader decides on an adapter, what it needs to know, and what is said of what no loader notices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapters.image_models import MODELS
from adapters.test_check import (
    base_directory,
    edit,
    in_blocks,
    of_every_family,
    peft_directory,
    save_as,
    with_dora_scale,
    written as written_for,
)
from adapters.world_models import IMAGE
from safetensors.torch import load_file, save_file

from ckpt_tools.adapters.base.model import replicated
from ckpt_tools.adapters.check import LoraCheck, check_lora, fold
from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError
from ckpt_tools.hub.check import check_adapters
from ckpt_tools.storage.source import LocalSource

Tensors = dict[str, torch.Tensor]


def codes(result: LoraCheck) -> list[str]:
    return [finding.code for finding in result.findings]


@pytest.fixture(scope="module")
def flux1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("flux1")
    return save_as(directory, dict(MODELS["flux1"][0]().state_dict()), "model.safetensors")


@pytest.fixture(scope="module")
def sd15(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sd15")
    IMAGE["sd15"][1].save(directory)
    return directory


# Whose format


@pytest.mark.parametrize(
    ("target", "file", "judges"),
    [
        ("diffusers", "pytorch_lora_weights.safetensors", ("diffusers",)),
        ("diffusers", "style.safetensors", ("diffusers",)),
        ("kohya", "style.safetensors", ("kohya", "comfyui")),
        ("comfyui", "style.safetensors", ("comfyui",)),
    ],
)
def test_loader_of_the_own_format_decides(
    target: str, file: str, judges: tuple[str, ...], flux1: Path, tmp_path: Path
) -> None:
    source = save_as(tmp_path, written_for("flux1", target, in_blocks), file)
    result = check_lora(source, base=flux1)
    assert result.judges == judges
    assert (result.verdict, result.findings) == ("loads", ())
    others = [report.loader for report in result.loaders[len(judges) :]]
    assert sorted((*judges, *others)) == ["comfyui", "diffusers", "invokeai", "kohya", "peft", "sglang", "vllm"]
    assert not any(report.is_whole for report in result.loaders if report.loader in ("peft", "vllm"))


def test_peft_directory_that_vllm_alone_takes_is_not_ok(tmp_path: Path) -> None:
    directory, base = peft_directory(tmp_path / "adapter", target_modules=["q", "v"]), base_directory(tmp_path / "base")
    assert check_lora(directory, base=base).verdict == "loads"
    edit(directory, target_modules=["q"])
    result = check_lora(directory, base=base)
    assert (result.judges, result.verdict, codes(result)) == (("peft",), "fails", ["loader-ignores"])
    assert next(report for report in result.loaders if report.loader == "vllm").is_whole


def test_adapter_of_peft_without_its_configuration_is_refused_by_peft(tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "adapter")
    (directory / "adapter_config.json").unlink()
    result = check_lora(directory, base=base_directory(tmp_path / "base"))
    assert result.verdict == "fails"
    assert "loader-rejects" in codes(result)


# A family that ckpt has no tables for


def of_sd15(prefix: str, join: Callable[[str], str]) -> Tensors:
    module = join("mid_block.attentions.0.transformer_blocks.0.attn1.to_q")
    down, up = ("lora_down", "lora_up") if prefix == "lora_unet_" else ("lora_A", "lora_B")
    tensors = {
        f"{prefix}{module}.{down}.weight": torch.randn(2, 16),
        f"{prefix}{module}.{up}.weight": torch.randn(16, 2),
    }
    return tensors | ({f"{prefix}{module}.alpha": torch.tensor(2.0)} if prefix == "lora_unet_" else {})


def test_names_of_kohya_for_an_unknown_family_are_not_known_and_not_wrong(sd15: Path, tmp_path: Path) -> None:
    source = save_as(tmp_path, of_sd15("lora_unet_", lambda path: path.replace(".", "_")), "style.safetensors")
    result = check_lora(source, base=sd15)
    assert (result.architecture, result.verdict, result.findings) == (None, "unknown", ())
    assert any("ComfyUI" in text or "kohya" in text for text in result.not_checked)
    tensors = load_file(source / "style.safetensors")
    name = next(name for name in tensors if "lora_down" in name)
    save_file(tensors | {name: torch.randn(2, 12)}, source / "style.safetensors")
    assert codes(check_lora(source, base=sd15)) == ["adapter-shape"]


def test_names_of_diffusers_are_held_against_the_base(sd15: Path, tmp_path: Path) -> None:
    source = save_as(tmp_path, of_sd15("unet.", str))
    assert check_lora(source, base=sd15).verdict == "loads"
    outside = of_sd15("unet.", lambda path: path.replace("mid_block", "down_blocks.0"))  # where SDXL has no attention
    result = check_lora(save_as(tmp_path / "c", outside))
    assert (result.architecture, result.verdict) == (None, "loads")  # SD 1.x or 2.x: diffusers does the same with both
    foreign = save_as(tmp_path / "b", of_sd15("unet.", lambda path: path.replace("mid_block", "middle_block")))
    result = check_lora(foreign, base=sd15)
    assert (result.verdict, "is it the base" in str(result.findings)) == ("fails", False)


def test_base_goes_before_the_names_of_the_adapter(flux1: Path, tmp_path: Path) -> None:
    """Qwen-Image's modules are called like FLUX.1's."""
    directory = tmp_path / "qwen"
    IMAGE["qwen-image"][1].save(directory)
    name = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {f"{name}.lora_A.weight": torch.randn(2, 48), f"{name}.lora_B.weight": torch.randn(48, 2)}
    result = check_lora(save_as(tmp_path / "a", tensors), base=directory)
    assert (result.architecture, result.verdict) == ("qwen_image", "loads")
    assert next(report for report in result.loaders if report.loader == "comfyui").is_whole
    assert check_lora(save_as(tmp_path / "a", tensors), base=flux1).verdict == "fails"


def test_names_of_a_family_without_tables_are_not_known_without_a_base(tmp_path: Path) -> None:
    """What diffusers calls FLUX.1's modules, ComfyUI calls Qwen-Image's."""
    name = "diffusion_model.transformer_blocks.0.attn.to_q"
    tensors = {f"{name}.lora_A.weight": torch.randn(2, 48), f"{name}.lora_B.weight": torch.randn(48, 2)}
    result = check_lora(save_as(tmp_path, tensors, "style.safetensors"))
    assert (result.judges, result.verdict, result.findings) == (("comfyui",), "unknown", ())


def test_names_that_families_share_tell_none_without_a_header(flux1: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in written_for("flux1", "diffusers", in_blocks).items()}
    source = save_as(tmp_path / "a", tensors)
    result = check_lora(source)
    assert (result.architecture, result.verdict, result.findings) == (None, "unknown", ())
    assert check_lora(source, architecture="flux1").verdict == "loads"
    assert check_lora(source, base=flux1).verdict == "loads"


# What ComfyUI computes in another way


def test_dora_of_the_output_axis_is_another_one_in_comfyui(tmp_path: Path) -> None:
    tensors = with_dora_scale(written_for("flux1", "kohya", in_blocks))
    source = save_as(tmp_path, tensors, "style.safetensors")
    result = check_lora(source, architecture="flux1", loaders=["comfyui"])
    (finding,) = result.findings
    assert (finding.code, finding.severity) == ("loader-misreads", "error")
    assert "‖W‖" in finding.what
    assert "times: " in finding.what  # once for all modules
    assert check_lora(source, architecture="flux1", loaders=["kohya"]).ok
    inputs = {name: t.reshape(1, -1) if name.endswith("dora_scale") else t for name, t in tensors.items()}
    assert check_lora(save_as(tmp_path, inputs, "style.safetensors"), architecture="flux1", loaders=["comfyui"]).ok


@pytest.mark.parametrize(("alpha", "rescale", "is_ok"), [(0.0, False, True), (0.01, False, False), (0.0, True, False)])
def test_rotations_with_a_constraint_or_a_rescale_are_others_in_comfyui(
    alpha: float, rescale: bool, is_ok: bool, tmp_path: Path
) -> None:
    tensors = of_every_family("flux1")["oft"]
    module = next(iter(tensors)).partition(".")[0]
    tensors |= {f"{module}.alpha": torch.tensor(alpha)}
    tensors |= {f"{module}.rescale": torch.full((8, 1), 1.5)} if rescale else {}
    source = save_as(tmp_path, tensors, "style.safetensors")
    result = check_lora(source, architecture="flux1", loaders=["comfyui"])
    assert (result.ok, codes(result)) == (is_ok, [] if is_ok else ["loader-misreads"])


# What no loader notices


@pytest.mark.parametrize(
    ("alpha", "found"),
    [(4, []), (-4, ["adapter-alpha"]), (2e6, ["adapter-alpha"]), (1e-9, ["adapter-alpha"]), (512, [])],
)
def test_alpha_that_nobody_meant_is_an_error(alpha: float, found: list[str], tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "adapter")
    edit(directory, lora_alpha=alpha)
    assert codes(check_lora(directory, base=base_directory(tmp_path / "base"))) == found


@pytest.mark.parametrize(
    ("zeroed", "code", "severity"),
    [
        (("layers.0.q.lora_B",), "adapter-dead-module", "error"),
        ((".q.lora_A",), "adapter-dead-module", "error"),
        ((".q.lora_B",), "adapter-zero", "warning"),
    ],
)
def test_module_that_died_is_told_from_a_kind_that_was_not_trained(
    zeroed: tuple[str, ...], code: str, severity: str, tmp_path: Path
) -> None:
    directory = peft_directory(tmp_path / "adapter", target_modules=["q", "v"])
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    dead = [name for name in tensors if any(part in name for part in zeroed)]
    save_file(tensors | {name: torch.zeros_like(tensors[name]) for name in dead}, file)
    result = check_lora(directory, base=base_directory(tmp_path / "base"))
    assert (code, severity) in [(finding.code, finding.severity) for finding in result.findings]
    assert result.ok is (severity == "warning")


# How it is said


def test_findings_that_differ_in_their_place_alone_are_one() -> None:
    findings = [Finding(code="a", severity="error", where=f"m{i}", what="is lost", hint=None) for i in range(16)]
    other = Finding(code="b", severity="error", where="m0", what="is lost", hint=None)
    first, second = fold([*findings, other])
    assert first.what == "is lost (16 times: m0, m1, m2 and 13 more)"
    assert second is other


def test_kind_that_ckpt_does_not_judge_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = peft_directory(tmp_path / "adapter")
    edit(directory, peft_type="SHADOW")
    assert main(["check-lora", str(directory)]) == 3
    shown = capsys.readouterr()
    assert "not known" in shown.out
    assert "SHADOW" in shown.err
    assert main(["check-lora", str(directory), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["type"], document["findings"]) == ("unknown", "not known", [])


def test_command_marks_the_judge_and_says_what_was_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, base = peft_directory(tmp_path / "adapter"), base_directory(tmp_path / "base")
    assert main(["check-lora", str(directory)]) == 3
    shown = capsys.readouterr()
    assert "*     peft: loads it, if the base model has these modules" in shown.out
    assert "(--base)" in shown.err
    assert main(["check-lora", str(directory), "--base", str(base)]) == 0
    shown = capsys.readouterr().out
    assert "*     peft: loads it, whole" in shown
    assert "rank 2, alpha 4" in shown
    assert main(["check-lora", str(directory), "--for", "webui"]) == 2
    assert "webui" in capsys.readouterr().err


# push


def test_push_refuses_what_the_own_loader_refuses_and_sends_what_needs_a_base(tmp_path: Path) -> None:
    directory = peft_directory(tmp_path / "adapter")
    weights = ("adapter_model.safetensors",)
    with LocalSource(str(directory)) as source:
        assert tuple(check_adapters(source, weights)) == weights
    edit(directory, r=3)
    with LocalSource(str(directory)) as source, pytest.raises(CkptError, match=r"adapter-config|loader-rejects"):
        check_adapters(source, weights)


# Replicated layers


@pytest.mark.parametrize(
    ("layer_map", "layers"),
    [
        ([[0, 2], [1, 2]], [0, 1, 1]),
        ([[1, 2]], [1]),
        ([], []),
        ([[0, 10**9]], [0, 1]),
        ("all", [0, 1]),
        ([[0]], [0, 1]),
    ],
)
def test_replicated_layers_are_those_that_peft_makes(layer_map: object, layers: list[int]) -> None:
    shapes = {"model.embed_tokens.weight": (9, 9)} | {f"model.layers.{i}.q.weight": (i + 1, 4) for i in range(2)}
    found = replicated(shapes, layer_map)
    made = [found[name][0] - 1 for name in sorted(found) if "layers" in name]
    assert made == layers
    assert found["model.embed_tokens.weight"] == (9, 9)
