"""What reads takes a step's directory: its model is read, and what is not read is said."""

import json
import os
import shutil

import pytest
from safetensors.torch import load_file
from steps.toy_steps import state_of

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError


@pytest.mark.parametrize(
    ("name", "companions"),
    [
        ("accelerate", ["random_states_*.pkl (2 files)", "scheduler.bin"]),
        ("trainer", ["rng_state_*.pth (2 files)", "scheduler.pt", "trainer_state.json"]),
    ],
)
def test_inspect_of_a_step_shows_its_model_and_lists_the_rest(saved, name, companions, capsys) -> None:
    summary = api.inspect(saved / name)
    assert [entry.fqn for entry in summary.tensors] == [f"model.{fqn}" for fqn in state_of(0)]
    assert [row.name for row in summary.contents] == ["pytorch_model_fsdp_0", "optimizer_0", *companions]
    assert all(row.num_bytes and row.what for row in summary.contents if row.name != "trainer_state.json")
    assert main(["inspect", str(saved / name)]) == 0
    out = capsys.readouterr().out
    assert "part      pytorch_model_fsdp_0 of the step" in out
    assert "optimizer_0" in out


def test_inspect_json_of_a_step_has_its_contents(saved, capsys) -> None:
    assert main(["inspect", str(saved / "accelerate"), "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)["contents"]
    assert contents[1]["what"] == "the optimizer's state"
    assert contents[1]["nbytes"] == sum(file.stat().st_size for file in (saved / "accelerate/optimizer_0").iterdir())


def test_inspect_of_a_strange_file_says_that_it_is_not_known(copy_of, capsys) -> None:
    step = copy_of("accelerate")
    (step / "notes.xyz").write_text("x")
    assert main(["inspect", str(step)]) == 0
    assert "notes.xyz" in (out := capsys.readouterr().out)
    assert "not known" in out


@pytest.mark.parametrize("name", ["accelerate", "trainer", "last.ckpt"])
def test_gather_of_a_step_gives_the_models_tensors_under_its_names(saved, name, tmp_path) -> None:
    result = api.gather(saved / name, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {fqn: tensor.tolist() for fqn, tensor in tensors.items()} == {
        fqn: tensor.tolist() for fqn, tensor in state_of(0).items()
    }
    if name != "last.ckpt":
        assert any(note.startswith("reads pytorch_model_fsdp_0 of ") and "optimizer_0" in note for note in result.notes)


def test_gather_of_a_step_takes_the_config_beside_its_parts(copy_of, tmp_path) -> None:
    step = copy_of("trainer")
    (step / "config.json").write_text('{"model_type": "toy"}')
    (step / "pytorch_model_fsdp_0" / "tokenizer.json").write_text("{}")
    result = api.gather(step, tmp_path / "out")
    assert {"config.json", "tokenizer.json"} < {path.name for path in (tmp_path / "out").iterdir()}
    assert not any("config.json" in note for note in result.notes)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "other"}')
    result = api.gather(step, tmp_path / "of-other", assets=tmp_path / "other")
    assert "toy" in (tmp_path / "of-other" / "config.json").read_text()
    assert any(note.startswith("config.json: the step's own; that of --assets") for note in result.notes)


def test_gather_from_inside_of_a_step_reads_its_model(saved, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(saved / "accelerate")
    assert api.gather(".", tmp_path / "out").num_tensors == len(state_of(0))


def test_format_dcp_of_a_step_means_its_parts(saved) -> None:
    assert len(api.open_checkpoint(saved / "accelerate", format="dcp").tensors) == len(state_of(0))


def test_diff_of_a_step_says_what_was_not_compared(saved, tmp_path, capsys) -> None:
    api.gather(saved / "accelerate", tmp_path / "out")
    assert main(["diff", str(saved / "accelerate"), str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert captured.out == "equal\n"
    assert "accelerate: reads pytorch_model_fsdp_0 of accelerate's step, and not optimizer_0" in captured.err


def test_safetensors_beside_the_parts_do_not_hide_them(copy_of, tmp_path) -> None:
    step = copy_of("accelerate")
    (step / "adapter_model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    result = api.gather(step, tmp_path / "out")
    assert result.num_tensors == len(state_of(0))
    assert any("adapter_model.safetensors" in note for note in result.notes)


def test_step_of_two_models_asks_which(saved) -> None:
    with pytest.raises(UsageError, match="step of 2 models") as caught:
        api.inspect(saved / "two")
    assert str(caught.value.hint) == f"name one: {saved / 'two' / 'pytorch_model_fsdp_0'}"
    assert api.inspect(saved / "two" / "pytorch_model_fsdp_1").num_tensors == len(state_of(0))


def test_step_without_its_model_is_refused(copy_of) -> None:
    step = copy_of("accelerate")
    shutil.rmtree(step / "pytorch_model_fsdp_0")
    with pytest.raises(UnreadableError, match="without its model"):
        api.inspect(step)


def test_step_whose_model_was_not_saved_to_the_end_is_refused(copy_of) -> None:
    step = copy_of("accelerate")
    (step / "pytorch_model_fsdp_0" / ".metadata").unlink()
    with pytest.raises(UnreadableError, match="killed before it finished") as caught:
        api.inspect(step)
    assert caught.value.where == str(step / "pytorch_model_fsdp_0")


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0", "more"])
@pytest.mark.parametrize("command", [api.inspect, api.verify])
def test_directory_that_is_a_link_is_refused_not_passed_over(copy_of, tmp_path, part, command) -> None:
    step = copy_of("accelerate")
    (step / "more").mkdir()
    (step / part).rename(tmp_path / "elsewhere")
    (step / part).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnreadableError, match="symbolic link"):
        command(step)


def test_step_that_is_a_link_is_read(saved, tmp_path) -> None:
    (tmp_path / "latest").symlink_to(saved / "accelerate")
    assert api.inspect(tmp_path / "latest").contents
    assert api.verify(tmp_path / "latest").ok


def test_directory_of_steps_names_the_last(saved, tmp_path) -> None:
    for number in (9, 10):
        shutil.copytree(saved / "accelerate", tmp_path / f"checkpoint_{number}")
    with pytest.raises(UnreadableError) as caught:
        api.inspect(tmp_path)
    assert caught.value.hint == f"use {tmp_path / 'checkpoint_10'}"


def test_file_of_a_whole_model_that_is_none_is_refused(tmp_path) -> None:
    for name in ("pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin"):
        (tmp_path / name).write_bytes(os.urandom(8))
    with pytest.raises(UnreadableError, match="and not one that torch"):
        api.inspect(tmp_path)
