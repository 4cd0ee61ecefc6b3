"""Checkpoints that others wrote: four real ranks, FSDP2 and tensor parallelism, optimizer state after a step."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from compat.world import models
from compat.world.train import save_all, save_uneven
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError

pytestmark = pytest.mark.full

# Checkpoint → the full tensors that torch put together when it was saved.
MODELS = {
    "nested": "fsdp",  # {"model": …, "optimizer": …, more}
    "titan": "fsdp",  # the model's keys at the root, the rest nested beside them
    "threads": "fsdp",  # thread_count=3
    "per-tensor": "fsdp",  # single_file_per_rank=False
    "wrapped": "fsdp",  # torch.compile and checkpoint_wrapper names
    "module": "fsdp",  # DDP names
    "compiled-module": "fsdp",
    "lightning": "fsdp",
    "average": "fsdp",  # an EMA copy beside the model
    "accelerate/pytorch_model_fsdp_0": "fsdp",
    "app": "hsdp",  # {"app": Stateful}
    "fsdp-tp": "fsdp-tp",
}
OTHERS = ("odd", "async", "accelerate/optimizer_0")
LEFT_OUT = {
    "nested": ["63 tensors of optimizer state", "non-tensor items"],
    "titan": ["63 tensors of optimizer state", "2 tensors that are not the model's: train_state", "non-tensor items"],
    "lightning": ["63 tensors of optimizer state", "1 tensors that are not the model's: loops.epoch", "non-tensor"],
    "average": ["21 tensors that are not the model's: ema."],
    "app": ["63 tensors of optimizer state", "non-tensor items"],
    "fsdp-tp": ["63 tensors of optimizer state", "non-tensor items"],
}
STRIPPED = {
    "nested": "model.",
    "module": "module.",
    "compiled-module": "module.",
    "lightning": "model.model.",
    "average": "model.",
    "accelerate/pytorch_model_fsdp_0": "model.",
    "app": "app.model.",
    "fsdp-tp": "model.",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One launch of four ranks writes all of them, and one of eight."""
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(4, save_all, directory, timeout=200)
    run_ranks(8, save_uneven, directory, timeout=200)
    return directory


def blob_bytes(directory):
    """Every item that is not a tensor, as its bytes, found with PyTorch's own reader."""
    metadata = FileSystemReader(directory).read_metadata()
    blobs = {}
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            data = Path(directory, info.relative_path).read_bytes()
            blobs[index.fqn] = data[info.offset : info.offset + info.length]
    return blobs


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_verify_trainer_checkpoint_is_sound(saved, name):
    result = api.verify(saved / name, level="data")
    assert result.findings == ()
    # torch records a CRC-32 with every tensor, so nothing but what the pickled objects mean is taken on trust.
    # Without a manifest two things stay unknown, and are said: names that stand once, files of equal layout.
    expected = ("names, which", "of equal layout", "whether the values are finite", "non-tensor items mean")
    assert all(any(part in text for part in expected) for text in result.not_checked)
    assert result.nbytes == api.open_checkpoint(saved / name).total_bytes > 0


@pytest.mark.parametrize("name", MODELS)
def test_verify_trainer_checkpoint_with_a_flipped_bit_is_not(saved, tmp_path, name):
    shutil.copytree(saved / name, tmp_path / "copy")
    with open_path(str(tmp_path / "copy")) as opened:
        chunk = opened.resolve(opened.checkpoint.tensors[-1]).chunks[-1]
    with open(tmp_path / "copy" / chunk.span.file, "r+b") as file:
        file.seek(chunk.span.offset + chunk.span.nbytes - 1)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    result = api.verify(tmp_path / "copy", level="data")
    assert [finding.code for finding in result.findings] == ["damaged-data"]


@pytest.mark.parametrize("mesh", ["dp_shard=3", "dp_replicate=2,dp_shard=2,tp=2"])
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_reshard_trainer_checkpoint_keeps_everything(saved, tmp_path, read_dcp, assert_same, name, mesh):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "version: 1\nrules:\n"
        '  - {match: "**{q,k,v,gate,up}_proj.weight", place: {tp: S(0)}}\n'
        '  - {match: "**{o,down}_proj.weight", place: {tp: S(1)}}\n'
    )
    has_rules = "tp" in mesh and name in MODELS
    api.reshard(saved / name, tmp_path / "out", mesh=mesh, rules=rules if has_rules else None)
    assert api.verify(tmp_path / "out").findings == ()
    assert blob_bytes(tmp_path / "out") == blob_bytes(saved / name)
    keys = None
    if name == "odd":  # its `notes` are of a class that only its writer has
        keys = {fqn for fqn in FileSystemReader(saved / name).read_metadata().state_dict_metadata if fqn != "notes"}
    assert_same(read_dcp(tmp_path / "out", keys), read_dcp(saved / name, keys))


def test_reshard_trainer_checkpoint_cuts_optimizer_state_like_its_parameter(saved, tmp_path):
    options = ["--mesh", "dp_shard=2,tp=2", "--set", "model.model.layers.*.mlp.up_proj.weight=tp:S(0)"]
    assert main(["reshard", str(saved / "nested"), str(tmp_path / "out"), *options, "--quiet"]) == 0
    boxes = {e.fqn: [chunk.box for chunk in e.chunks] for e in api.open_checkpoint(tmp_path / "out").tensors}
    parameter = "model.layers.0.mlp.up_proj.weight"
    assert len(boxes[f"model.{parameter}"]) == 4
    for leaf in ("exp_avg", "exp_avg_sq"):
        assert boxes[f"optimizer.state.{parameter}.{leaf}"] == boxes[f"model.{parameter}"]
    other = "model.layers.0.mlp.down_proj.weight"
    assert len(boxes[f"optimizer.state.{other}.exp_avg"]) == len(boxes[f"model.{other}"]) == 2


def test_reshard_trainer_checkpoint_with_prefix_is_found_under_its_new_name(saved, tmp_path, read_dcp, assert_same):
    api.reshard(saved / "threads", tmp_path / "out", mesh="dp_shard=2", prefix="net.")
    reference = load_file(saved / "fsdp.safetensors")
    assert_same(read_dcp(tmp_path / "out"), {f"net.{fqn}": tensor for fqn, tensor in reference.items()})


@pytest.mark.parametrize("name", MODELS)
def test_gather_trainer_checkpoint_is_the_model(saved, tmp_path, assert_same, name):
    result = api.gather(saved / name, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), load_file(saved / f"{MODELS[name]}.safetensors"))
    notes = list(result.notes)
    if name.startswith("accelerate/"):
        assert notes.pop(0).startswith("one part of a step: ")
    if name in STRIPPED:
        assert notes.pop(0).startswith(f"stripped the prefix {STRIPPED[name]!r} ")
    expected = LEFT_OUT.get(name, [])
    assert len(notes) == len(expected)
    for note, part in zip(notes, expected, strict=True):
        assert note.startswith("left out ")
        assert part in note


@pytest.mark.parametrize("name", ["nested", "titan", "lightning", "app", "hf-sharded"])
def test_gather_after_reshard_is_still_the_model(saved, tmp_path, assert_same, name):
    api.reshard(saved / name, tmp_path / "resharded", mesh="dp_shard=3")
    api.gather(tmp_path / "resharded", tmp_path / "out")
    reference = load_file(saved / f"{MODELS.get(name, 'fsdp')}.safetensors")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), reference)


def test_gather_trainer_checkpoint_with_assets_loads_with_equal_logits(saved, tmp_path):
    trained = models.llama()
    trained.load_state_dict(load_file(saved / "fsdp-tp.safetensors"))
    trained.config.save_pretrained(tmp_path / "config")
    api.gather(saved / "fsdp-tp", tmp_path / "out", assets=tmp_path / "config", max_shard_size="20KB")
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(models.logits(back), models.logits(trained))


def test_gather_trainer_checkpoint_like_reference_has_its_names_and_dtypes(saved, tmp_path, assert_same):
    transformers.utils.logging.disable_progress_bar()
    models.llama().to(torch.bfloat16).save_pretrained(tmp_path / "base", max_shard_size="15KB")
    api.gather(saved / "nested", tmp_path / "out", like=tmp_path / "base")
    names = sorted(path.name for path in (tmp_path / "base").iterdir())
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    assert set(names) <= {path.name for path in (tmp_path / "out").iterdir()}
    reference = load_file(saved / "fsdp.safetensors")
    for name in names:
        if name.endswith(".safetensors"):
            file = load_file(tmp_path / "out" / name)
            assert list(file) == list(load_file(tmp_path / "base" / name))
            assert_same(file, {fqn: reference[fqn].to(torch.bfloat16) for fqn in file})


def test_gather_optimizer_alone_is_refused_by_name(saved, tmp_path):
    with pytest.raises(UnreadableError, match="holds no model tensors"):
        api.gather(saved / "accelerate/optimizer_0", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_accelerate_directory_is_recognised_and_its_parts_are_named(saved, capsys):
    assert main(["inspect", str(saved / "accelerate")]) == 0
    shown = capsys.readouterr().out
    assert "pytorch_model_fsdp_0" in shown
    assert "optimizer_0" in shown


def test_hf_sharded_of_real_ranks_is_read_gathered_and_resharded(saved, tmp_path, read_dcp, assert_same):
    reference = load_file(saved / "fsdp.safetensors")
    result = api.verify(saved / "hf-sharded")
    assert result.ok
    assert any("global shapes" in text for text in result.not_checked)
    assert api.open_checkpoint(saved / "hf-sharded").format == "hf-sharded"
    api.gather(saved / "hf-sharded", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), reference)
    api.reshard(saved / "hf-sharded", tmp_path / "dcp", mesh="dp_shard=2,tp=2", set=["lm_head.weight=tp:S(1)"])
    assert_same(read_dcp(tmp_path / "dcp"), reference)


def test_hf_sharded_without_its_second_file_is_incomplete(saved, tmp_path):
    shutil.copytree(saved / "hf-sharded", tmp_path / "copy")
    (tmp_path / "copy" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    assert not api.verify(tmp_path / "copy").ok
    with pytest.raises(UnreadableError, match="incomplete"):
        api.gather(tmp_path / "copy", tmp_path / "out")


def test_hf_sharded_with_a_file_mapping_and_odd_tensors_is_gathered(saved, tmp_path, assert_same):
    assert len(list((saved / "hf-mapped").glob("shard-00002-model-0000[12]-of-00002.safetensors"))) == 2
    api.gather(saved / "hf-mapped", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), load_file(saved / "hf-mapped.safetensors"))


def test_no_collectives_directory_is_recognised(saved, capsys):
    assert main(["verify", str(saved / "no-collectives")]) == 4
    assert "use_collectives=False" in capsys.readouterr().err


@pytest.mark.parametrize("length", [5, 13, 18])
def test_uneven_fsdp_on_tp_that_torch_can_load_is_exact(saved, tmp_path, read_dcp, assert_same, length):
    expected = {"w": torch.arange(length * 3.0).reshape(length, 3)}
    assert_same(read_dcp(saved / f"uneven-{length}"), expected)
    assert api.verify(saved / f"uneven-{length}").findings == ()
    api.gather(saved / f"uneven-{length}", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


@pytest.mark.parametrize("length", [9, 17])
def test_uneven_fsdp_on_tp_that_torch_cannot_load_is_refused(saved, tmp_path, read_dcp, length):
    # What PyTorch saved contradicts its own chunk table.
    with pytest.raises(CheckpointException, match="mismatch"):
        read_dcp(saved / f"uneven-{length}")
    result = api.verify(saved / f"uneven-{length}")
    assert {finding.code for finding in result.findings} == {"item-mismatch"}
    with pytest.raises(UnreadableError, match="metadata has sizes"):
        api.gather(saved / f"uneven-{length}", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def forget_item(path, offset, length):
    """Take an item out of its file, as if it had never been written."""
    with open(path, "r+b") as file:
        if offset + length == file.seek(0, os.SEEK_END):
            file.truncate(offset)
        else:
            file.seek(offset)
            file.write(bytes(length))


def test_tied_tensors_that_share_one_item_are_read_and_written_twice(saved, tmp_path, read_dcp, assert_same):
    shutil.copytree(saved / "threads", tmp_path / "tied")
    metadata = FileSystemReader(tmp_path / "tied").read_metadata()
    # As some savers tie: the second name's chunks point at the items of the first.
    items = {i.offset: info for i, info in metadata.storage_data.items() if i.fqn == "model.embed_tokens.weight"}
    for index, info in list(metadata.storage_data.items()):
        if index.fqn == "lm_head.weight":
            metadata.storage_data[index] = items[index.offset]
            forget_item(tmp_path / "tied" / info.relative_path, info.offset, info.length)
    (tmp_path / "tied" / ".metadata").write_bytes(pickle.dumps(metadata))
    reference = load_file(saved / "fsdp.safetensors")
    reference["lm_head.weight"] = reference["model.embed_tokens.weight"]
    assert_same(read_dcp(tmp_path / "tied"), reference)
    assert api.verify(tmp_path / "tied").ok
    api.reshard(tmp_path / "tied", tmp_path / "out", mesh="dp_shard=2")
    assert_same(read_dcp(tmp_path / "out"), reference)
    api.gather(tmp_path / "tied", tmp_path / "full")
    assert_same(load_file(tmp_path / "full" / "model.safetensors"), reference)


def test_odd_tensors_of_real_ranks_come_out_row_major(saved, tmp_path, read_dcp, assert_same):
    names = set(FileSystemReader(saved / "odd").read_metadata().state_dict_metadata) - {"notes"}
    stock = {fqn: tensor for fqn, tensor in read_dcp(saved / "odd", names).items() if fqn != "plain"}
    flat = {}

    def flatten(prefix, value):
        for key, item in value.items():
            if isinstance(item, dict):
                flatten(f"{prefix}{key}.", item)
            else:
                flat[prefix + key] = item

    flatten("", stock)
    with open_path(str(saved / "odd")) as opened:
        strided = {e.fqn for e in opened.resolved().tensors if any(c.strides is not None for c in e.chunks)}
    # The recipe did what it is for: these lie otherwise than row-major in the file.
    assert {"strided.sharded", "strided.plain", "strided.three"} <= strided
    wide = flat.pop("wide")
    api.gather(saved / "odd", tmp_path / "out")
    gathered = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(gathered.pop("wide"), wide)
    assert_same({fqn: gathered[fqn] for fqn in sorted(gathered)}, {fqn: flat[fqn] for fqn in sorted(flat)})


def test_stale_data_file_of_an_earlier_save_is_named_and_not_used(saved, tmp_path, assert_same):
    shutil.copytree(saved / "threads", tmp_path / "copy")
    shutil.copy(saved / "nested" / "__3_0.distcp", tmp_path / "copy" / "__9_0.distcp")
    result = api.verify(tmp_path / "copy")
    assert result.ok
    assert [(f.code, f.where) for f in result.findings] == [("unreferenced-file", "__9_0.distcp")]
    api.gather(tmp_path / "copy", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), load_file(saved / "fsdp.safetensors"))


def test_inspect_trainer_checkpoint_infers_its_mesh(saved):
    found = {name: api.inspect(saved / name).mesh for name in ("nested", "app", "fsdp-tp", "hf-sharded")}
    assert {name: mesh and mesh.axes for name, mesh in found.items()} == {
        "nested": (("dp_shard", 4),),
        "app": (("dp_replicate", 2), ("dp_shard", 2)),
        "fsdp-tp": (("dp_shard", 2), ("tp", 2)),
        "hf-sharded": (("dp_shard", 4),),
    }


def test_description_of_trainer_checkpoint_counts_what_torch_counts(saved):
    for name in (*MODELS, *OTHERS):
        metadata = FileSystemReader(saved / name).read_metadata()
        checkpoint = api.open_checkpoint(saved / name)
        assert {e.fqn for e in checkpoint.tensors} | {b.fqn for b in checkpoint.blobs} == set(
            metadata.state_dict_metadata
        )
        for entry in checkpoint.tensors:
            theirs = metadata.state_dict_metadata[entry.fqn]
            assert entry.shape == tuple(theirs.size)
            assert f"torch.{entry.dtype.torch_name}" == str(theirs.properties.dtype)
            boxes = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in theirs.chunks}
            assert {(chunk.box.offsets, chunk.box.sizes) for chunk in entry.chunks} == boxes
            assert replace(entry, chunks=()).num_elems == theirs.size.numel()
