"""What `--quantize` makes of odd values, shapes and runs, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from quantised.test_quantize import build, by_transformers, decoded, quantise, read, same
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main
from ckpt_tools.errors import StorageError
from ckpt_tools.transfer.quantised import encoded

WEIGHT = "model.layers.0.self_attn.o_proj.weight"


def write(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"architectures": ["Toy"], "model_type": "toy"} | config))
    return directory


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def settings(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    ties = (every[1:] + every[:-1]) / 2
    near = [np.nextafter(ties, np.float32(to)) for to in (0, 1e9)]
    values = np.concatenate([every, ties, *near, np.float32([1e-45, 1e-38, 464, 1e30]), ties * np.float32(1.01)])
    found = np.empty(values.shape, np.uint8)
    encoded.round_magnitudes(values.copy(), found)
    wanted = torch.from_numpy(values).clamp(max=448).to(torch.float8_e4m3fn)
    assert found.tolist() == wanted.view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_blocks_of_zeros_of_nearly_none_and_of_huge_numbers_have_a_scale(tmp_path, dtype) -> None:
    weight = randn(256, 384, dtype=dtype)
    weight[:128, :128] = 0
    weight[:128, 128:256] = -0.0
    weight[128:, :128] *= torch.finfo(dtype).max / 8 if dtype != torch.float64 else 1e37
    hub = write(tmp_path / "hub", {WEIGHT: weight})
    assert quantise(hub, tmp_path / "out") == 0
    found = read(tmp_path / "out")
    same(found, by_transformers({WEIGHT: weight}, {WEIGHT}))
    assert found[WEIGHT + "_scale_inv"][0].tolist()[:2] == [1, 1]


def test_a_block_too_small_for_any_scale_becomes_zero(tmp_path) -> None:
    weight = randn(128, 256, dtype=torch.float32)
    weight[:, :128] *= 1e-38
    assert quantise(write(tmp_path / "hub", {WEIGHT: weight}), tmp_path / "out") == 0
    found = read(tmp_path / "out")
    assert found[WEIGHT].float()[:, :128].abs().max() == 0
    assert found[WEIGHT + "_scale_inv"][0, 0] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, capsys, bad) -> None:
    weight = randn(256, 256)
    weight[200, 7] = bad
    hub = write(tmp_path / "hub", {WEIGHT: weight})
    assert quantise(hub, tmp_path / "out") == 2
    assert WEIGHT in (err := capsys.readouterr().err)
    assert "rows 128 to 256" in err
    assert not (tmp_path / "out").exists()
    other = {WEIGHT: weight, WEIGHT.replace("o_proj", "q_proj"): randn(128, 128)}
    hub = write(tmp_path / "two", other)
    assert quantise(hub, tmp_path / "out", "--keep-precision", WEIGHT) == 0
    assert torch.equal(read(tmp_path / "out")[WEIGHT].view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("kept", [1, 64 << 20])
def test_rows_that_lie_in_two_blocks_of_a_file_are_right(tmp_path, monkeypatch, kept) -> None:
    real, rows = encoded.Encoder._encode, []
    monkeypatch.setattr(encoded.Encoder, "_encode", lambda *args: rows.append(args[1:]) or real(*args))
    monkeypatch.setattr(encoded, "_MAX_KEPT_BYTES", kept)
    tensors = {WEIGHT: randn(1024, 8064), WEIGHT.replace("o_proj", "q_proj"): randn(1024, 8064, seed=4)}
    hub = write(tmp_path / "hub", tensors)
    assert quantise(hub, tmp_path / "out", "-j", "7", "--max-shard-size", "8MB") == 0
    same(read(tmp_path / "out"), by_transformers(tensors, set(tensors)))
    assert kept == 1 or len(rows) == 16
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read(tmp_path / "out").values())


def interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one row of blocks be the last, once."""
    real, calls = encoded.Encoder._encode, []

    def fail(self: encoded.Encoder, *args: Any) -> object:
        calls.append(args)
        if len(calls) == 7:
            raise StorageError("the disk is tired")
        return real(self, *args)

    monkeypatch.setattr(encoded.Encoder, "_encode", fail)


def test_an_interrupted_run_continues_to_the_same_bytes(tmp_path, monkeypatch, capsys) -> None:
    hub = write(tmp_path / "hub", {WEIGHT: randn(1024, 8064), "model.norm.weight": randn(8064)})
    assert quantise(hub, tmp_path / "wanted") == 0
    interrupt(monkeypatch)
    assert quantise(hub, tmp_path / "out", "-j", "1") == 1
    assert main(["gather", str(hub), str(tmp_path / "out"), "-j", "1", "--quantize", "fp8"]) == 0
    assert "continued an interrupted run" in capsys.readouterr().err
    same(read(tmp_path / "out"), read(tmp_path / "wanted"))
    assert main(["verify", str(tmp_path / "out"), "-q"]) == 0


def test_an_interrupted_run_of_another_part_of_the_file_is_not_continued(tmp_path, monkeypatch) -> None:
    hub = write(tmp_path / "hub", {WEIGHT: randn(128, 128)})
    states = {"params": {WEIGHT: randn(1024, 8064)}, "params_ema": {WEIGHT: randn(1024, 8064, seed=4)}}
    torch.save(states, tmp_path / "both.pth")
    args = (tmp_path / "both.pth", tmp_path / "out", "-j", "1", "--assets", hub, "--strip-prefix")
    interrupt(monkeypatch)
    assert quantise(*args, "params") == 1
    assert quantise(*args, "params_ema") == 0
    same(read(tmp_path / "out"), by_transformers({WEIGHT: randn(1024, 8064, seed=4)}, {WEIGHT}))


def test_what_is_recorded_of_the_source_is_held_against_it(tmp_path, capsys) -> None:
    hub = write(tmp_path / "hub", {WEIGHT: randn(256, 256), "model.norm.weight": randn(256)})
    assert main(["shard", str(hub), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "-q"]) == 0
    assert main(["gather", str(tmp_path / "dcp"), str(tmp_path / "out"), "--quantize", "fp8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checked"]["digests"] == 2
    (data,) = (tmp_path / "dcp").glob("__1_*.distcp")
    content = bytearray(data.read_bytes())
    at = content.index(load_file(hub / "model.safetensors")[WEIGHT][128:].view(torch.uint8).numpy().tobytes())
    content[at + 5] ^= 1
    data.write_bytes(content)
    assert quantise(tmp_path / "dcp", tmp_path / "damaged") == 4
    assert WEIGHT in capsys.readouterr().err
    assert not (tmp_path / "damaged").exists()


def test_a_matrix_is_the_same_however_it_is_stored(tmp_path) -> None:
    weight = randn(384, 512)
    hub = write(tmp_path / "hub", {WEIGHT: weight})
    wanted = by_transformers({WEIGHT: weight}, {WEIGHT})
    mesh = ["--mesh", "dp_shard=5,tp=3", "--set", f"{WEIGHT}=tp:S(1)", "--tp-uneven", "replicate", "-q"]
    assert main(["shard", str(hub), str(tmp_path / "dcp"), *mesh]) == 0
    assert quantise(tmp_path / "dcp", tmp_path / "of-ranks") == 0
    same(read(tmp_path / "of-ranks"), wanted)
    torch.save({WEIGHT: weight.t().contiguous().t()}, tmp_path / "turned.pth")
    assert quantise(tmp_path / "turned.pth", tmp_path / "of-turned", "--assets", hub) == 0
    same(read(tmp_path / "of-turned"), wanted)


def test_what_stays_is_named_for_loaders(tmp_path, capsys) -> None:
    layer = "model.layers.0."
    names = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj"), (128, 128)),
        "self_attn.v_proj": (64, 128),
        "self_attn.kv_a_proj_with_mqa": (160, 128),
        "self_attn.q_a_proj": (128, 128),
        "mlp.gate": (128, 128),
        "mlp.shared_expert_gate": (1, 128),
        "mlp.router": (128, 128),
        **{f"mlp.experts.{i}.{leaf}": (128, 128) for i in range(2) for leaf in ("gate_proj", "up_proj", "down_proj")},
        "mlp.gate_proj": (128, 128),
        "mlp.up_proj": (128, 128),
        "mlp.down_proj": (128, 96),
        "linear_attn.conv1d": (256, 1, 4),
        "eh_proj": (128, 256),
        "input_layernorm": (128,),
    }
    tensors = {f"{layer}{name}.weight": randn(*shape) for name, shape in names.items()}
    tensors |= {"visual.blocks.0.attn.o_proj.weight": randn(128, 128), "model.embed_tokens.weight": randn(128, 128)}
    tensors |= {f"{layer}self_attn.o_proj.bias": randn(128)}
    hub = write(tmp_path / "hub", tensors)
    assert main(["gather", str(hub), str(tmp_path / "out"), "--quantize", "fp8"]) == 0
    found = read(tmp_path / "out")
    chosen = {name.removesuffix(".weight_scale_inv") for name in found if name.endswith("_scale_inv")}
    experts = {name for name in names if ".experts." in name}
    assert chosen == {layer + name for name in {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"} | experts}
    stay = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.kv_a_proj_with_mqa"}
    stay |= {"self_attn.q_a_proj", "mlp.gate", "mlp.shared_expert_gate", "mlp.router", "mlp.down_proj", "eh_proj"}
    kept = {layer + name for name in stay | {"linear_attn.conv1d"}}
    kept |= {"lm_head", "visual.blocks.0.attn.o_proj", "model.embed_tokens"}
    said = settings(tmp_path / "out")
    assert set(said.pop("modules_to_not_convert")) == kept
    assert said == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    err = capsys.readouterr().err
    assert "3 linear layers whose shape is not a multiple of 128×128" in err
    assert "3 linear layers that loaders fuse with one of these" in err

    keep = ("--keep-precision", "**.experts.1.up_proj.weight", "--overwrite")
    assert quantise(hub, tmp_path / "out", *keep) == 0
    assert f"{layer}mlp.experts" in settings(tmp_path / "out")["modules_to_not_convert"]
    assert not any(".experts." in name and name.endswith("_inv") for name in read(tmp_path / "out"))


def test_what_cannot_be_quantised_is_refused(tmp_path, capsys) -> None:
    def refused(directory: Path, *options: str) -> str:
        assert quantise(directory, tmp_path / "out", *options) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    hub = write(tmp_path / "hub", {WEIGHT: randn(128, 128)})
    assert quantise(hub, tmp_path / "fp8") == 0
    assert "are quantised already" in refused(tmp_path / "fp8")
    assert "matches no tensor" in refused(hub, "--keep-precision", "lm_head")
    assert "found no linear layer" in refused(hub, "--keep-precision", "**")
    assert "--like" in refused(hub, "--like", str(hub))
    gpt2 = {f"transformer.h.0.{name}.weight": randn(128, 128) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")}
    assert "found no linear layer" in refused(write(tmp_path / "gpt2", gpt2))
    other = write(tmp_path / "other", {WEIGHT: randn(128, 128)}, quantization_config={"quant_method": "mxfp4"})
    assert "'mxfp4'" in refused(other)
    (hub / "config.json").unlink()
    assert "--assets" in refused(hub)
    assert main(["gather", str(hub), str(tmp_path / "out"), "--keep-precision", "**"]) == 2


def test_what_was_quantised_before_is_quantised_anew(tmp_path) -> None:
    hub = write(tmp_path / "hub", {WEIGHT: randn(128, 256), "model.norm.weight": randn(256)}, dtype="bfloat16")
    assert quantise(hub, tmp_path / "fp8") == 0
    assert quantise(tmp_path / "fp8", tmp_path / "again", "--dequantize") == 0
    plain = decoded(read(tmp_path / "fp8"))
    same(read(tmp_path / "again"), by_transformers(plain, {WEIGHT}))


def test_weights_trained_from_a_quantised_release_take_its_config(tmp_path, capsys) -> None:
    build(transformers.LlamaForCausalLM).save_pretrained(tmp_path / "hub")
    assert quantise(tmp_path / "hub", tmp_path / "fp8") == 0
    (tmp_path / "hub" / "config.json").unlink()  # a step has none of its own
    args = ["gather", str(tmp_path / "hub"), str(tmp_path / "trained"), "--assets", str(tmp_path / "fp8")]
    assert main([*args, "--quantize", "fp8"]) == 0
    assert "replaced the quantization_config" in capsys.readouterr().err
    same(read(tmp_path / "trained"), read(tmp_path / "fp8"))
    assert settings(tmp_path / "trained") == settings(tmp_path / "fp8")
    manifest = json.loads((tmp_path / "trained" / "ckpt_manifest.json").read_text())
    assert manifest["source"]["quantised"] == {"method": "fp8", "block": [128, 128], "tensors": 14}
    warning = "config.json has a quantization_config, but the weights are not quantised"
    assert main([*args, "--overwrite"]) == 0
    assert warning in capsys.readouterr().err
    assert main(["gather", str(tmp_path / "fp8"), str(tmp_path / "as-it-is")]) == 0
    assert main(["gather", str(tmp_path / "fp8"), str(tmp_path / "plain"), "--dequantize"]) == 0
    assert warning not in capsys.readouterr().err


def test_a_cast_is_of_what_stays_and_the_dry_run_tells_all(tmp_path, capsys) -> None:
    tensors = {WEIGHT: randn(128, 256, dtype=torch.float32), "model.norm.weight": randn(256, dtype=torch.float32)}
    hub = write(tmp_path / "hub", tensors, dtype="float32", text_config={"dtype": "float32", "quantization_config": {}})
    args = ["gather", str(hub), str(tmp_path / "out"), "--quantize", "fp8", "--dtype", "bf16", "--json"]
    assert main([*args, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)["plan"]
    assert main(args) == 0
    written = {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()}
    assert {file["file"]: file["nbytes"] for file in planned["files"]} == written
    wanted = by_transformers({WEIGHT: tensors[WEIGHT]}, {WEIGHT})  # of float32, rounded once
    same(read(tmp_path / "out"), wanted | {"model.norm.weight": tensors["model.norm.weight"].to(torch.bfloat16)})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]) == ("bfloat16", {"dtype": "bfloat16"})
