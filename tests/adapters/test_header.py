"""The header of single files: what kohya's tools and managers read, held against safetensors' own writer."""

from __future__ import annotations

import hashlib
import io
import json

import pytest
import torch
from adapters.families import save_dcp
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from ckpt_tools.adapters.export import export_lora

_BLOCK = "lora_unet_double_blocks_0_img_attn_proj"


def _source(path, metadata, *, rows=48, name=_BLOCK):
    torch.manual_seed(0)
    tensors = {
        f"{name}.lora_down.weight": torch.randn(4, 32),
        f"{name}.lora_up.weight": torch.randn(rows, 4),
        f"{name}.alpha": torch.tensor(2.0),
    }
    save_file(tensors, path, metadata)
    return path


def _header(path):
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def _as_sd_scripts(path):
    """Hashes of a file by sd-scripts' recipe: of what safetensors' own writer makes with the ss_ part of the header."""
    training = {key: value for key, value in _header(path).items() if key.startswith("ss_")}
    content = save(load_file(path), training)
    start = 8 + int.from_bytes(content[:8], "little")
    reader = io.BytesIO(content)
    reader.seek(0x100000)
    return hashlib.sha256(content[start:]).hexdigest(), hashlib.sha256(reader.read(0x10000)).hexdigest()[:8]


@pytest.mark.parametrize("target", ["kohya", "comfyui"])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize("rows", [48, 100_000])  # the older hash begins at 1 MiB
def test_hashes_are_those_of_sd_scripts(tmp_path, target, dtype, rows):
    source = _source(tmp_path / "in.safetensors", {"ss_tag_frequency": json.dumps({"1_düne": {"düne": 1}})}, rows=rows)
    export_lora(source, tmp_path / "out", to=target, architecture="flux1", dtype=dtype)
    (written,) = (tmp_path / "out").glob("*.safetensors")
    header = _header(written)
    assert (header["sshs_model_hash"], header["sshs_legacy_hash"]) == _as_sd_scripts(written)
    content = written.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    assert header["modelspec.hash_sha256"] == f"0x{hashlib.sha256(data).hexdigest()}"


def test_what_the_trainer_said_stays_where_it_is_true(tmp_path):
    said = {
        "ss_tag_frequency": json.dumps({"1_ohwx": {"ohwx": 1}}),
        "ss_output_name": "ohwx-v2",
        "ss_resolution": "(768, 512)",
        "ss_training_finished_at": "1770000000.25",
        "ss_network_dim": "999",
        "ss_network_alpha": "999",
        "ss_network_module": "networks.loha",
        "ss_base_model_version": "flux1",
        "sshs_model_hash": "0" * 64,
        "modelspec.architecture": "flux-1-dev/lora",
        "modelspec.hash_sha256": "0x00",
        "modelspec.implementation": "diffusers",
        "modelspec.trigger_phrase": "ohwx",
        "modelspec.author": "somebody",
        "training_info": '{"step": 7, "epoch": 1}',
        "software": "unknown",
    }
    export_lora(_source(tmp_path / "in.safetensors", said), tmp_path / "out", to="comfyui")
    header = _header(next((tmp_path / "out").glob("*.safetensors")))
    for key in ("ss_tag_frequency", "ss_output_name", "modelspec.trigger_phrase", "modelspec.author", "training_info"):
        assert header[key] == said[key]
    assert header["modelspec.architecture"] == "flux-1-dev/lora"  # closer than "flux-1"
    assert header["modelspec.title"] == "ohwx-v2"
    assert header["modelspec.resolution"] == "768x512"
    assert header["modelspec.date"] == "2026-02-02T02:40:00+00:00"
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("4", "2")
    assert header["ss_network_module"] == "networks.lora"
    assert header["modelspec.implementation"] == "https://github.com/black-forest-labs/flux"
    assert header["sshs_model_hash"] != said["sshs_model_hash"]
    assert "software" not in header


@pytest.mark.parametrize(
    ("said", "key", "right"),
    [
        ({"ss_base_model_version": "sdxl_base_v1-0"}, "ss_base_model_version", "flux1"),
        ({"modelspec.architecture": "Flex.1-alpha"}, "modelspec.architecture", "flux-1/lora"),
        ({"ss_resolution": "None"}, "modelspec.resolution", "1024x1024"),
        ({"ss_output_name": "None"}, "modelspec.title", "lora"),
        ({"ss_training_finished_at": "nan"}, "modelspec.date", None),
        ({"ss_training_finished_at": "1e300"}, "modelspec.date", None),
    ],
)
def test_what_is_not_known_or_not_true_is_not_written(tmp_path, said, key, right):
    export_lora(_source(tmp_path / "in.safetensors", said), tmp_path / "out", to="kohya", architecture="flux1")
    assert _header(next((tmp_path / "out").glob("*.safetensors"))).get(key) == right


def test_a_checkpoint_without_a_header_gets_hashes_and_no_training(tmp_path):
    module = "base_model.model.transformer_blocks.0.attn.to_out.0"
    tensors = {f"{module}.lora_A.weight": torch.randn(4, 32), f"{module}.lora_B.weight": torch.randn(48, 4)}
    save_dcp(tensors, tmp_path / "in")
    export_lora(tmp_path / "in", tmp_path / "out", to="comfyui", architecture="flux1", alpha=4)
    written = next((tmp_path / "out").glob("*.safetensors"))
    header = _header(written)
    assert (header["sshs_model_hash"], header["sshs_legacy_hash"]) == _as_sd_scripts(written)
    training = {key for key in header if key.startswith("ss_")}
    assert training == {"ss_network_module", "ss_network_dim", "ss_network_alpha", "ss_base_model_version"}
