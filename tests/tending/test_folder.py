"""prune and watch on real folders: what is removed, what never is, and what is said."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
from tending.runs import flip, save_step, write_state

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, StorageError, UnreadableError, UsageError
from ckpt_tools.runs import assess, manage
from ckpt_tools.runs.disk_folder import DiskFolder
from ckpt_tools.runs.folder import TRASH_PREFIX, BusyError
from ckpt_tools.runs.manage import RunManager, Settings
from ckpt_tools.runs.retention import Rules
from ckpt_tools.storage.claim import staging_path
from ckpt_tools.storage.run_leases import RECORD_NAME, leased

QUICK = [
    "test_prune_removes_what_is_superseded",
    "test_bad_checkpoint_is_a_finding_and_removes_nothing",
    # the guards of what is removed
    "test_unverified_one_that_changes_stays",
    "test_unverified_one_that_has_just_changed_stays",
    "test_what_loses_its_successor_at_the_last_moment_stays",
    "test_checkpoint_in_use_stays",
    "test_run_that_went_back_to_an_earlier_step_keeps_what_it_saves",
    "test_what_changes_after_it_was_judged_stays",
    "test_what_has_lost_its_successor_stays",
    "test_removal_is_taken_back_when_somebody_has_come_in_between",
    "test_what_changes_while_it_is_verified_is_not_verified",
    "test_removal_is_durable_before_it_is_told",
    "test_one_ckpt_tends_a_folder_at_a_time",
    "test_leftovers_stay_where_nothing_is_verified",
    "test_nothing_goes_while_what_follows_it_has_not_arrived",
    "test_checkpoint_that_was_changed_counts_as_not_verified",
    "test_model_without_the_optimizer_of_its_predecessors_is_not_whole",
    "test_links_and_pointers_keep_what_they_name",
]
pytestmark = pytest.mark.full(but=QUICK)


def watch(run, **options):
    return api.watch(run, once=True, settle=0, **options)


def names(run):
    return sorted(each for each in os.listdir(run) if not each.startswith(".") and each != "latest-good")


def reason_of(pruned, name):
    return next(each.reason for each in pruned.checkpoints if each.name == name)


def state_of(pruned, name):
    return next(each.state for each in pruned.checkpoints if each.name == name)


def test_prune_removes_what_is_superseded(run):
    assert watch(run).verified == ("step-10", "step-20", "step-30")
    planned = api.prune(run, keep_last=2, dry_run=True)
    assert planned.removed == ("step-10",)
    assert planned.freed_bytes == sum(file.stat().st_size for file in (run / "step-10").iterdir())
    assert names(run) == ["step-10", "step-20", "step-30"]
    assert api.prune(run, keep_last=2).removed == ("step-10",)
    assert names(run) == ["step-20", "step-30"]
    assert sorted(each for each in os.listdir(run) if not each.startswith(TRASH_PREFIX)) == [
        RECORD_NAME, ".ckpt-tend.lock", ".ckpt-tend.part", "latest-good", "step-20", "step-30"
    ]  # fmt: skip
    assert os.readlink(run / "latest-good") == "step-30"


def test_prune_removes_nothing_that_nobody_has_verified(run):
    assert api.prune(run, keep_last=1).removed == ()
    (run / RECORD_NAME).write_bytes(b"not a record")
    assert api.prune(run, keep_last=1).removed == ()


@pytest.mark.parametrize("change", ["touch", "grow", "add", "metadata"])
def test_checkpoint_that_was_changed_counts_as_not_verified(run, change):
    watch(run)
    file = run / "step-30" / "__0_0.distcp"
    status = file.stat()
    if change == "touch":
        os.utime(file, (1, 1))
    elif change == "grow":
        file.write_bytes(file.read_bytes() + b"x")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "add":
        (run / "step-30" / "more.bin").write_bytes(b"x")
    else:
        metadata = run / "step-30" / ".metadata"
        status = metadata.stat()
        metadata.write_bytes(metadata.read_bytes()[::-1])
        os.utime(metadata, ns=(status.st_atime_ns, status.st_mtime_ns))
    pruned = api.prune(run, keep_last=1)
    assert pruned.removed == ("step-10",)  # step-20 is the last verified one now
    assert state_of(pruned, "step-30") != "verified"


def test_bad_checkpoint_is_a_finding_and_removes_nothing(run, capsys):
    flip(run / "step-30" / "__0_0.distcp")
    assert main(["watch", str(run), "--once", "--settle", "0", "--keep-last", "1", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["removed"] == ["step-10"]
    assert {each["name"]: each["state"] for each in document["checkpoints"]}["step-30"] == "bad"
    assert document["findings"][0]["where"].startswith("step-30/")
    assert names(run) == ["step-20", "step-30"]
    assert main(["watch", str(run), "--once", "--settle", "0", "-q"]) == 3  # every time, until it is gone
    assert "bad-checkpoint" in capsys.readouterr().out


def content_of(run):
    return {str(path): path.lstat().st_mtime_ns for path in [run, *run.rglob("*")]}


def test_status_writes_nothing_and_says_what_goes_when(run, template, tmp_path, capsys, monkeypatch):
    command = ["watch", str(run), "--status", "--keep-last", "2", "--json"]
    assert content_of(run) == (main(command), content_of(run))[1]
    flip(run / "step-20" / "__0_0.distcp")
    assert main(["watch", str(run), "--once", "--settle", "0"]) == 3
    save_step(run, 40, template=template)
    monkeypatch.setattr(RunManager, "_read", lambda *_: pytest.fail("a tensor was read"))
    before = content_of(run)
    with used(run / "step-10", "open"):
        capsys.readouterr()
        assert main([*command, "--html", str(tmp_path / "page.html")]) == 3  # as --once has ended
    assert content_of(run) == before
    rows = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert [each["state"] for each in rows.values()] == ["verified", "bad", "verified", "complete"]
    assert rows["step-10"]["used_by"].startswith("process ")
    assert rows["step-20"]["goes_when"] == "with --unverified step-20"
    assert rows["step-30"]["kept_by"] == ["--keep-last 2"]
    assert rows["step-30"]["goes_when"] == "when 2 later ones are verified"
    assert "with --unverified step-20" in (tmp_path / "page.html").read_text()
    assert main(["watch", str(run), "--html", str(tmp_path / "page.html")]) == 2
    monkeypatch.undo()
    assert list(watch(run, keep_last=1).quarantine) == ["step-10", "step-30"]


def test_half_written_checkpoints_stay(run, template):
    for step in (40, 50, 60):
        save_step(run, step, template=template)
    (run / "step-40" / ".metadata").unlink()
    (run / "step-50" / ".metadata").rename(run / "step-50" / ".metadata.tmp")
    shutil.rmtree(run / "step-60")
    (run / "step-60").mkdir()
    pruned = watch(run, keep_last=1)
    states = [state_of(pruned, f"step-{step}") for step in (30, 40, 50, 60)]
    assert states == ["verified", "incomplete", "changing", "incomplete"]
    assert names(run) == ["step-30", "step-40", "step-50", "step-60"]
    assert {each.severity for each in pruned.findings} == {"error"}  # nothing changes any more
    assert {each.severity for each in api.watch(run, once=True, settle=0.3).findings} == {"error"}
    one = RunManager(DiskFolder(str(run)), Settings(quiet_s=60)).once(wait=False)
    assert one.ok
    assert {each.severity for each in one.findings} == {"warning"}


def test_checkpoint_that_was_verified_and_cannot_be_read_is_an_error(run):
    watch(run)
    (run / "step-30" / ".metadata").unlink()
    pruned = watch(run, keep_last=1)
    assert [(each.code, each.severity) for each in pruned.findings] == [("incomplete-checkpoint", "error")]
    assert names(run) == ["step-20", "step-30"]


def test_model_without_the_optimizer_of_its_predecessors_is_not_whole(tmp_path):
    """The Trainer was killed between the model and the optimizer: it is readable, and nothing resumes from it."""
    from steps import toy_steps

    run = tmp_path / "run"
    for step in (1, 2):
        toy_steps.save_trainer(run / f"checkpoint-{step}", step=step)
    for name in ("optimizer_0", "scheduler.pt", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"):
        path = run / "checkpoint-2" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pruned = watch(run, keep_last=1)
    assert pruned.verified == ("checkpoint-1",)
    assert state_of(pruned, "checkpoint-2") == "incomplete"
    assert names(run) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_damaged_optimizer_beside_a_good_model_is_no_verified_checkpoint(tmp_path, damage):
    import torch
    from safetensors.torch import save_file

    run = tmp_path / "run"
    for step in (1, 2):
        path = run / f"checkpoint-{step}"
        path.mkdir(parents=True)
        save_file({"w": torch.ones(4)}, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text("{}")
        torch.save({"state": {0: {"exp_avg": torch.arange(8.0)}}}, path / "optimizer.pt")
        for companions in ("scheduler.pt", "rng_state.pth"):
            torch.save({"last_epoch": step}, path / companions)
        write_state(path, step)
    file = run / "checkpoint-2" / "optimizer.pt"
    content = file.read_bytes()
    at = content.index(torch.arange(8.0).numpy().tobytes()) + 5
    damaged = content[:at] + b"\xff" + content[at + 1 :]
    file.write_bytes({"empty": b"", "cut": content[:-30], "flipped": damaged}[damage])
    pruned = watch(run, keep_last=1)
    assert state_of(pruned, "checkpoint-2") == ("bad" if damage == "flipped" else "incomplete")
    assert state_of(pruned, "checkpoint-1") == "verified"
    assert names(run) == ["checkpoint-1", "checkpoint-2"]


def test_unverified_one_goes_by_its_name_alone(run):
    flip(run / "step-20" / "__0_0.distcp")
    watch(run)
    assert api.prune(run, unverified=["step-20"], settle=0).removed == ("step-20",)
    assert names(run) == ["step-10", "step-30"]
    with pytest.raises(UsageError, match="no checkpoint is named"):
        api.prune(run, unverified=["step-20"], settle=0)


def test_unverified_one_that_changes_stays(run, capsys):
    flip(run / "step-20" / "__0_0.distcp")
    watch(run)
    writer = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.02)",
         str(run / "step-20" / "__0_0.distcp")]
    )  # fmt: skip
    try:
        assert main(["prune", str(run), "--unverified", "step-20", "--settle", "0.3"]) == 1
    finally:
        writer.kill()
        writer.wait()
    assert "step-20 is kept: " in capsys.readouterr().err
    assert "step-20" in names(run)


def test_last_verified_one_stays_even_by_its_name(run, capsys):
    watch(run)
    assert main(["prune", str(run), "--unverified", "step-30"]) == 1
    assert "the last verified one" in capsys.readouterr().err
    assert len(names(run)) == 3


def test_unknown_names_are_not_touched(run):
    (run / "samples").mkdir()
    (run / "checkpoint-5.bak").mkdir()
    (run / "notes.txt").write_text("x")
    assert set(watch(run, keep_last=1).unknown) == {"samples", "checkpoint-5.bak", "notes.txt"}
    assert names(run) == ["checkpoint-5.bak", "notes.txt", "samples", "step-30"]


def test_links_and_pointers_keep_what_they_name(run, template):
    outside = run.parent / "elsewhere"
    save_step(run.parent, 1, template=template, prefix="elsewhere-")
    (run.parent / "elsewhere-1").rename(outside)
    (run / "step-5").symlink_to(outside)
    save_step(run, 15, template=template)
    (run / "best").symlink_to("step-10")
    (run / "latest").write_text("step-15\n")
    (run / "step-30" / "shared").symlink_to("../step-20/__0_0.distcp")
    pruned = watch(run, keep_last=1)
    assert pruned.removed == ()
    assert reason_of(pruned, "step-10") == "the link best points to it"
    assert reason_of(pruned, "step-15") == "latest names it"
    assert reason_of(pruned, "step-20") == "the link step-30/shared points to it"
    assert (outside / ".metadata").exists()
    assert (run / "step-5").is_symlink()
    (run / "latest").unlink()
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    (run / "step-30" / "shared").unlink()
    (run / "best").unlink()
    assert watch(run, keep_last=1).removed == ("step-10", "step-15")


def test_removing_follows_no_link(run):
    victim = run.parent / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    (run / "step-10" / "out").symlink_to(victim)
    (run / "step-10" / "file").symlink_to(victim / "precious")
    watch(run)
    assert api.prune(run, keep_last=1).removed == ("step-10", "step-20")
    assert (victim / "precious").read_text() == "x"


@contextlib.contextmanager
def used(path, how):
    """Use a checkpoint as a process does that reads it, has mapped a file of it (and closed it), or writes it."""
    if how == "staged":  # by a ckpt on another machine
        os.mkdir(staging_path(str(path)))
        yield
        os.rmdir(staging_path(str(path)))
        return
    if how == "locked":
        held = os.open(path, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
        os.close(held)
        return
    with open(path / "__0_0.distcp", "rb") as stream:
        if how == "open":
            yield
            return
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        at = libc.mmap(None, ctypes.c_size_t(4096), 1, 2, stream.fileno(), ctypes.c_long(0))  # PROT_READ, MAP_PRIVATE
    yield
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(4096))


@pytest.mark.full(but=["open", "locked"])
@pytest.mark.parametrize("how", ["open", "mapped", "locked", "staged"])
def test_checkpoint_in_use_stays(run, how):
    watch(run)
    with used(run / "step-10", how):
        pruned = api.prune(run, keep_last=1)
    assert pruned.removed == ("step-20",)
    user = "process " if how in ("open", "mapped") else "a ckpt process that is writing it"
    assert reason_of(pruned, "step-10").startswith(f"in use by {user}")
    assert api.prune(run, keep_last=1).removed == ("step-10",)


@pytest.mark.parametrize("how", ["gather", "reshard", "export_lora", "push", "load"])
def test_reader_holds_its_checkpoint_by_a_lease_until_it_has_ended(run, how, tmp_path, monkeypatch):
    import torch

    from ckpt_tools.fsdp2 import load_checkpoint

    watch(run)
    unlink, path, out, seen = os.unlink, run / "step-10", tmp_path / "out", []

    def end(file):
        if ".ckpt-lease" in str(file):
            found = next(each for each in api.watch(run, status=True).checkpoints if each.name == "step-10")
            seen.append((found.used_by, out.exists()))
        unlink(file)

    monkeypatch.setattr(os, "unlink", end)
    with contextlib.suppress(CkptError):  # it is no adapter, and no model for the hub
        if how == "load":
            load_checkpoint(torch.nn.Linear(1, 1), path, strict=False)
        else:
            options = {"reshard": {"mesh": "dp_shard=2"}}.get(how, {})
            getattr(api, how)(path, "me/x" if how == "push" else out, **options)
    assert seen == [(f"{socket.gethostname()}:{os.getpid()}, by a lease", how in ("gather", "reshard"))]
    assert not [name for name in os.listdir(run) if "lease" in name]


def test_lease_of_a_process_that_is_gone_ends_by_itself_and_none_stops_a_reader(run, monkeypatch):
    watch(run)
    code = "import sys\nfrom ckpt_tools.storage import run_leases\nrun_leases.LEASE_S = -1.0\n"
    code += "with run_leases.leased(sys.argv[1]):\n    print(flush=True)\n    input()"
    command = [sys.executable, "-c", code, str(run / "step-10")]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    reader.stdout.readline()
    assert reason_of(api.prune(run, keep_last=2), "step-10").endswith(f":{reader.pid}, by a lease")
    reader.kill()
    reader.communicate()
    assert [name for name in os.listdir(run) if "lease" in name]
    monkeypatch.setattr("json.dump", lambda *_: (_ for _ in ()).throw(OSError))
    with leased(run / "step-20" / "__0_0.distcp"):
        assert len([name for name in os.listdir(run) if "lease" in name]) == 2
    monkeypatch.undo()
    assert api.prune(run, keep_last=2).removed == ("step-10",)


def test_best_ones_stay_and_so_does_what_the_trainer_calls_best(tmp_path, template):
    run = tmp_path / "run"
    losses = {1: 0.9, 2: 0.1, 3: 0.3, 4: 0.2, 5: 0.8}
    for step, loss in losses.items():
        best = f"elsewhere/checkpoint-{min(1, step)}"
        write_state(save_step(run, step, template=template, prefix="checkpoint-"), step, best=best, eval_loss=loss)
    pruned = watch(run, keep_best=2)
    assert pruned.removed == ("checkpoint-3",)
    assert reason_of(pruned, "checkpoint-1") == "trainer_state.json names it as the best"
    assert reason_of(pruned, "checkpoint-2") == "--keep-best 2: eval_loss 0.1"
    with pytest.raises(UsageError, match="no checkpoint has a eval_f1"):
        api.prune(run, keep_best=1, metric="eval_f1")
    assert reason_of(watch(run, keep_best=1, metric="eval_f1"), "checkpoint-4") == "no checkpoint here has a eval_f1"


def test_files_of_lightning_and_ai_toolkit(tmp_path):
    import torch
    from safetensors.torch import save_file

    run = tmp_path / "run"
    run.mkdir()
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.4)):
        torch.save({"state_dict": {"w": torch.ones(2)}}, run / f"epoch=0-step={step}-val_loss={loss}.ckpt")
        for part in ("high_noise", "low_noise"):
            save_file({"w": torch.ones(2)}, run / f"wan_{step:09d}_{part}.safetensors")
    shutil.copy(run / "epoch=0-step=30-val_loss=0.4.ckpt", run / "last.ckpt")
    assert watch(run, keep_best=1, metric="val_loss").removed == ("epoch=0-step=10-val_loss=0.5.ckpt",)
    adapters = ("wan_000000010.safetensors", "wan_000000020.safetensors")
    assert watch(run, keep_last=1).removed == ("epoch=0-step=20-val_loss=0.1.ckpt", *adapters)
    assert names(run) == [
        "epoch=0-step=30-val_loss=0.4.ckpt",
        "last.ckpt",
        "wan_000000030_high_noise.safetensors",
        "wan_000000030_low_noise.safetensors",
    ]


def test_models_of_a_step_of_verls_are_all_verified(run, template):
    for step in (1, 2):
        for role in ("actor", "critic"):
            save_step(run / f"global_step_{step}", 0, template=template, prefix=role)
            (run / f"global_step_{step}" / f"{role}0").rename(run / f"global_step_{step}" / role)
    flip(run / "global_step_2" / "critic" / "__0_0.distcp")
    pruned = watch(run, keep_last=1)
    assert state_of(pruned, "global_step_1") == "verified"
    assert state_of(pruned, "global_step_2") == "bad"
    assert any(each.where.startswith("global_step_2/critic/") for each in pruned.findings)


def test_disk_that_fails_once_does_not_condemn_a_checkpoint(run, monkeypatch):
    faults = [StorageError("cannot read: Stale file handle", where="step-30")]
    examine = assess.examine

    def failing(path, **options):
        if faults and path.endswith("step-30"):
            raise faults.pop()
        return examine(path, **options)

    monkeypatch.setattr(assess, "examine", failing)
    manager = RunManager(DiskFolder(str(run)), Settings(quiet_s=0))
    first = manager.once()
    assert first.verified == ("step-10", "step-20", "step-30")[: len(first.verified)]
    assert manager.once().checkpoints[2].state == "verified"


def test_run_that_went_back_to_an_earlier_step_keeps_what_it_saves(run, template):
    """Higher steps are still there, of before; what is saved now has lower ones, and is what counts."""
    watch(run)
    for step in (12, 14):
        save_step(run, step, template=template)
    assert watch(run, keep_last=1).removed == ("step-10", "step-20")
    save_step(run, 40, template=template)
    assert watch(run, keep_last=1).removed == ("step-12", "step-14", "step-30")


def test_nothing_lies_beside_what_accelerate_counts(tmp_path, template):
    """accelerate takes everything in its folder for a checkpoint: with a file beside them load_state fails."""
    run, other = tmp_path / "checkpoints", tmp_path / "checkpoints2"
    for folder in (run, other):
        for step in (0, 1, 2):
            save_step(folder, step, template=template, prefix="checkpoint_")
        watch(folder)
    (tmp_path / ".ckpt-trash-elsewhere" / "checkpoint_0").mkdir(parents=True)
    assert sorted(os.listdir(run)) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    with DiskFolder(str(other)).lock():
        assert api.prune(run, keep_last=1).removed == ("checkpoint_0", "checkpoint_1")
    assert os.listdir(run) == ["checkpoint_2"]
    assert len(os.listdir(other)) == 3
    assert (tmp_path / ".ckpt-trash-elsewhere").exists()
    assert os.path.realpath(tmp_path / "checkpoints-latest-good") == str(run / "checkpoint_2")
    for folder in (run, other):
        api.prune(folder, keep_last=3, quarantine="0s")
    assert sorted(each for each in os.listdir(tmp_path) if "trash" in each) == [".ckpt-trash-elsewhere"]


def test_unverified_one_that_has_just_changed_stays(run, monkeypatch):
    flip(run / "step-20" / "__0_0.distcp")
    watch(run)
    monkeypatch.setattr("time.sleep", lambda _: os.utime(run / "step-20" / "__0_0.distcp"))
    pruned = api.prune(run, unverified=["step-20"], settle=0.6)
    assert pruned.removed == ()
    assert "step-20" in names(run)


def tend_with(run, act):
    """Tend the folder, and let something happen between the plan and the removal."""
    settings = Settings(rules=Rules(last=1), quiet_s=0, send={"there": lambda *_: act()})
    return RunManager(DiskFolder(str(run)), settings).once()


def test_what_changes_after_it_was_judged_stays(run):
    pruned = tend_with(run, (run / "step-10" / "new").touch)
    assert pruned.removed == ("step-20",)
    assert "step-10 is kept" in pruned.failed[0]


def test_what_has_lost_its_successor_stays(run):
    pruned = tend_with(run, lambda: shutil.rmtree(run / "step-30"))
    assert pruned.removed == ()
    assert [(each.code, each.where) for each in pruned.findings] == [("changed-since", "step-30")]
    assert names(run) == ["step-10", "step-20"]


def test_what_loses_its_successor_at_the_last_moment_stays(run, monkeypatch):
    ready = RunManager._ready
    monkeypatch.setattr(RunManager, "_ready", lambda *given: (shutil.rmtree(run / "step-30"), ready(*given))[1])
    assert tend_with(run, lambda: None).removed == ("step-10",)
    assert names(run) == ["step-20"]


def test_removal_is_taken_back_when_somebody_has_come_in_between(run):
    folder = DiskFolder(str(run))
    saved = folder.look().find("step-10")
    (run / "step-10" / "__0_0.distcp").write_bytes(b"")
    assert not folder.remove([saved])
    saved = folder.look().find("step-10")
    with open(run / "step-10" / ".metadata", "rb"):
        assert not folder.remove([saved])
    assert sorted(os.listdir(run)) == ["step-10", "step-20", "step-30"]
    shutil.rmtree(run / "step-10")
    assert not folder.remove([saved])
    assert sorted(os.listdir(run)) == ["step-20", "step-30"]


def test_what_changes_while_it_is_verified_is_not_verified(run, monkeypatch):
    examine = manage.examine

    def changing(path, **options):
        result = examine(path, **options)
        if path.endswith("step-20"):
            os.utime(os.path.join(path, ".metadata"), ns=(0, 1))
        return result

    monkeypatch.setattr(manage, "examine", changing)
    pruned = watch(run, keep_last=1)
    assert pruned.verified == ("step-10", "step-30")
    assert pruned.notes[0] == "step-20 changed during verification and counts as not verified"
    assert pruned.removed == ("step-10",)


def test_removal_is_durable_before_it_is_told(run, monkeypatch):
    """Else a power cut may bring the checkpoint's name back, after the quarantine was emptied."""
    folder, calls, fsync = DiskFolder(str(run)), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    assert folder.remove([folder.look().find("step-10")]) == ["step-10"]
    assert calls == [str(run)]


def test_one_ckpt_tends_a_folder_at_a_time(run):
    with DiskFolder(str(run)).lock(), pytest.raises(BusyError, match="another ckpt manages this folder"):
        watch(run)
    assert watch(run).ok


def put_away(run, name):
    """Put something into quarantine, as a removal does."""
    (run / name).mkdir()
    return (run / name).rename(run / f".ckpt-trash-{1_700_000_000:x}-{(run / name).stat().st_ino:x}-{name}")


def test_leftovers_of_a_killed_prune_are_removed(run):
    watch(run)
    put_away(run, "step-5")
    foreign = [".ckpt-trash-0123456a", ".ckpt-trash-6b08b0c1-1-step-5", ".ckpt-trash-x"]
    for name in foreign:  # nobody's, whatever their names
        (run / name / "step-5").mkdir(parents=True)
    api.prune(run, keep_last=3, quarantine="0s")
    assert names(run) == ["step-10", "step-20", "step-30"]
    found = sorted(name for name in os.listdir(run) if "trash" in name)
    assert found == foreign


def test_leftovers_stay_where_nothing_is_verified(run):
    trash = put_away(run, "step-5")
    pruned = api.prune(run, keep_last=1, quarantine="0s")
    assert trash.exists()
    assert "no verified checkpoint" in pruned.notes[0]


def test_new_checkpoint_must_keep_still(run):
    from threading import Thread

    stop = time.monotonic() + 0.6

    def write():
        while time.monotonic() < stop:
            os.utime(run / "step-30" / ".metadata")
            time.sleep(0.02)

    thread = Thread(target=write)
    thread.start()
    pruned = api.watch(run, once=True, settle=0.3)
    thread.join()
    assert pruned.verified == ("step-10", "step-20")


@pytest.mark.full
def test_watch_goes_on_until_it_is_stopped(run, template):
    command = [sys.executable, "-m", "ckpt_tools", "watch", str(run)]
    command += ["--interval", "0.2", "--settle", "0", "--keep-last", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while names(run) != ["step-30"] and time.monotonic() < deadline:
        time.sleep(0.05)
    save_step(run, 40, template=template)
    while names(run) != ["step-40"] and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "step-40: verified" in err


def test_verified_checkpoints_are_gathered_before_anything_goes(run, tmp_path):
    out = tmp_path / "out"
    pruned = watch(run, gather=out, keep_last=1)
    assert os.listdir(out) == ["step-30"]
    assert pruned.removed == ("step-10", "step-20")
    assert api.verify(out / "step-30", against=run / "step-30").ok
    assert watch(run, gather=out, keep_last=1).failed == ()


def test_nothing_goes_while_what_follows_it_has_not_arrived(run, tmp_path):
    out = tmp_path / "out"
    (out / "step-30").mkdir(parents=True)
    pruned = watch(run, gather=out, keep_last=1)
    assert pruned.exit_code == 1
    assert "was not delivered" in pruned.failed[0]
    assert names(run) == ["step-10", "step-20", "step-30"]


def test_what_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(UnreadableError, match="no such directory"):
        watch(tmp_path / "none")
    with pytest.raises(UnreadableError, match="no trainer checkpoints"):
        watch(tmp_path)
    with pytest.raises(UsageError, match="on a disk or in a bucket"):
        api.watch("hf://org/name", once=True)
    with pytest.raises(UsageError, match="no retention rule given"):
        api.prune(tmp_path)
    assert os.listdir(tmp_path) == []


def test_hostile_names_print_harmlessly(tmp_path, template, capsys):
    run = tmp_path / "run"
    save_step(run, 1, template=template)
    (run / "x\x1b[31m_000000001.safetensors").write_bytes(b"")
    (run / "\x1b]0;title\x07").mkdir()
    main(["watch", str(run), "--once", "--settle", "0", "-v"])
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err


def test_error_of_one_checkpoint_does_not_keep_the_others_from_being_verified(run):
    (run / "step-20" / ".metadata").chmod(0)
    if os.geteuid() == 0:
        (run / "step-20" / ".metadata").unlink()
        (run / "step-20" / ".metadata").mkdir()
    pruned = watch(run, keep_last=1)
    assert pruned.verified == ("step-10", "step-30")
    assert names(run) == ["step-20", "step-30"]


def test_disk_without_a_byte_or_an_inode_is_watched_and_pruned(tmp_path, template):
    run = tmp_path / "run"
    run.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=400k,nr_inodes=200", "none", run]
    if subprocess.run(options, check=False, capture_output=True).returncode:
        pytest.skip("the kernel forbids mounts here")

    def fill():
        with contextlib.suppress(OSError), open(run / "fill", "ab", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))

    try:
        for step in (10, 20, 30):
            save_step(run, step, template=template)
        watch(run)
        save_step(run, 40, template=template)
        fill()
        assert watch(run).verified == ("step-40",)
        fill()
        assert watch(run).verified == ()  # it was recorded
        with contextlib.suppress(OSError):
            for number in range(1000):
                (run / f"file{number}").touch()
        assert api.prune(run, keep_last=1).removed == ("step-10", "step-20", "step-30")
        assert not [each for each in os.listdir(run) if "trash" in each]
    finally:
        subprocess.run(["umount", run], check=False)
