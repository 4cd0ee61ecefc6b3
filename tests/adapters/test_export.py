"""Adapters of two FSDP2 ranks, exported and loaded by PEFT: the model must answer as it did."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from adapters import families, lycoris_worlds
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import DestinationExistsError, UsageError
from ckpt_tools.storage.source import LocalSource


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """The checkpoints of all cases that are asked for."""
    directory = tmp_path_factory.mktemp("families")
    items = [item for item in request.session.items if item.path == request.path and "saved" in item.fixturenames]
    run_ranks(2, families.save_all, str(directory), [item.callspec.params["name"] for item in items], timeout=300)
    return directory


@pytest.mark.full
@pytest.mark.parametrize("name", families.CASES)
def test_adapter_of_two_ranks_exported_to_peft_answers_as_before(saved, tmp_path, name):
    case = families.CASES[name]
    result = api.export_lora(saved / name / "dcp", tmp_path / "out", **case.options)
    assert result.ok
    assert result.conversion.verified
    expected = load_file(saved / name / "logits.safetensors")["logits"]
    assert not torch.equal(expected, families.outputs(families.build(case.model), case.model))
    model = families.reload(tmp_path / "out", case)
    torch.testing.assert_close(families.outputs(model, case.model), expected, rtol=0, atol=0)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config == {field: found.value for field, found in result.config.items()}
    assert all(found.source for found in result.config.values())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint in which the adapter is a hundredth."""
    path = tmp_path_factory.mktemp("large") / "dcp"
    state = {}
    for layer in range(8):
        root = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        state[f"{root}.base_layer.weight"] = torch.randn(1024, 1024)
        state[f"{root}.lora_A.default.weight"] = torch.randn(16, 1024)
        state[f"{root}.lora_B.default.weight"] = torch.randn(1024, 16)
    state["base_model.model.lm_head.weight"] = torch.randn(4096, 1024)
    families.save_dcp({"model": state}, path)
    return path


def test_export_from_a_large_checkpoint_reads_the_adapter_and_the_metadata(large, tmp_path, monkeypatch):
    spans = []
    read_into = LocalSource.read_into

    def noting(self, file, offset, buffer):
        if self.root == str(large):
            spans.append((file, len(buffer)))
        read_into(self, file, offset, buffer)

    monkeypatch.setattr(LocalSource, "read_into", noting)
    result = api.export_lora(large, tmp_path / "out", alpha=8)
    adapter = 8 * 2 * 16 * 1024 * 4
    assert result.conversion.bytes_read == adapter
    metadata = (large / ".metadata").stat().st_size
    data = sum(nbytes for file, nbytes in spans if file != ".metadata")
    assert adapter <= data <= 1.1 * adapter
    assert sum(nbytes for file, nbytes in spans if file == ".metadata") <= metadata
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size < 1.1 * adapter


def test_export_to_peft_imports_no_torch(large, tmp_path):
    code = (
        "import sys; from ckpt_tools.cli import main; "
        f"code = main(['export-lora', {str(large)!r}, {str(tmp_path / 'out')!r}, '--alpha', '8', '-q']); "
        "assert 'torch' not in sys.modules and 'numpy' in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def export_json(capsys, *argv):
    code = main(["export-lora", *map(str, argv), "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out or shown.err)


def test_command_says_where_every_setting_comes_from(large, tmp_path, capsys):
    code, document = export_json(capsys, large, tmp_path / "out", "--alpha", 8, "--base-model", "org/base")
    assert code == 0
    assert document["num_tensors"] == 16
    assert document["files"] == ["adapter_model.safetensors", "adapter_config.json"]
    assert document["verified"] is True
    assert document["checked"] == {"digests": 0, "crcs": 16, "sizes": 0, "shapes": 0}
    assert {each["code"] for each in document["findings"]} == {"assumed"}
    config = document["config"]
    assert config["lora_alpha"] == {"value": 8, "source": "--alpha"}
    assert config["r"] == {"value": 16, "source": "A has 16 rows"}
    assert config["base_model_name_or_path"] == {"value": "org/base", "source": "--base-model"}
    assert config["target_modules"]["value"] == ["q_proj"]
    assert "the base model in the source" in config["target_modules"]["source"]
    assert document["notes"] == ["left out: 9 tensors of the base model"]


def test_command_without_an_alpha_asks_for_it(large, tmp_path, capsys):
    code, document = export_json(capsys, large, tmp_path / "out")
    assert code == 2
    assert "alpha of 8 modules" in document["error"]["what"]
    assert "--alpha VALUE" in document["error"]["hint"]
    assert not (tmp_path / "out").exists()


def test_dry_run_lists_the_files_and_writes_nothing(large, tmp_path, capsys):
    code, document = export_json(capsys, large, tmp_path / "out", "--alpha", 8, "--dry-run")
    assert code == 0
    planned = {each["file"]: each["nbytes"] for each in document["plan"]["files"]}
    assert not list(tmp_path.iterdir())
    api.export_lora(large, tmp_path / "out", alpha=8)
    assert planned == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}


def test_export_replaces_a_destination_only_when_told(large, tmp_path):
    api.export_lora(large, tmp_path / "out", alpha=8)
    with pytest.raises(DestinationExistsError):
        api.export_lora(large, tmp_path / "out", alpha=4)
    api.export_lora(large, tmp_path / "out", alpha=4, overwrite=True)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("f16", torch.float16), ("keep", torch.float32)])
def test_export_casts_when_told(large, tmp_path, dtype, kind):
    api.export_lora(large, tmp_path / "keep", alpha=8)
    api.export_lora(large, tmp_path / "out", alpha=8, dtype=dtype)
    expected = load_file(tmp_path / "keep" / "adapter_model.safetensors")
    for name, tensor in load_file(tmp_path / "out" / "adapter_model.safetensors").items():
        assert tensor.dtype == kind
        assert torch.equal(tensor, expected[name].to(kind))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"to": "onnx"}, "unknown target 'onnx'"),
        ({"dtype": "int8"}, "'int8' is not a dtype"),
        ({"adapter": "other"}, "no adapter 'other' here: it holds default"),
        ({"config": ["r"]}, "'r' is not FIELD=VALUE"),
        ({"config": ["rang=4"]}, "rang is not a field of PEFT's configuration"),
        ({"config": ["lora_alpha=4"]}, "lora_alpha has an option of its own"),
        ({"config": ["rank_pattern={}"]}, "rank_pattern is derived from the tensors"),
        ({"config": ["r=4", "r=5"]}, "r is given twice"),
    ],
)
def test_export_with_options_that_cannot_be_meant_is_refused(large, tmp_path, options, what):
    with pytest.raises(UsageError) as caught:
        api.export_lora(large, tmp_path / "out", **({"alpha": 8} | options))
    assert what in caught.value.what
    assert not list(tmp_path.iterdir())


def test_export_of_a_damaged_chunk_is_refused(large, tmp_path):
    from ckpt_tools.adapters.read.opening import read_adapter
    from ckpt_tools.errors import UnreadableError

    shutil.copytree(large, tmp_path / "dcp")
    with read_adapter(str(tmp_path / "dcp")) as (opened, adapter):
        span = opened.resolve(adapter.modules[3].factors["B"]).chunks[0].span
    with open(tmp_path / "dcp" / span.file, "r+b") as file:
        file.seek(span.offset + span.nbytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(UnreadableError, match="is damaged: CRC-32"):
        api.export_lora(tmp_path / "dcp", tmp_path / "out", alpha=8)
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize(
    ("algorithm", "options", "tolerance"),
    [
        ("lora", {}, 1e-6),  # PEFT adds to the output, LyCORIS to the weight
        ("lora", {"use_tucker": True}, 1e-5),  # the core is multiplied into a factor
        ("loha", {}, 1e-6),
        ("loha", {"use_tucker": True}, 1e-6),
        ("lokr", {}, 1e-6),
        ("lokr", {"linear_dim": 1, "conv_dim": 1, "linear_alpha": 1}, 1e-6),
        ("lokr", {"decompose_both": True, "linear_dim": 1, "conv_dim": 1}, 1e-6),
        ("lora", {"weight_decompose": True, "wd_on_output": True}, 1e-5),
        ("loha", {"weight_decompose": True, "wd_on_output": True}, 1e-5),
    ],
)
def test_lycoris_file_exported_to_peft_answers_as_lycoris_does(tmp_path, algorithm, options, tolerance):
    from peft import PeftModel

    model, network = lycoris_worlds.adapt(algorithm, **options)
    with torch.no_grad():
        expected = model(*lycoris_worlds.inputs())
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, tmp_path / "n.safetensors")
    save_file(lycoris_worlds.build().state_dict(), tmp_path / "base.safetensors")
    result = api.export_lora(tmp_path / "n.safetensors", tmp_path / "out", base=tmp_path / "base.safetensors")
    assert result.ok, result.findings
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        reloaded = PeftModel.from_pretrained(lycoris_worlds.build(), tmp_path / "out").eval()
        found = reloaded(*lycoris_worlds.inputs())
    plain = lycoris_worlds.build()(*lycoris_worlds.inputs())
    for ours, theirs, base in zip(found, expected, plain, strict=True):
        assert not torch.allclose(base, theirs, atol=1e-2)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())
