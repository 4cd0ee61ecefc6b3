"""Verify of a step: every part, what resuming needs, and what lies beside."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from steps.toy_steps import save_accelerate

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checks.verify import Verification
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError


def codes(result: Verification) -> list[str]:
    return [finding.code for finding in result.findings]


def flip(path: Path, offset: int = -40) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.fixture
def written(saved, tmp_path) -> Path:
    """A step as `reshard` writes it."""
    api.reshard(saved / "accelerate", tmp_path / "written", mesh="dp_shard=2")
    return tmp_path / "written"


@pytest.mark.parametrize("name", ["accelerate", "trainer", "two"])
def test_verify_of_a_step_reads_all_parts_and_says_what_nothing_records(saved, name) -> None:
    result = api.verify(saved / name)
    assert result.findings == ()
    assert result.tensors == (3 + 9) * (2 if name == "two" else 1)
    assert {each.file for each in result.not_read} <= {
        "trainer_state.json"
    }  # what torch.save writes has its own CRC-32s
    result = api.verify(saved / name, level="structure")
    companions = [each.file for each in result.not_read if each.why == "nothing records what it should hold"]
    assert any("scheduler" in file for file in companions)
    assert any("_1.p" in file for file in companions)


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_flipped_byte_of_a_part_is_found_in_it(copy_of, part) -> None:
    step = copy_of("accelerate")
    with open_path(str(step / part)) as opened:
        span = opened.resolve(opened.checkpoint.tensors[1]).chunks[0].span
    flip(step / part / span.file, span.offset + 3)
    result = api.verify(step)
    assert codes(result) == ["damaged-data"]
    assert result.findings[0].where.startswith(f"{part}/__0_0.distcp")
    assert not any("without a recorded checksum" in text for text in result.not_checked)


def test_truncated_file_of_a_part_is_found_in_it(copy_of, capsys) -> None:
    step = copy_of("accelerate")
    file = step / "optimizer_0" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["verify", "--level", "structure", str(step)]) == 3
    assert "error: short-file: optimizer_0/__0_0.distcp" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_missing_part_of_a_step_that_was_trained_is_an_error(copy_of, part) -> None:
    step = copy_of("accelerate")
    shutil.rmtree(step / part)
    result = api.verify(step)
    assert codes(result) == ["not-resumable"]
    assert result.findings[0].where == part
    lost = ["lost-weights"] if part == "pytorch_model_fsdp_0" else []
    assert codes(api.verify(step, purpose="weights")) == lost


def test_second_model_that_is_cut_is_lost_weights(tmp_path) -> None:
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(one, other, torch.optim.AdamW(one.parameters()))
    accelerator.save_state(str(tmp_path / "step"))
    assert codes(api.verify(tmp_path / "step", purpose="weights")) == ["unreferenced-file"]
    os.truncate(tmp_path / "step" / "model_1.safetensors", 40)
    assert "lost-weights" in codes(api.verify(tmp_path / "step", purpose="weights"))


def test_second_optimizer_that_is_missing_is_told(copy_of) -> None:
    step = copy_of("two")
    shutil.rmtree(step / "optimizer_1")
    assert [finding.where for finding in api.verify(step).findings] == ["optimizer_1"]


@pytest.mark.parametrize("damage", [b"", b"x"])
def test_part_that_cannot_be_described_is_an_error_and_the_others_are_checked(copy_of, damage) -> None:
    step = copy_of("accelerate")
    metadata = step / "optimizer_0" / ".metadata"
    metadata.write_bytes(damage) if damage else metadata.unlink()
    result = api.verify(step)
    assert codes(result) == ["unreadable-part"]
    assert result.tensors == 3


def test_step_of_which_no_part_is_readable_is_refused(copy_of) -> None:
    step = copy_of("accelerate")
    for part in ("optimizer_0", "pytorch_model_fsdp_0"):
        (step / part / ".metadata").unlink()
    with pytest.raises(UnreadableError, match="killed before it finished"):
        api.verify(step)


def test_optimizer_in_pickles_beside_the_model_is_not_missing(copy_of) -> None:
    step = copy_of("accelerate")
    shutil.rmtree(step / "optimizer_0")
    for rank in range(2):
        torch.save({"state": {}}, step / f"optimizer_0_rank{rank}.bin")
    assert api.verify(step).findings == ()


def test_part_with_another_spelling_of_its_number_is_none(copy_of) -> None:
    step = copy_of("accelerate")
    (step / "optimizer_0").rename(step / "optimizer_00")
    assert [finding.where for finding in api.verify(step).findings] == ["optimizer_0"]


@pytest.mark.parametrize(("name", "lacks"), [("last.ckpt", "meta.pt"), ("step-3", "optimizer")])
def test_what_other_trainers_resume_from_is_told_when_it_is_missing(copy_of, name, lacks, tmp_path) -> None:
    checkpoint = copy_of(name)
    if lacks == "meta.pt":
        (checkpoint / lacks).unlink()
    else:
        api.reshard(checkpoint, tmp_path / "less", mesh="dp_shard=1", exclude=["optimizer**"])
        checkpoint = tmp_path / "less"
    assert [(finding.code, finding.where) for finding in api.verify(checkpoint).findings] == [("not-resumable", lacks)]
    assert api.verify(tmp_path / "runs" / "step-3").findings == () if name == "step-3" else True
    with pytest.raises(UnreadableError, match="stops with an error on resuming"):
        api.reshard(checkpoint, tmp_path / "out", mesh="dp_shard=2")
    api.reshard(checkpoint, tmp_path / "out", mesh="dp_shard=2", trainer="plain")  # as the hint says


def test_what_is_hidden_or_no_file_is_unchecked_and_left_out_and_deep_ones_come_along(copy_of, tmp_path) -> None:
    step = copy_of("accelerate")
    for directory in (step / ".cache" / "x", step / "a/b/c/d/e"):
        directory.mkdir(parents=True)
        (directory / "file").write_text("x")
    (step / "lost.bin").symlink_to(tmp_path / "nowhere")
    os.mkfifo(step / "a" / "pipe")
    strange = ".cache, a/pipe, lost.bin"
    assert f"hidden directories, links and special files: {strange}" in api.verify(step).not_checked
    result = api.reshard(step, tmp_path / "out", mesh="dp_shard=2")
    assert f"left out (hidden directories, links, special files): {strange}" in result.notes
    assert (tmp_path / "out/a/b/c/d/e/file").exists()
    assert api.verify(tmp_path / "out", level="values").not_checked == ()


def test_missing_rng_state_is_told(written) -> None:
    (written / "ckpt_manifest.json").unlink()
    (written / "random_states_1.pkl").unlink()
    (finding,) = api.verify(written).findings
    assert (finding.code, finding.severity) == ("may-not-resume", "warning")
    assert finding.where == "random_states_1.pkl"


def test_verify_of_a_written_step_leaves_nothing_unchecked(written) -> None:
    result = api.verify(written, level="values")
    assert result.findings == ()
    assert result.not_checked == ()


def test_changed_file_beside_the_parts_is_found(written) -> None:
    flip(written / "scheduler.bin", 75)
    (finding,) = api.verify(written).findings
    assert (finding.code, finding.where) == ("digest-mismatch", "scheduler.bin")
    assert api.verify(written, level="structure").findings == ()


def test_part_of_another_step_is_found(written, tmp_path) -> None:
    other = save_accelerate(tmp_path / "other", seed=7)
    api.reshard(other, tmp_path / "theirs", mesh="dp_shard=2")
    shutil.rmtree(written / "optimizer_0")
    shutil.copytree(tmp_path / "theirs" / "optimizer_0", written / "optimizer_0")
    found = api.verify(written, level="structure").findings
    assert {finding.code for finding in found} == {"changed-document"}
    assert {finding.where.partition("/")[0] for finding in found} == {"optimizer_0"}


def test_part_that_came_later_is_found(written) -> None:
    shutil.copytree(written / "optimizer_0", written / "optimizer_1")
    assert "manifest-mismatch" in codes(api.verify(written))


def test_damaged_manifest_of_a_step_is_not_believed(written) -> None:
    flip(written / "ckpt_manifest.json", 60)
    with pytest.raises(UnreadableError, match="manifest is damaged"):
        api.verify(written)


def test_against_a_copy_compares_every_part(saved, written) -> None:
    assert api.verify(saved / "accelerate", against=written).ok
    result = api.verify(written, against=saved / "accelerate")
    assert result.ok


def test_against_another_step_names_the_part_that_differs(saved, tmp_path) -> None:
    other = save_accelerate(tmp_path / "other", seed=7)
    shutil.rmtree(other / "pytorch_model_fsdp_0")
    shutil.copytree(saved / "accelerate" / "pytorch_model_fsdp_0", other / "pytorch_model_fsdp_0")
    found = api.verify(saved / "accelerate", against=other).findings
    assert {finding.code for finding in found} == {"different-tensor"}
    assert all(finding.where == f"{other} (optimizer_0)" for finding in found)


def test_against_a_model_leaves_the_optimizer_unchecked(saved, tmp_path) -> None:
    api.gather(saved / "accelerate", tmp_path / "model")
    step = tmp_path / "step"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):  # files of equal layout in both
        source = saved / "accelerate" / part
        left_out = ["**step", "optimizer.param_groups**"] if part == "optimizer_0" else []
        api.reshard(source, step / part, mesh="dp_shard=2", exclude=left_out)
        (step / part / "ckpt_manifest.json").unlink()
    alone = [text.partition(":")[0] for text in api.verify(step, level="values", purpose="weights").not_checked]
    result = api.verify(step, level="values", against=tmp_path / "model", purpose="weights")
    assert result.ok
    assert alone == ["pytorch_model_fsdp_0", "optimizer_0"]
    assert [text.partition(":")[0] for text in result.not_checked] == ["optimizer_0"]


def test_against_one_model_of_two_asks_which(saved) -> None:
    with pytest.raises(UsageError, match="the reference has"):
        api.verify(saved / "two", against=saved / "accelerate" / "pytorch_model_fsdp_0")


def test_part_of_an_absurd_number_is_no_flood_of_findings(copy_of) -> None:
    step = copy_of("accelerate")
    (step / "optimizer_0").rename(step / "optimizer_999999")
    assert codes(api.verify(step)).count("missing-part") <= 3
