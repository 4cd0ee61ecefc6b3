"""`ckpt stats`: figures of any format, what stands out, and what training has changed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools import gather, shard, stats
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError

LAYERS = 6


def model(*, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return a healthy model of six layers, with what makes naive comparisons cry wolf."""
    torch.manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(96, 32)}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}"
        tensors[f"{prefix}.self_attn.q_proj.weight"] = torch.randn(32, 32) * 0.02 * 1.2**i
        tensors[f"{prefix}.self_attn.q_proj.bias"] = torch.randn(32) * 100.0 ** (i % 2)
        tensors[f"{prefix}.mlp.down_proj.weight"] = torch.randn(32, 64) * 0.02 / 1.2**i
        tensors[f"{prefix}.input_layernorm.weight"] = torch.full((32,), 20.0 if i == 0 else 0.5)
    tensors["model.norm.weight"] = torch.ones(32)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write(path, tensors) -> str:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return str(path)


def codes(result) -> list[tuple[str, str]]:
    return [(finding.severity, finding.code) for finding in result.findings]


def test_healthy_model_has_nothing_that_stands_out(tmp_path, capsys) -> None:
    assert main(["stats", write(tmp_path / "m", model())]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.self_attn.q_proj.weight  ×6" in out
    assert out.splitlines()[-1].endswith("ok (26 tensors, 42.8 KiB; nothing stands out)")
    assert main(["stats", str(tmp_path / "m"), "--tensors"]) == 0
    assert "model.layers.5.self_attn.q_proj.weight" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["file", "dcp", "pickle"])
def test_figures_are_the_same_for_every_format(tmp_path, kind) -> None:
    tensors = model()
    expected = stats(write(tmp_path / "m", tensors))
    path = tmp_path / kind
    if kind == "file":
        path = tmp_path / "m" / "model.safetensors"
    elif kind == "dcp":
        shard(str(tmp_path / "m"), str(path), mesh="dp_shard=3", names="hub")
    else:
        path = tmp_path / "model.pt"
        torch.save({name: t.T.contiguous().T if t.dim() == 2 else t for name, t in tensors.items()}, path)
    found = stats(str(path))
    key = {row.fqn: row for row in found.tensors}
    assert {row.fqn: (row.moments, row.counts) for row in expected.tensors} == {
        fqn: (row.moments, row.counts) for fqn, row in key.items()
    }


def test_every_figure_is_in_the_document(tmp_path, capsys) -> None:
    tensors = model(dtype=torch.float32)
    tensors["none"], tensors["z"] = torch.zeros(0, 3), torch.tensor(1 + 2j)
    assert main(["stats", write(tmp_path / "m", tensors), "--json", "--rank"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["fqn"]: row for row in document["tensors"]}
    weight, row = tensors["model.embed_tokens.weight"].double(), rows["model.embed_tokens.weight"]
    assert row["std"] == pytest.approx(weight.std(correction=0).item())
    assert row["absmax"] == weight.abs().max()
    assert (row["dtype"], row["shape"], row["nan"], row["inf"], row["zeros"]) == ("F32", [96, 32], 0, 0, 0)
    assert sum(n for _, _, n in row["histogram"]) == row["finite"] == weight.numel()
    assert rows["none"]["finite"] == 0
    assert "mean" not in rows["z"]
    assert "1 tensors of packed or complex numbers: z" in document["not_checked"][0]
    values = torch.linalg.svdvals(weight)
    shares = values / values.sum()
    assert row["rank"]["effective_rank"] == pytest.approx(float(torch.exp(-(shares * shares.log()).sum())), rel=1e-6)
    assert row["rank"]["stable_rank"] == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=1e-6)
    assert "rank" not in rows["model.norm.weight"]


def test_low_rank_of_a_sampled_matrix_is_seen(tmp_path) -> None:
    left, right = torch.randn(3000, 3), torch.randn(3, 40)
    (row,) = stats(write(tmp_path / "m", {"a.weight": left @ right}), rank=True).tensors
    assert row.spectrum is not None
    assert (row.spectrum.rows, row.spectrum.columns) == (256, 40)
    assert 2 < row.spectrum.effective_rank <= 3.0001


def test_what_is_not_finite_is_exit_3_and_in_the_figures(tmp_path, capsys) -> None:
    tensors = model()
    tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = float("nan")
    assert main(["stats", write(tmp_path / "m", tensors), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert not document["ok"]
    assert [finding["code"] for finding in document["findings"]] == ["not-finite"]
    assert "the first at [3, 4]" in document["findings"][0]["what"]
    row = next(row for row in document["tensors"] if row["nan"])
    assert (row["fqn"], row["nan"], row["finite"]) == ("model.layers.2.mlp.down_proj.weight", 1, 32 * 64 - 1)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda weight: weight.mul_(40), "rms-outlier"),
        (lambda weight: weight.mul_(1 / 40), "rms-outlier"),
        (lambda weight: weight.fill_(0.25), "constant"),
        (lambda weight: weight.zero_(), "all-zero"),
        (lambda weight: weight[0, :1].fill_(1e4), "magnitude-outlier"),
    ],
)
def test_weight_that_is_not_like_its_siblings_is_a_warning(tmp_path, change, code) -> None:
    tensors = model()
    change(tensors["model.layers.3.self_attn.q_proj.weight"])
    result = stats(write(tmp_path / "m", tensors))
    assert ("warning", code) in codes(result)
    assert result.ok
    assert "model.layers.3.self_attn.q_proj.weight" in next(f.what for f in result.findings if f.code == code)


def test_updates_are_measured_against_another_step(tmp_path, capsys) -> None:
    before, after = model(dtype=torch.float32), model(dtype=torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    after[name] = before[name] + 0.01 * torch.randn(32, 64)
    after["model.layers.0.mlp.down_proj.weight"][0, 0] = float("inf")
    write(tmp_path / "a", after)
    shard(write(tmp_path / "b", before), str(tmp_path / "dcp"), mesh="dp_shard=5", names="hub")
    assert main(["stats", str(tmp_path / "a"), "--against", str(tmp_path / "dcp"), "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    updates = {row["fqn"]: row["update"] for row in document["tensors"]}
    a, b = after[name].double().flatten(), before[name].double().flatten()
    assert updates[name]["relative"] == pytest.approx(((a - b).norm() / b.norm()).item(), rel=1e-12)
    assert updates[name]["cosine"] == pytest.approx(torch.dot(a, b).item() / (a.norm() * b.norm()).item(), rel=1e-12)
    assert updates[name]["changed"] == 32 * 64
    assert updates["model.norm.weight"] == {"changed": 0, "relative": 0.0, "cosine": 1.0}
    broken = updates["model.layers.0.mlp.down_proj.weight"]
    assert broken == {"changed": 1, "relative": None, "cosine": None}
    layer = torch.cat([before[n].double().flatten() for n in before if ".layers.1." in n])
    by_layer = document["updates"]["layer"]["1"]["relative"]
    assert by_layer == pytest.approx(((a - b).norm() / layer.norm()).item(), rel=1e-12)
    assert document["updates"]["layer"]["2"]["relative"] == 0
    assert main(["stats", str(tmp_path / "a"), "--against", str(tmp_path / "b")]) == 3
    out = capsys.readouterr().out
    assert "Updates by layer" in out
    assert "update: |new − old| / |old|, of all layers of a row together" in out
    assert "info: unchanged: 18 of 20 weights have not changed" in out


def test_frozen_that_changed_and_trained_that_did_not_are_findings(tmp_path) -> None:
    before, after = model(), model()
    for name in after:
        if "mlp" in name and ".4." not in name:
            after[name] = after[name] * 1.01
    one, other = write(tmp_path / "a", after), write(tmp_path / "b", before)
    held = ["**q_proj**", "**norm.weight", "model.embed_tokens.weight"]
    result = stats(one, against=other, frozen=held)
    assert codes(result) == [("warning", "not-trained")]
    assert result.findings[0].what == "tensor 'model.layers.4.mlp.down_proj.weight': not one element has changed"
    result = stats(one, against=other, frozen=[*held, "**.mlp.**"])
    assert codes(result)[0] == ("error", "frozen-changed")
    assert "and 4 more like it" in result.findings[0].what
    assert not result.ok
    assert codes(stats(one, against=one, frozen=held)) == [("error", "nothing-trained")]
    assert codes(stats(one, against=one)) == [("info", "nothing-trained")]
    with pytest.raises(UsageError, match="matches no tensor"):
        stats(one, against=other, frozen=["lora**"])
    with pytest.raises(UsageError, match="--frozen needs --against"):
        stats(one, frozen=["**"])


def test_update_that_is_not_like_that_of_other_layers_is_a_warning(tmp_path) -> None:
    before, after = model(dtype=torch.float32), model(dtype=torch.float32)
    for name in after:
        after[name] = after[name] * (1.9 if "layers.3.mlp" in name else 1.001)
    result = stats(write(tmp_path / "a", after), against=write(tmp_path / "b", before))
    assert codes(result) == [("warning", "update-outlier")]
    assert "model.layers.3.mlp.down_proj.weight" in result.findings[0].what


def test_what_only_one_has_or_has_otherwise_is_said(tmp_path) -> None:
    before, after = model(), model()
    before["extra.weight"] = torch.ones(2, 2)
    after["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    after["model.embed_tokens.weight"] = after["model.embed_tokens.weight"].float()
    result = stats(write(tmp_path / "a", after), against=write(tmp_path / "b", before))
    assert result.only_in_other == ("extra.weight",)
    assert "'model.norm.weight': [64] here, [32] in the other" in result.not_checked
    assert any("another dtype: model.embed_tokens.weight" in text for text in result.not_checked)


def test_damage_is_exit_4_not_a_figure(tmp_path) -> None:
    source = write(tmp_path / "m", model())
    shard(source, str(tmp_path / "dcp"), mesh="dp_shard=2", names="hub")
    gather(str(tmp_path / "dcp"), str(tmp_path / "hf"))
    for directory, pattern in (("dcp", "*.distcp"), ("hf", "*.safetensors")):
        file = min((tmp_path / directory).glob(pattern))
        content = bytearray(file.read_bytes())
        value = load_file(tmp_path / "m" / "model.safetensors")["model.embed_tokens.weight"]
        at = content.index(value[:10].view(torch.uint8).numpy().tobytes())
        content[at + 7] ^= 16
        file.write_bytes(content)
        with pytest.raises(UnreadableError, match=r"embed_tokens.*(damaged|not what was written)"):
            stats(str(tmp_path / directory))
        with pytest.raises(UnreadableError, match=r"embed_tokens.*(damaged|not what the manifest recorded)"):
            stats(source, against=str(tmp_path / directory))


def test_quantised_weights_are_measured_decoded_or_it_is_said(tmp_path) -> None:
    torch.manual_seed(0)
    codes, scale = (torch.randn(128, 128) * 100).to(torch.float8_e4m3fn), torch.tensor([[0.001]])
    tensors = {"model.layers.0.mlp.up_proj.weight": codes, "model.layers.0.mlp.up_proj.weight_scale_inv": scale}
    source = write(tmp_path / "q", tensors)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "q" / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    result = stats(source)
    assert "figures are those of their codes" in result.not_checked[0]
    (row,) = stats(source, dequantize=True, against=source).tensors
    assert row.moments is not None
    assert row.moments.rms == pytest.approx((codes.double() * 0.001).square().mean().sqrt().item(), rel=1e-6)
    assert row.update is not None
    assert row.update.num_changed == 0


def test_updates_by_layer_are_those_of_the_model_alone(tmp_path) -> None:
    for i in range(2):
        weights = {f"layers.{n}.up.weight": torch.ones(4, 4) + i for n in range(2)}
        state = {"state": {0: {"exp_avg": torch.randn(4, 4)}}}
        torch.save({"model": weights, "optimizer": state}, tmp_path / f"{i}.pt")
    result = stats(str(tmp_path / "1.pt"), against=str(tmp_path / "0.pt"))
    assert {layer: update.relative for layer, update in result.updates["layer"].items()} == {"0": 1.0, "1": 1.0}


def test_include_dequantised_and_hostile_names(tmp_path, capsys) -> None:
    tensors = {"a\x1b[31m.weight": torch.randn(4, 4), "b.weight": torch.randn(4, 4)}
    source = write(tmp_path / "m", tensors)
    assert main(["stats", source]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "a\\x1b[31m.weight" in out
    assert [row.fqn for row in stats(source, include=["b.**"]).tensors] == ["b.weight"]
    with pytest.raises(UsageError, match="--dequantize"):
        stats(source, dequantize=True)
