"""Values that are wrong in bytes that are right: what is found, what is healthy, and where it is said to be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from samples import without_ranks

from ckpt_tools import api
from ckpt_tools.checks.values import place_of
from ckpt_tools.cli import main

NAN, INF = float("nan"), float("inf")
UP = "model.layers.2.mlp.up_proj.weight"


def llama(num_layers: int = 3) -> dict[str, torch.Tensor]:
    """Weights with a llama's names, none of them strange."""
    state = {"model.embed_tokens.weight": torch.rand(8, 4), "model.norm.weight": torch.ones(4)}
    for layer in (f"model.layers.{i}." for i in range(num_layers)):
        state |= {layer + f"self_attn.{name}_proj.weight": torch.rand(4, 4) for name in "qkvo"}
        state |= {layer + f"mlp.{name}_proj.weight": torch.rand(8, 4) for name in ("gate", "up", "down")}
        state |= {layer + f"{name}_layernorm.weight": torch.ones(4) for name in ("input", "post_attention")}
    return state


def write(path: Path, state: dict[str, torch.Tensor], **config: object) -> Path:
    path.mkdir()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    if config:
        (path / "config.json").write_text(json.dumps(config))
    return path


def told(path: Path) -> list[tuple[str, str]]:
    return [(found.code, found.what) for found in api.verify(path, level="values").findings]


def zeros(state: dict[str, torch.Tensor], *parts: str) -> None:
    for name in state:
        if any(part in name for part in parts):
            state[name].zero_()


def test_place_of_is_the_inverse_of_row_major() -> None:
    assert [place_of(index, (2, 3, 4)) for index in (0, 5, 23)] == [(0, 0, 0), (0, 1, 1), (1, 2, 3)]
    assert place_of(0, ()) == ()


def test_one_nan_in_the_shard_of_rank_3_is_named(tmp_path, capsys) -> None:
    run = tmp_path / "run"
    api.shard(write(tmp_path / "model", llama()), run, mesh="dp_shard=4")
    (entry,) = (entry for entry in api.open_checkpoint(run).tensors if entry.fqn == UP)
    (chunk,) = (chunk for chunk in entry.chunks if chunk.span.file.startswith("__3_"))
    file = run / chunk.span.file
    raw = bytearray(file.read_bytes())
    at = raw.index(b"PK\3\4", chunk.span.offset)
    at = next(i for i in range(at, len(raw)) if raw[i : i + 32] == _bytes_of(tmp_path, UP)[6 * 16 : 6 * 16 + 32])
    raw[at + 4 * 5 : at + 4 * 6] = b"\0\0\xc0\x7f"  # row 7, column 1
    file.write_bytes(raw)
    (run / "ckpt_manifest.json").unlink()
    found = [finding for finding in api.verify(run, level="values").findings if finding.code == "not-finite"]
    assert [finding.where for finding in found] == [chunk.span.file]
    assert f"tensor {UP!r}: 1 NaN of 32 elements, the first at [7, 1] on rank 3" in found[0].what
    assert "not-finite" not in {finding.code for finding in api.verify(run).findings}
    assert main(["verify", str(run), "--level", "values", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["checked"]["values"]["nan"] == 1


def _bytes_of(tmp_path: Path, fqn: str) -> bytes:
    from safetensors.torch import load_file

    return load_file(tmp_path / "model" / "model.safetensors")[fqn].numpy().tobytes()


def test_diverged_model_is_folded(tmp_path) -> None:
    state = {name: torch.full_like(tensor, NAN) for name, tensor in llama(5).items()}
    state |= {f"other{i}x.weight{'y' * i}": torch.full((2,), -INF) for i in range(4)}
    found = [what for code, what in told(write(tmp_path / "model", state)) if code == "not-finite"]
    assert len(found) <= 9
    assert any("32 NaN of 32 elements, the first at [0, 0]; and 4 more like it" in what for what in found)
    assert "more tensors: " in found[-1]


def test_infinite_elements_are_found_but_in_masks_and_numbers_of_a_trainer(tmp_path) -> None:
    state = llama() | {"attn_mask": torch.full((2, 2), -INF), "mask_decoder.up.weight": torch.tensor([[1.0, INF]])}
    assert [code for code, _ in told(write(tmp_path / "model", state))] == ["not-finite"]
    with without_ranks():
        dcp.save(
            {"model": llama(), "best_loss": torch.tensor(INF), "optimizer": {"x": torch.tensor([INF])}},
            checkpoint_id=tmp_path / "run",
        )
    assert [what for code, what in told(tmp_path / "run") if code == "not-finite"] == [
        "tensor 'optimizer.x': 1 infinite of 1 elements, the first at [0] on rank 0"
    ]


def test_packed_weights_are_not_judged_and_said(tmp_path) -> None:
    packed = torch.full((16, 1), NAN, dtype=torch.bfloat16)
    state = llama() | {
        "a.weight": packed,
        "a.weight.absmax": torch.ones(2),
        "a.weight.quant_state.bitsandbytes__nf4": torch.ones(4, dtype=torch.uint8),
        "b.weight": torch.full((256, 1), NAN),
        "c.weight": torch.ones(2, 1, dtype=torch.complex64),
    }
    result = api.verify(write(tmp_path / "model", state), level="values")
    assert result.findings == ()
    assert any("3 tensors of packed or complex numbers" in t for t in result.not_checked)
    del state["a.weight.absmax"], state["a.weight.quant_state.bitsandbytes__nf4"]
    shutil.rmtree(tmp_path / "model")
    assert [code for code, _ in told(write(tmp_path / "model", state))] == ["not-finite"]


ZEROS = {
    "a layer's matrix": (("layers.1.mlp.down_proj",), {}, 1),
    "a layer": (("layers.1.",), {}, 9),
    "a layer's norm": (("layers.0.input_layernorm",), {}, 1),
    "the last norm": (("model.norm",), {}, 1),
    "all norms": (("norm",), {"model_type": "llama"}, 7),
    "embedding": (("embed_tokens",), {}, 1),
    "all queries": (("q_proj",), {}, 3),
    "everything": (("",), {}, 9),
    "norms that add one": (("norm",), {"model_type": "pi0", "text_config": {"model_type": "gemma"}}, 0),
    "norms of one kind": (("post_attention_layernorm",), {}, 0),
    "zero-initialised outputs": (("o_proj", "down_proj"), {}, 0),
    "nothing": ((), {}, 0),
}


@pytest.mark.parametrize("case", ZEROS)
def test_weights_that_are_all_zero_are_warned_of_where_that_is_strange(tmp_path, case) -> None:
    parts, config, count = ZEROS[case]
    state = llama()
    if parts:
        zeros(state, *parts)
    result = api.verify(write(tmp_path / "model", state, **config), level="values")
    assert {finding.code for finding in result.findings} == ({"all-zero"} if count else set())
    assert len(result.findings) == count
    assert result.ok


def test_what_begins_as_zeros_is_healthy(tmp_path) -> None:
    state = llama() | {
        "model.layers.0.self_attn.q_proj.lora_A.weight": torch.rand(2, 4),
        "model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(4, 2),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(4),
        "controlnet_blocks.0.weight": torch.zeros(4, 4),
        "controlnet_blocks.1.weight": torch.rand(4, 4),
        "blocks.0.adaLN_modulation.1.weight": torch.zeros(4, 4),
        "blocks.0.norm1.linear.weight": torch.zeros(4, 4),
        "head.0.weight": torch.rand(4, 4),
        "head.2.weight": torch.zeros(4, 4),
        "bbox.0.layers.0.weight": torch.rand(4, 4),
        "bbox.0.layers.2.weight": torch.zeros(4, 4),
        "cls_token": torch.zeros(1, 1, 4),
        "roberta.embeddings.token_type_embeddings.weight": torch.zeros(1, 4),
        "layer1.0.bn2.weight": torch.zeros(4),
        "batch_norm.weight": torch.zeros(4),
        "batch_norm.running_mean": torch.zeros(4),
        "weight_scale": torch.zeros(4, 4, dtype=torch.int32),
        "empty.weight": torch.zeros(0, 4),
    }
    state["model.embed_tokens.weight"][2] = 0
    assert told(write(tmp_path / "model", state)) == []
    with without_ranks():
        dcp.save(
            {
                "model": llama(),
                "optimizer": {"state.layers.0.weight.exp_avg": torch.zeros(4, 4), "state.b.exp_avg": torch.rand(4)},
            },
            checkpoint_id=tmp_path / "run",
        )
    assert told(tmp_path / "run") == []


def test_conversions_warn_and_go_on(tmp_path, capsys) -> None:
    state = llama()
    state[UP][0, 0] = NAN
    state["model.layers.0.mlp.gate_proj.weight"][1, 2] = 1e6
    zeros(state, "layers.1.self_attn.v_proj")
    model, run = write(tmp_path / "model", state), str(tmp_path / "run")
    assert main(["shard", str(model), run, "--mesh", "dp_shard=2", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    assert main(["shard", str(model), run, "--mesh", "dp_shard=2"]) == 0
    err = capsys.readouterr().err
    assert f"warning: not-finite: model.safetensors: tensor '{UP}': 1 NaN of 32 elements" in err
    assert "warning: all-zero: model.safetensors: tensor 'model.layers.1.self_attn.v_proj.weight'" in err
    assert main(["gather", run, str(tmp_path / "back"), "--dtype", "f16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["values"]["nan"] == document["values"]["inf"] == 1
    assert len(document["warnings"]) == 3
    assert "gate_proj.weight': 1 infinite of 32 elements, the first at [1, 2] on rank 0 (after" in str(document)
