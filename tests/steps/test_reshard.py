"""Reshard of a step gives a whole step: the same state on another mesh, the files beside as they are, or nothing."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from steps.toy_steps import is_equal

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import DestinationExistsError, StorageError, UnreadableError, UsageError
from ckpt_tools.storage.staging import Staging

PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def companions(directory: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(directory).items() if "/" not in name and "ckpt" not in name}


@pytest.mark.parametrize("name", ["accelerate", "trainer", "two"])
@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=3"])
def test_reshard_of_a_step_is_the_same_state_to_pytorch(saved, name, mesh, tmp_path, read_dcp) -> None:
    result = api.reshard(saved / name, tmp_path / "out", mesh=mesh)
    parts = sorted(path.name for path in (saved / name).iterdir() if path.is_dir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == parts
    for part in parts:
        assert is_equal(read_dcp(tmp_path / "out" / part), read_dcp(saved / name / part))
    assert companions(tmp_path / "out") == companions(saved / name)
    assert api.verify(tmp_path / "out").ok
    assert result.num_tensors == 12 * len(parts) // 2
    assert dict(result.files) == {file: len(content) for file, content in contents(tmp_path / "out").items()}
    assert os.listdir(tmp_path) == ["out"]


def test_reshard_there_and_back_checks_the_digests_of_all_parts(saved, tmp_path, read_dcp) -> None:
    api.reshard(saved / "accelerate", tmp_path / "four", mesh="dp_shard=4")
    result = api.reshard(tmp_path / "four", tmp_path / "one", mesh="dp_shard=1")
    assert result.checked["digests"] == 12
    assert api.verify(tmp_path / "one", against=saved / "accelerate").ok


def test_ranks_without_an_rng_state_are_named(saved, tmp_path) -> None:
    notes = api.reshard(saved / "accelerate", tmp_path / "four", mesh="dp_shard=4", dry_run=True).notes
    assert any(note.startswith("random_states_2.pkl: it is missing, as are those of 1 more") for note in notes)
    notes = api.reshard(saved / "accelerate", tmp_path / "two", mesh="dp_shard=2", dry_run=True).notes
    assert not any("missing" in note for note in notes)
    notes = api.reshard(saved / "trainer", tmp_path / "one", mesh="dp_shard=1", dry_run=True).notes
    assert any("rng_state.pth" in note for note in notes)


def test_rules_of_parameters_place_their_optimizer_state(saved, tmp_path) -> None:
    api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2,tp=2", set=["**up.weight=tp:S(1)"])
    placed = {}
    for part in PARTS:
        placed |= api.open_checkpoint(tmp_path / "out" / part).placements or {}
    cut = {fqn for fqn, axes in placed.items() if str(axes.get("tp")) == "S(1)"}
    name = "model.layers.0.up.weight"
    assert cut == {f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"}


def test_rule_that_matches_the_model_alone_is_enough(saved, tmp_path) -> None:
    api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2,tp=2", set=["model.lm_head.weight=tp:S(0)"])
    with pytest.raises(UsageError, match="match"):
        api.reshard(saved / "accelerate", tmp_path / "no", mesh="dp_shard=2,tp=2", set=["nothing=tp:S(0)"])


def test_unknown_files_and_directories_come_along(copy_of, tmp_path) -> None:
    step = copy_of("accelerate")
    (step / "mine").mkdir()
    (step / "mine" / "state.bin").write_bytes(b"mine")
    api.reshard(step, tmp_path / "out", mesh="dp_shard=2")
    assert (tmp_path / "out" / "mine" / "state.bin").read_bytes() == b"mine"
    assert api.verify(tmp_path / "out").findings == ()


@pytest.mark.parametrize(
    "option", [{"prefix": "app."}, {"include": ["model.**"]}, {"exclude": ["**exp_avg"]}], ids=lambda o: next(iter(o))
)
def test_option_that_would_take_a_step_apart_is_refused(saved, tmp_path, option) -> None:
    with pytest.raises(UsageError, match="accelerate's step of 2") as caught:
        api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2", **option)
    assert str(caught.value.hint).startswith(f"choose one: {saved / 'accelerate' / 'pytorch_model_fsdp_0'}")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("damage", ["optimizer_0", "optimizer_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp"])
def test_step_that_is_not_whole_is_refused_and_nothing_is_written(copy_of, damage, tmp_path) -> None:
    step = copy_of("accelerate")
    shutil.rmtree(step / damage) if (step / damage).is_dir() else (step / damage).unlink()
    with pytest.raises(UnreadableError):
        api.reshard(step, tmp_path / "out", mesh="dp_shard=2")
    assert os.listdir(tmp_path) == ["runs"]


def test_pickles_of_each_ranks_part_are_refused(copy_of, tmp_path) -> None:
    step = copy_of("accelerate")
    shutil.rmtree(step / "optimizer_0")
    (step / "optimizer_0_rank0.bin").write_bytes(b"x")
    with pytest.raises(UnreadableError, match="fit no other mesh"):
        api.reshard(step, tmp_path / "out", mesh="dp_shard=2")


def test_file_that_is_a_link_out_of_the_step_is_refused(copy_of, tmp_path) -> None:
    step = copy_of("accelerate")
    (step / "scheduler.bin").rename(tmp_path / "scheduler.bin")
    (step / "scheduler.bin").symlink_to(tmp_path / "scheduler.bin")
    with pytest.raises(UnreadableError, match="leads out"):
        api.reshard(step, tmp_path / "out", mesh="dp_shard=2")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inside", ["new", "pytorch_model_fsdp_0/new", "optimizer_0", "."])
def test_destination_inside_of_the_step_is_refused(copy_of, inside) -> None:
    step = copy_of("accelerate")
    before = contents(step)
    with pytest.raises(UsageError, match="must not contain each other"):
        api.reshard(step, step / inside, mesh="dp_shard=2", overwrite=True)
    assert contents(step) == before


def test_overwrite_replaces_a_step_and_nothing_else(saved, copy_of, tmp_path) -> None:
    old = copy_of("trainer")
    with pytest.raises(DestinationExistsError):
        api.reshard(saved / "accelerate", old, mesh="dp_shard=2")
    api.reshard(saved / "accelerate", old, mesh="dp_shard=2", overwrite=True)
    assert companions(old) == companions(saved / "accelerate")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file.txt").write_text("x")
    with pytest.raises(UsageError, match="not one"):
        api.reshard(saved / "accelerate", tmp_path / "notes", mesh="dp_shard=2", overwrite=True)


def test_dry_run_says_what_is_written_and_writes_nothing(saved, tmp_path) -> None:
    planned = api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2", dry_run=True)
    assert not os.listdir(tmp_path)
    written = api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2")
    assert sorted(name for name, _ in planned.files) == sorted(name for name, _ in written.files)
    assert planned.num_tensors == written.num_tensors


def test_cast_of_a_step_casts_the_model_alone(saved, tmp_path, read_dcp) -> None:
    api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2", dtype="bf16")
    model, optimizer = (read_dcp(tmp_path / "out" / part) for part in PARTS)
    assert model["model"]["lm_head.weight"].dtype == torch.bfloat16
    assert optimizer["optimizer"]["state"]["lm_head.weight"]["exp_avg"].dtype == torch.float32


class Stop:
    """Interrupts when the given part begins to move; or, with `error`, fails there."""

    def __init__(self, part: int, error: BaseException) -> None:
        self.left, self.error = part, error

    def __call__(self, total: int):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return lambda nbytes: None


@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageError])
def test_interrupted_step_is_continued_and_never_half_there(saved, tmp_path, error) -> None:
    with pytest.raises(error) as caught:
        api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2", progress=Stop(1, error("stop")))
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith(".ckpt-tmp-")
    assert sum("the same command continues" in note for note in caught.value.__notes__) == 1
    result = api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2")
    assert "pytorch_model_fsdp_0: already written by an interrupted run, and verified" in result.notes
    api.reshard(saved / "accelerate", tmp_path / "whole", mesh="dp_shard=2")
    ours, theirs = contents(tmp_path / "out"), contents(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours)
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_part_of_an_interrupted_run_that_was_damaged_since_is_written_again(saved, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2", progress=Stop(1, KeyboardInterrupt()))
    (kept,) = tmp_path.iterdir()
    file = kept / "pytorch_model_fsdp_0" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    result = api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2")
    assert not any("already written by an interrupted run" in note for note in result.notes)
    assert api.verify(tmp_path / "out").ok


def test_other_arguments_do_not_continue_it(saved, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2", progress=Stop(1, KeyboardInterrupt()))
    result = api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=3")
    assert any(note.startswith("removed the remains of an interrupted run") for note in result.notes)
    assert api.verify(tmp_path / "out").ok
    assert len(list((tmp_path / "out" / "optimizer_0").glob("*.distcp"))) == 3


def test_what_others_put_into_the_work_of_an_interrupted_run_is_not_published(saved, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2", progress=Stop(1, KeyboardInterrupt()))
    (kept,) = tmp_path.iterdir()
    (kept / "strange").mkdir()
    (kept / "strange" / "file").write_text("x")
    (kept / "stray").write_text("x")
    api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2")
    assert not {"strange", "stray"} & set(os.listdir(tmp_path / "out"))


@pytest.mark.parametrize("file", ["pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"])
def test_source_that_changes_while_the_second_part_is_moved_publishes_nothing(copy_of, file, tmp_path) -> None:
    step = copy_of("accelerate")
    calls = []

    def progress(total: int):
        calls.append(total)
        if len(calls) == 2:
            os.utime(step / file, ns=(1, 1))
        return lambda nbytes: None

    with pytest.raises(Exception, match="changed while it was read"):
        api.reshard(step, tmp_path / "out", mesh="dp_shard=2", progress=progress)
    assert os.listdir(tmp_path) == ["runs"]


def test_publish_that_fails_leaves_no_step(saved, tmp_path, monkeypatch) -> None:
    publish = Staging.publish

    def fail(self: Staging) -> None:
        if self.destination == str(tmp_path / "out"):
            raise StorageError("no")
        publish(self)

    monkeypatch.setattr(Staging, "publish", fail)
    with pytest.raises(StorageError):
        api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    api.reshard(saved / "accelerate", tmp_path / "out", mesh="dp_shard=2")
    assert api.verify(tmp_path / "out").ok


def test_torchtitans_items_come_along_and_its_data_loader_is_told(saved, tmp_path, read_dcp) -> None:
    result = api.reshard(saved / "step-3", tmp_path / "out", mesh="dp_shard=4")
    assert is_equal(read_dcp(tmp_path / "out"), read_dcp(saved / "step-3"))
    assert any('exclude_from_loading = ["dataloader"]' in note for note in result.notes)
    same = api.reshard(saved / "step-3", tmp_path / "same", mesh="dp_replicate=1,dp_shard=2")
    assert not any("exclude_from_loading" in note for note in same.notes)


def test_lightnings_checkpoint_keeps_meta_pt(saved, tmp_path, read_dcp) -> None:
    api.reshard(saved / "last.ckpt", tmp_path / "out.ckpt", mesh="dp_shard=4")
    assert is_equal(read_dcp(tmp_path / "out.ckpt"), read_dcp(saved / "last.ckpt"))
    assert (tmp_path / "out.ckpt" / "meta.pt").read_bytes() == (saved / "last.ckpt" / "meta.pt").read_bytes()


def test_command_prints_notes_of_a_step(saved, tmp_path, capsys) -> None:
    assert main(["reshard", str(saved / "accelerate"), str(tmp_path / "out"), "--mesh", "dp_shard=4"]) == 0
    captured = capsys.readouterr()
    assert "note: whole step: pytorch_model_fsdp_0, optimizer_0; 3 other files are copied unchanged" in captured.err
    assert "one part of a step" not in captured.err
    assert captured.out.startswith("wrote 12 tensors, ")
