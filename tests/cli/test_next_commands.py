"""What `ckpt inspect` says first, and the commands at its end: each is copied and run, and does what it promises."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from samples import safetensors_bytes, tensor, write_model

from ckpt_tools import api
from ckpt_tools.cli import main

WEIGHTS = {f"model.layers.{n}.mlp.up_proj.weight": tensor("F32", 16, 8, seed=n) for n in range(3)}
FLOATS = {name: torch.ones(16, 8) for name in WEIGHTS}


def _file(at: Path) -> Path:
    save_file(FLOATS, at / "it's a file.safetensors")
    return at / "it's a file.safetensors"


def _directory(at: Path) -> Path:
    write_model(at / "model", {}, assets={})
    save_file(FLOATS, at / "model" / "model.safetensors")
    return at / "model"


def _dcp(at: Path) -> Path:
    api.shard(_directory(at), at / "run", mesh="dp_shard=2", num_workers=1)
    return at / "run"


def _step(at: Path) -> Path:
    from steps.toy_steps import save_trainer

    return save_trainer(at / "checkpoint-3")


def _optimizer(at: Path) -> Path:
    return _step(at) / "optimizer_0"


def _pickle(at: Path) -> Path:
    torch.save(FLOATS, at / "-model.pt")
    return at / "-model.pt"


def _adapter(at: Path) -> Path:
    model = {"model.layers.0.self_attn.q_proj.weight": tensor("F32", 8, 8)}
    write_model(at / "base", model, assets={"config.json": b'{"architectures": ["Toy"]}'})
    (at / "lora").mkdir()
    root = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{root}A.weight": torch.randn(4, 8), f"{root}B.weight": torch.randn(8, 4)},
        at / "lora" / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (at / "lora" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "base"}))
    return at / "lora"


def _one_of_several(at: Path) -> Path:
    return write_model(at / "split", WEIGHTS, num_files=3) / "model-00002-of-00003.safetensors"


def _lonely_part(at: Path) -> Path:
    save_file(FLOATS, at / "model-00002-of-00003.safetensors")
    return at / "model-00002-of-00003.safetensors"


def _hollow(at: Path) -> Path:
    save_file({name: torch.ones(0) for name in WEIGHTS}, at / "hollow.safetensors")
    return at / "hollow.safetensors"


def _pipeline(at: Path) -> Path:
    for name in ("unet", "text_encoder"):
        write_model(at / "pipe" / name, {}, assets={"config.json": b"{}"})
        save_file(FLOATS, at / "pipe" / name / "model.safetensors")
    parts = {name: ["diffusers", "Model"] for name in ("unet", "text_encoder")}
    (at / "pipe" / "model_index.json").write_text(json.dumps({"_class_name": "Pipeline", **parts}))
    return at / "pipe"


KINDS: dict[Callable[[Path], Path], list[str]] = {
    _file: ["verify", "shard", "stats"],
    _directory: ["verify", "shard", "stats"],
    _dcp: ["verify", "gather", "reshard"],
    _step: ["verify", "gather", "reshard"],
    _optimizer: ["verify", "reshard"],
    _pickle: ["verify", "shard", "stats"],
    _adapter: ["check-lora", "export-lora", "merge-lora"],
    _one_of_several: ["inspect"],
    _lonely_part: ["stats", "gather"],
    _hollow: ["inspect"],
    _pipeline: ["inspect", "verify", "stats"],
}


def _next(out: str) -> list[str]:
    return [line[line.index("ckpt ") :] for line in out.partition("\nnext\n")[2].splitlines()]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__[1:])
def test_every_command_of_next_works(make, tmp_path, monkeypatch, capsys) -> None:
    source = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "./" + str(source.relative_to(tmp_path))]) == 0
    out = capsys.readouterr().out
    commands = _next(out)
    assert [shlex.split(each)[1] for each in commands] == KINDS[make]
    before = set(tmp_path.rglob("*"))
    for command in commands:
        words = subprocess.run(["bash", "-c", f'printf "%s\\0" {command}'], check=True, capture_output=True).stdout
        assert main([word.decode() for word in words.split(b"\0")[1:-1]]) == 0, (command, capsys.readouterr())
    assert before <= set(tmp_path.rglob("*"))
    capsys.readouterr()
    # Again: whatever a command would write is there now, and another name is given.
    assert main(["inspect", "./" + str(source.relative_to(tmp_path))]) == 0
    for command in _next(capsys.readouterr().out):
        assert main(shlex.split(command)[1:]) == 0, (command, capsys.readouterr())


def test_folder_of_a_run_is_no_checkpoint_and_leads_to_its_last_one(tmp_path, capsys) -> None:
    for step in (9, 10, 100):
        (tmp_path / "out").mkdir(exist_ok=True)
        _step(tmp_path).rename(tmp_path / "out" / f"checkpoint-{step}")
    assert main(["inspect", str(tmp_path / "out")]) == 4
    err = capsys.readouterr().err
    assert "(it holds checkpoint-9, checkpoint-10, checkpoint-100)" in err
    hint = err.partition(" hint: ")[2].strip()
    last, _, watch = hint.partition("; the whole run: ")
    assert last == f"use {tmp_path / 'out' / 'checkpoint-100'}"
    assert main(shlex.split(watch)[1:]) == main(["inspect", last.removeprefix("use ")]) == 0


def test_identity_is_the_first_line_and_what_stands_out_the_next(tmp_path, capsys) -> None:
    main(["inspect", str(_lonely_part(tmp_path))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "architecture not known · 3 layers · 384 parameters · f32 · a PART"
    assert lines[1] == "a PART: model-00002-of-00003.safetensors: 1 of 3 files of one model"
    run = _dcp(tmp_path)
    (run / "__1_0.distcp").unlink()
    assert main(["inspect", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "missing: 1 of 2 files: __1_0.distcp"
    assert lines[-1].endswith(f"ckpt verify {run}")
    assert main(["verify", str(run)]) == 3


def test_names_that_drive_a_terminal_are_quoted_and_still_work(tmp_path, capsys) -> None:
    odd = tmp_path / "a\x1b[31m'b.safetensors"
    odd.write_bytes(safetensors_bytes(WEIGHTS))
    assert main(["inspect", str(odd)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    command = out.splitlines()[-1]
    words = subprocess.run(
        ["bash", "-c", f'printf "%s\\0" {command[command.index("ckpt ") :]}'], check=True, capture_output=True
    )
    assert words.stdout.split(b"\0")[2].decode() == str(odd)


def test_quiet_dry_run_prints_its_plan(tmp_path, capsys) -> None:
    run = _dcp(tmp_path)
    for argv in (["shard", tmp_path / "model"], ["gather", run], ["reshard", run]):
        mesh = [] if argv[0] == "gather" else ["--mesh", "dp_shard=2"]
        assert main([*map(str, argv), str(tmp_path / "new"), *mesh, "-n", "-q"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("would write ")
        assert not err
    (tmp_path / "out").mkdir()
    _step(tmp_path).rename(tmp_path / "out" / "checkpoint-3")
    assert main(["prune", str(tmp_path / "out"), "--keep-last", "1", "-n", "-q"]) == 0
    assert "checkpoint-3" in capsys.readouterr().out


def test_adapter_whose_model_is_not_here_is_not_known_and_says_what_is_needed(tmp_path, monkeypatch, capsys) -> None:
    lora = _adapter(tmp_path)
    monkeypatch.chdir(lora)  # where "base" leads nowhere
    assert main(["inspect", "."]) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].split("  ")[1:] == ["check it (with --base DIR: against its model)", "ckpt check-lora ."]
    assert main(["check-lora", "."]) == 3
    assert "not known: nothing is wrong in what was checked" in capsys.readouterr().out
    assert main(["check-lora", ".", "--base", str(tmp_path / "base")]) == 0


def test_files_of_two_steps_stand_out_and_nothing_is_made_of_them(tmp_path, capsys) -> None:
    step = _step(tmp_path)
    (step / "trainer_state.json").write_text('{"global_step": 9}')
    assert main(["inspect", str(step)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("of several steps: step 3: scheduler.pt; step 9: trainer_state.json")
    assert lines[-2:] == ["next", f"  find what is wrong  ckpt verify {step}"]
    assert main(["verify", str(step)]) == 3
