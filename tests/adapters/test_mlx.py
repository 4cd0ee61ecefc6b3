"""Adapters of mlx-lm: y + scale·(x·lora_a)·lora_b, one scale and one rank for all modules, layers from the last."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from adapters.test_gguf import ATTENTION, HIDDEN, LAYERS, assert_came_back, make_adapter, make_base
from safetensors.numpy import load_file, save_file

from ckpt_tools import api
from ckpt_tools.errors import UnreadableError, UnsupportedError, UsageError

RSLORA = {"model.layers.0.self_attn.v_proj": 4, "model.layers.1.self_attn.v_proj": 2, "model.layers.1.mlp.up_proj": 4}


def config_of(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((path / "adapter_config.json").read_text())
    return found


def parameters_of(path: Path) -> dict[str, object]:
    found = config_of(path)["lora_parameters"]
    assert isinstance(found, dict)
    return found


def change_in_mlx(path: Path, name: str) -> np.ndarray:
    tensors, scale = load_file(path / "adapters.safetensors"), parameters_of(path)["scale"]
    down, up = (tensors[f"{name}.lora_{side}"].astype(np.float64) for side in "ab")
    return scale * (down @ up).T  # type: ignore[operator]


@pytest.mark.parametrize("has_base", [True, False])
def test_mlx_adds_what_was_trained(tmp_path: Path, has_base: bool) -> None:
    base = make_base(tmp_path / "base")
    adapter, changes = make_adapter(tmp_path / "adapter", {**ATTENTION, "model.layers.1.mlp.up_proj": 4})
    assert api.export_lora(adapter, tmp_path / "out", to="mlx", base=base if has_base else None).ok
    for name, wanted in changes.items():
        np.testing.assert_allclose(change_in_mlx(tmp_path / "out", name), wanted, rtol=1e-12)
    assert config_of(tmp_path / "out")["num_layers"] == (1 if has_base else -1)
    keys = sorted([*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.up_proj"])
    assert parameters_of(tmp_path / "out") == {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys}
    assert api.check_lora(tmp_path / "out", base=base).verdict == "loads"
    assert api.check_lora(tmp_path / "out").verdict == "unknown"


def test_one_rank_and_one_scale(tmp_path: Path) -> None:
    alphas = dict(zip(RSLORA, (8, 8, 24), strict=True))
    adapter, changes = make_adapter(tmp_path / "adapter", RSLORA, alphas=alphas)
    made = api.export_lora(adapter, tmp_path / "out", to="mlx", base=make_base(tmp_path / "base"))
    assert any("padded with zeros to rank 4" in note for note in made.conversion.notes)
    assert {t.shape[1] for n, t in load_file(tmp_path / "out" / "adapters.safetensors").items() if "lora_a" in n} == {4}
    for name, wanted in changes.items():
        assert np.abs(change_in_mlx(tmp_path / "out", name) - wanted).max() < 2e-7 * np.abs(wanted).max()


@pytest.mark.parametrize("is_dora", [True, False])
def test_the_way_back_gives_the_same_bytes(tmp_path: Path, is_dora: bool) -> None:
    base = make_base(tmp_path / "base")
    ranks = ATTENTION if is_dora else {**ATTENTION, "model.embed_tokens": 4, "lm_head": 4}
    adapter, _ = make_adapter(tmp_path / "adapter", ranks)
    if is_dora:
        tensors = load_file(adapter / "adapter_model.safetensors")
        rows = {name: tensor.shape[0] for name, tensor in tensors.items() if "lora_B" in name}
        for name, count in rows.items():
            tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = np.arange(1, count + 1, dtype=np.float32)
        save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
        (adapter / "adapter_config.json").write_text(json.dumps({**config_of(adapter), "use_dora": True}))
    api.export_lora(adapter, tmp_path / "out", to="mlx", base=base)
    assert config_of(tmp_path / "out")["fine_tune_type"] == ("dora" if is_dora else "lora")
    assert api.check_lora(tmp_path / "out", base=base).verdict == "loads"
    back = api.export_lora(tmp_path / "out", tmp_path / "back", base=base)
    assert back.config["lora_alpha"].value == 8
    assert_came_back(tmp_path, tmp_path / "out")


def test_verdicts_are_mlxs(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    adapter, _ = make_adapter(
        tmp_path / "adapter", {f"model.layers.{layer}.self_attn.q_proj": 4 for layer in range(LAYERS)}
    )
    api.export_lora(adapter, tmp_path / "out", to="mlx", base=base)
    good, parameters = config_of(tmp_path / "out"), parameters_of(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "adapters.safetensors")

    def verdict(config: dict[str, object], changed: dict[str, np.ndarray] = tensors) -> tuple[str, str]:
        (tmp_path / "out" / "adapter_config.json").write_text(json.dumps({**good, **config}))
        save_file(changed, tmp_path / "out" / "adapters.safetensors")
        check = api.check_lora(tmp_path / "out", base=base)
        return check.verdict, " ".join(each.what for each in check.findings if each.severity == "error")

    assert verdict({}) == ("loads", "")
    without_keys = {name: value for name, value in parameters.items() if name != "keys"}
    assert verdict({"lora_parameters": without_keys}) == ("loads", "")
    assert verdict({"num_layers": LAYERS + 9}) == ("loads", "")
    untold = good.pop("fine_tune_type")
    assert verdict({}) == ("loads", "")
    good["fine_tune_type"] = untold
    name = "model.layers.0.self_attn.q_proj.lora_b"
    keys = [*parameters["keys"], "self_attn.r_proj"]  # type: ignore[misc]
    for config, changed, said in (
        ({"num_layers": 1}, tensors, "num_layers is 1, which leaves out the first 1 layers"),
        ({"num_layers": "all"}, tensors, "must have num_layers"),
        ({"lora_parameters": {**parameters, "keys": ["self_attn.k_proj"]}}, tensors, "keys does not name the module"),
        ({"lora_parameters": {**without_keys, "keys": []}}, tensors, "keys does not name the module"),
        ({"fine_tune_type": "dora"}, tensors, "loads it without m"),
        ({}, {**tensors, "model.layers.0.self_attn.q_proj.m": np.ones(HIDDEN, np.float32)}, "has no m"),
        ({}, {each.replace("0.self_attn.q", "0.self_attn.r"): tensors[each] for each in tensors}, "keys does not name"),
        (
            {"lora_parameters": {**parameters, "keys": keys}},
            {each.replace("0.self_attn.q", "0.self_attn.r"): tensors[each] for each in tensors},
            "the base has no such module|not in it|no module",
        ),
        ({}, {each: tensor for each, tensor in tensors.items() if each != name}, "without"),
        ({"lora_parameters": {**parameters, "rank": 8}}, tensors, "the rank in adapter_config.json is 8"),
        ({"lora_parameters": {**parameters, "scale": 0}}, tensors, "changes nothing"),
    ):
        found = verdict(config, changed)
        assert found[0] == "fails", (said, found)
        assert any(each in found[1] for each in said.split("|")), (said, found)
    for loader in ("peft", "llama.cpp", "vllm"):
        assert api.check_lora(tmp_path / "out", base=base, loaders=[loader]).verdict == "fails"
    assert api.check_lora(adapter, base=base, loaders=["mlx"]).verdict == "fails"


def test_refusals(tmp_path: Path) -> None:
    tied = make_base(tmp_path / "tied", tie_word_embeddings=True)
    adapter, _ = make_adapter(tmp_path / "adapter", {"model.embed_tokens": 4})
    for base, said in ((tied, "ties its head"), (None, "whether the base ties its head is not known")):
        with pytest.raises(UsageError, match=said):
            api.export_lora(adapter, tmp_path / "out", to="mlx", base=base)
    adapter, _ = make_adapter(tmp_path / "plain", ATTENTION)
    api.export_lora(adapter, tmp_path / "out", to="mlx")
    good = config_of(tmp_path / "out")
    for config, error in (
        ({"fine_tune_type": "full"}, UnsupportedError),
        ({"lora_parameters": {"rank": 4}}, UnreadableError),
        ({"lora_parameters": {"rank": 4, "scale": "large"}}, UnreadableError),
        ({"lora_parameters": 7}, UnreadableError),
    ):
        (tmp_path / "out" / "adapter_config.json").write_text(json.dumps({**good, **config}))
        with pytest.raises(error):
            api.merge_lora(make_base(tmp_path / f"base{len(str(config))}"), tmp_path / "out", tmp_path / "merged")
