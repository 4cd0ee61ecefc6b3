"""What the libraries of quantised releases have packed, without the libraries: `recipes` has made it with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main
from ckpt_tools.transfer.quantised import decoded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.safetensors"))
FEW = [path for path in SAMPLES if path.stem in ("awq", "gptq", "gptq_v2", "modelopt", "nvfp4", "torchao", "w4_zero")]
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


def opened(sample: Path, directory: Path) -> dict[str, torch.Tensor]:
    """Write the checkpoint of a sample; return what it stands for."""
    tensors = load_file(sample)
    with safe_open(sample, "pt") as file:
        header = file.metadata()
        settings = json.loads(header["quantization_config"])
    directory.mkdir()
    stored = {fqn: tensor for fqn, tensor in tensors.items() if not fqn.startswith("wanted.")}
    save_file(stored, directory / "model.safetensors", metadata=header | {"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return {fqn.removeprefix("wanted."): tensor for fqn, tensor in tensors.items() if fqn not in stored}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_weights_are_what_the_library_decodes(tmp_path, sample):
    wanted = opened(sample, tmp_path / "hub")
    dtype = NAMES[next(iter(wanted.values())).dtype]
    out = tmp_path / "out"
    assert main(["gather", str(tmp_path / "hub"), str(out), "--dequantize", "--dtype", dtype, "-q"]) == 0
    found = load_file(out / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("sample", FEW, ids=lambda path: path.stem)
def test_weights_do_not_depend_on_what_is_decoded_at_once(tmp_path, sample, monkeypatch):
    monkeypatch.setattr(decoded, "_PIECE_ELEMS", 101)
    monkeypatch.setattr(decoded, "_BAND_BYTES", 500)
    monkeypatch.setattr(decoded, "_MAX_BANDS_BYTES", 1000)
    test_weights_are_what_the_library_decodes(tmp_path, sample)


@pytest.mark.parametrize("mesh", ["dp_shard=3", "tp=2"])
def test_meshes_cut_through_words_and_groups(tmp_path, mesh):
    sample = next(path for path in SAMPLES if path.stem == "gptq")
    wanted = opened(sample, tmp_path / "hub")
    packed, out = str(tmp_path / "packed"), str(tmp_path / "out")
    assert main(["shard", str(tmp_path / "hub"), packed, "--mesh", mesh, "-q"]) == 0  # as it is
    assert main(["reshard", packed, out, "--mesh", mesh, "--dequantize", "--dtype", "f16", "-q"]) == 0
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert [name for name, tensor in wanted.items() if not torch.equal(state[name], tensor)] == []
