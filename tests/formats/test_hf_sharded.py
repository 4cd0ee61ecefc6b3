"""`--serialization safetensors`: what DCP's own HF writer writes, read by torch, by its consolidator and by ckpt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
from safetensors.torch import load_file, save_file
from samples import MODEL, files_of, tensor, without_ranks, write_model
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.fsdp2 import load_checkpoint

MESHES = {
    "dp_shard=1": (),
    "dp_shard=3": (),
    "dp_replicate=2,dp_shard=2": (),
    "dp_shard=2,tp=2": ("model.layers.*.up.weight=tp:S(0)", "model.layers.*.down.weight=tp:S(1)"),
}
FLOATS = {
    "embed.weight": torch.randn(13, 4),
    "layers.0.weight": torch.randn(8, 6).to(torch.bfloat16),
    "layers.0.bias": torch.randn(3),
    'wie heißt "du"': torch.randn(2, 3).to(torch.float16),
}


def sharded(directory: Path, mesh: str = "dp_shard=2", **options) -> Path:
    source = write_model(directory / "model", options.pop("tensors", MODEL))
    api.shard(source, directory / "run", mesh=mesh, serialization="safetensors", num_workers=2, **options)
    return directory / "run"


def bits(value: torch.Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


def torch_reads(directory: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {fqn: torch.ones_like(value) for fqn, value in state.items()}
    with without_ranks():
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_gather_gives_the_files_back_from_any_mesh_and_format(tmp_path: Path, mesh: str) -> None:
    run = sharded(tmp_path, mesh, set=MESHES[mesh])
    result = api.verify(run, level="data")
    assert (result.findings, result.not_checked) == ((), ("whether the values are finite (use --level values)",))
    assert not api.diff(tmp_path / "model", run).changed
    api.gather(run, tmp_path / "back")
    api.reshard(run, tmp_path / "items", mesh="dp_shard=2")
    assert api.open_checkpoint(tmp_path / "items").format == "dcp"
    api.reshard(tmp_path / "items", tmp_path / "again", mesh="dp_shard=4", serialization="safetensors")
    api.gather(tmp_path / "again", tmp_path / "back2")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "back2") == files_of(tmp_path / "model")


@pytest.mark.parametrize("mesh", MESHES)
def test_torch_reads_what_is_written(tmp_path: Path, mesh: str) -> None:
    run = sharded(tmp_path, mesh, set=MESHES[mesh])
    expected = load_file(tmp_path / "model" / "model.safetensors")
    found = torch_reads(run, expected)
    assert {fqn: bits(value) for fqn, value in found.items()} == {fqn: bits(value) for fqn, value in expected.items()}


def test_one_rank_is_byte_for_byte_what_torch_writes(tmp_path: Path) -> None:
    state = FLOATS | {"step": torch.tensor(7), "flags": torch.tensor([True, False]), "none": torch.empty(0, 3)}
    tmp_path.joinpath("model").mkdir()
    save_file(state, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    api.shard(tmp_path / "model", tmp_path / "run", mesh="dp_shard=1", serialization="safetensors")
    stored = [entry.fqn for entry in api.open_checkpoint(tmp_path / "model").tensors]
    with without_ranks():
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "torch"), save_distributed=True)
        dcp.save({fqn: state[fqn] for fqn in stored}, storage_writer=writer, no_dist=True)
    (ours,), (theirs,) = ((tmp_path / name).glob("*.safetensors") for name in ("run", "torch"))
    assert ours.name == theirs.name
    # The strings of the metadata stand in any order in torch's; all else is the same, and so is the length.
    heads = []
    for raw in (ours.read_bytes(), theirs.read_bytes()):
        length = int.from_bytes(raw[:8], "little")
        head = json.loads(raw[8 : 8 + length])
        heads.append((raw[:8], head.pop("__metadata__"), json.dumps(head), raw[8 + length :]))
    assert heads[0] == heads[1]


def test_consolidator_of_torch_gives_the_source_back(tmp_path: Path) -> None:
    tmp_path.joinpath("model").mkdir()
    save_file(FLOATS, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    rules = ["embed.weight=dp_shard:S(1)"]
    api.shard(tmp_path / "model", tmp_path / "run", mesh="dp_shard=4", set=rules, serialization="safetensors")
    tmp_path.joinpath("whole").mkdir()
    consolidate_safetensors_files(str(tmp_path / "run"), str(tmp_path / "whole"), dict.fromkeys(FLOATS, 1))
    whole = load_file(tmp_path / "whole" / "model-00001-of-00001.safetensors")
    assert whole.keys() == FLOATS.keys()
    assert all(torch.equal(whole[fqn], FLOATS[fqn]) for fqn in FLOATS)


def test_what_the_consolidator_loses_is_said(tmp_path: Path) -> None:
    tmp_path.joinpath("model").mkdir()
    save_file({"w": torch.ones(2, 2), "scale": torch.tensor(3.0)}, tmp_path / "model" / "model.safetensors")
    result = api.shard(tmp_path / "model", tmp_path / "run", mesh="dp_shard=2", serialization="safetensors")
    (said,) = [note for note in result.notes if "consolidate" in note]
    assert "scale" in said
    assert "w" not in said.rpartition(":")[2]
    tmp_path.joinpath("whole").mkdir()  # it is still so
    consolidate_safetensors_files(str(tmp_path / "run"), str(tmp_path / "whole"), {"w": 1, "scale": 1})
    assert load_file(tmp_path / "whole" / "model-00001-of-00001.safetensors")["scale"] == 0
    assert torch_reads(tmp_path / "run", {"scale": torch.tensor(0.0)})["scale"] == 3


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0"])
def test_dtype_that_torch_does_not_load_from_safetensors_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(UsageError, match=f"does not load {dtype}"):
        sharded(tmp_path, tensors={"w": tensor(dtype, 4, 4)})
    sharded(tmp_path / "other", tensors={"w": tensor(dtype, 4, 4), "v": tensor("F32", 2)}, exclude=["w"])


@pytest.mark.full
def test_tied_weights_of_a_live_model_have_bytes_for_each_name(tmp_path: Path) -> None:
    model = toys.build("llama", num_hidden_layers=1, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors")
    api.shard(tmp_path / "model", tmp_path / "run", mesh="dp_shard=3", serialization="safetensors")
    assert api.verify(tmp_path / "run", level="data").findings == ()
    state = model.state_dict()
    found = torch_reads(tmp_path / "run", state)
    assert found.keys() == state.keys() >= {"lm_head.weight"}
    assert all(torch.equal(found[fqn], state[fqn]) for fqn in state)
    api.gather(tmp_path / "run", tmp_path / "back")
    api.reshard(tmp_path / "run", tmp_path / "other", mesh="dp_shard=2", serialization="safetensors")
    api.gather(tmp_path / "other", tmp_path / "back2")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "back2") == files_of(tmp_path / "model")


@pytest.mark.full
def test_experts_of_a_live_model_come_back_as_the_hub_has_them(tmp_path: Path) -> None:
    model = toys.build("qwen3-moe", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "model")
    api.shard(tmp_path / "model", tmp_path / "run", mesh="dp_shard=2", serialization="safetensors")
    other = toys.build("qwen3-moe", num_hidden_layers=1, seed=3)
    load_checkpoint(other, tmp_path / "run")
    assert {n: bits(v) for n, v in other.state_dict().items()} == {n: bits(v) for n, v in model.state_dict().items()}
    assert torch_reads(tmp_path / "run", model.state_dict()).keys() == model.state_dict().keys()
    api.gather(tmp_path / "run", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "model")
    (tmp_path / "run" / "ckpt_manifest.json").unlink()  # then the names tell
    api.gather(tmp_path / "run", tmp_path / "bare")
    assert api.diff(tmp_path / "bare", tmp_path / "model").equal


def test_cast_prefix_and_selection_are_as_with_items(tmp_path: Path) -> None:
    options = {"mesh": "dp_shard=2", "dtype": "bf16", "prefix": "net.", "exclude": ["model.step"], "num_workers": 1}
    source = write_model(tmp_path / "model")
    api.shard(source, tmp_path / "run", serialization="safetensors", **options)
    api.shard(source, tmp_path / "items", **options)
    result = api.diff(tmp_path / "items", tmp_path / "run")
    assert result.equal
    assert {entry.fqn.partition(".")[0] for entry in api.open_checkpoint(tmp_path / "run").tensors} == {"net"}


def test_default_writes_items(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    api.shard(source, tmp_path / "run", mesh="dp_shard=2")
    api.shard(source, tmp_path / "same", mesh="dp_shard=2", serialization="torch")
    assert files_of(tmp_path / "run") == files_of(tmp_path / "same")
    assert api.open_checkpoint(tmp_path / "run").format == "dcp"


def test_dry_run_says_the_files_that_are_written(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    options = {"mesh": "dp_shard=3", "serialization": "safetensors"}
    planned = api.shard(source, tmp_path / "run", dry_run=True, **options)
    assert planned.files == api.shard(source, tmp_path / "run", **options).files


# What cannot be


def test_items_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(4, 2)}, "optimizer": {"w": {"exp_avg": torch.ones(4, 2)}}, "epoch": {"n": 3}}
    with without_ranks():
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = {"mesh": "dp_shard=2", "serialization": "safetensors"}
    with pytest.raises(UsageError, match=r"safetensors holds only tensors.*epoch\.n"):
        api.reshard(tmp_path / "dcp", tmp_path / "run", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]
    api.reshard(tmp_path / "dcp", tmp_path / "run", exclude=["epoch.**"], **options)  # tensors are tensors
    assert len(api.open_checkpoint(tmp_path / "run").tensors) == 2
    api.reshard(tmp_path / "dcp", tmp_path / "alone", trainer="plain", **options)
    assert [entry.fqn for entry in api.open_checkpoint(tmp_path / "alone").tensors] == ["w"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--for", "torchtitan"], "--for torchtitan writes what it loads"),
        (["--for", "accelerate"], "--for accelerate writes what it loads"),
        (["--engine", "dtensor"], "--engine dtensor writes only --serialization torch"),
    ],
)
def test_option_that_means_items_is_refused(tmp_path: Path, capsys, options: list[str], what: str) -> None:
    source = write_model(tmp_path / "model")
    command = ["shard", str(source), str(tmp_path / "run"), "--mesh", "dp_shard=2", "--serialization", "safetensors"]
    assert main([*command, *options]) == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_shard_has_written_is_for_reshard(tmp_path: Path) -> None:
    run = sharded(tmp_path)
    with pytest.raises(UsageError, match="already sharded"):
        api.shard(run, tmp_path / "again", mesh="dp_shard=2")


def test_step_of_a_trainer_is_refused_and_its_model_is_taken(tmp_path: Path) -> None:
    step = tmp_path / "step"
    with without_ranks():
        dcp.save({"model": {"w": torch.ones(4, 2)}}, checkpoint_id=step / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"state": {"w": torch.ones(4, 2)}}, checkpoint_id=step / "optimizer_0", no_dist=True)
    options = {"mesh": "dp_shard=2", "serialization": "safetensors"}
    with pytest.raises(UsageError, match="is resumed from --serialization torch"):
        api.reshard(step, tmp_path / "run", **options)
    api.reshard(step, tmp_path / "run", trainer="plain", **options)
    assert torch_reads(tmp_path / "run", {"w": torch.zeros(4, 2)})["w"].eq(1).all()


# What happens to it


def test_lost_file_is_said_even_where_every_tensor_would_only_be_shorter(tmp_path: Path) -> None:
    run = sharded(tmp_path, "dp_shard=2", tensors={"w": tensor("F32", 4, 2), "v": tensor("F32", 6)})
    (run / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(UnreadableError, match="1 of 2 files of the manifest are missing: shard-00002"):
        api.verify(run)
    with pytest.raises(UnreadableError, match="1 of 2 files"):
        api.gather(run, tmp_path / "back")
    (run / "ckpt_manifest.json").unlink()  # without it nobody can know, and that is said
    assert any("global shapes" in text for text in api.verify(run).not_checked)


def test_trainer_that_saves_over_it_is_noticed(tmp_path: Path) -> None:
    run = sharded(tmp_path, "dp_shard=2", tensors={"w": tensor("F32", 4, 2)})
    assert api.inspect(run).mesh is not None
    with without_ranks():  # one rank: the second file stays behind
        writer = dcp.HuggingFaceStorageWriter(str(run), save_distributed=True)
        dcp.save({"w": torch.zeros(4, 2)}, storage_writer=writer, no_dist=True)
    assert api.open_checkpoint(run).mesh is None
    codes = {finding.code for finding in api.verify(run, level="structure").findings}
    assert {"overlapping-chunks", "changed-document"} <= codes
    with pytest.raises(UnreadableError, match="inconsistent"):
        api.gather(run, tmp_path / "back")
    (run / "ckpt_manifest.json").unlink()
    assert "overlapping-chunks" in {finding.code for finding in api.verify(run, level="structure").findings}


def test_files_of_two_saves_that_have_the_same_part_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with without_ranks():
        writer = dcp.HuggingFaceStorageWriter(str(run), save_distributed=True)
        dcp.save({"w": torch.zeros(4, 2)}, storage_writer=writer, no_dist=True)
    older = run / "shard-00002-model-00001-of-00001.safetensors"
    shutil.copy(run / "shard-00001-model-00001-of-00001.safetensors", older)
    with pytest.raises(UnreadableError, match="is in two files of different saves"):
        api.verify(run)
    older.unlink()
    assert api.verify(run).ok
