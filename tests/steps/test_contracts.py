"""What a trainer needs of a step, and whether all of it is of one step: verify, reshard, gather and watch agree."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from formats.saved import save_ranks
from safetensors.torch import save_file
from steps import toy_steps
from torch.distributed.tensor import Shard

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.step import judge_path
from ckpt_tools.checkpoint.formats.trainer_contracts import CONTRACTS
from ckpt_tools.cli import main

ZERO = Path(__file__).parents[1] / "formats" / "deepspeed.tar.xz"


def save_ddp(path: Path, step: int = 2, ranks: int = 1, **arguments) -> Path:
    """As the Trainer does without FSDP."""
    path.mkdir(parents=True)
    save_file({"w": torch.ones(4)}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text("{}")
    rates = [0.1 / step]
    adam = {0: {"step": torch.tensor(float(step)), "exp_avg": torch.ones(4)}}
    torch.save({"state": adam, "param_groups": [{"lr": rates[0], "initial_lr": 0.1}]}, path / "optimizer.pt")
    torch.save({"last_epoch": step, "_last_lr": rates, "base_lrs": [0.1]}, path / "scheduler.pt")
    for rank in range(ranks):
        torch.save({"cpu": torch.zeros(4)}, path / (f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"))
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def save_verl(path: Path, step: int = 2) -> Path:
    """As verl does for the policy, on two ranks."""
    state = {"w": torch.arange(8.0).reshape(4, 2)}
    save_ranks(path, state, {"fsdp": 2}, lambda _: [Shard(0)])
    for rank in range(2):
        adam = {"state": {"w": {"step": torch.tensor(float(3 * step))}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
        torch.save(adam, path / f"optim_world_size_2_rank_{rank}.pt")
        torch.save({"lr_scheduler": {"last_epoch": step}}, path / f"extra_state_world_size_2_rank_{rank}.pt")
    return path


def save_zero(path: Path) -> Path:
    with tarfile.open(ZERO) as archive:
        archive.extractall(path, filter="data", members=[m for m in archive if m.name.startswith("zero1-bf16/")])
    return path / "zero1-bf16"


MAKERS = {
    "ddp": save_ddp,
    "ddp-2": lambda path: save_ddp(path, ranks=2),
    "fsdp": lambda path: toy_steps.save_trainer(path, step=2),
    "accelerate": lambda path: toy_steps.save_accelerate(path, step=2),
    "verl": save_verl,
    "zero": save_zero,
}
NEEDED = {
    "ddp": ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"],
    "ddp-2": ["rng_state_0.pth", "rng_state_1.pth"],
    "fsdp": ["optimizer_0/.metadata", "scheduler.pt", "rng_state_1.pth", "trainer_state.json"],
    "accelerate": ["optimizer_0/.metadata", "random_states_0.pkl"],
    "verl": ["optim_world_size_2_rank_1.pt", "extra_state_world_size_2_rank_0.pt"],
    "zero": [
        "latest",
        "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ],
}
"""What each of them cannot resume without."""
HARMS = {"missing": 0.0, "empty": 0.0, "cut": 0.6}


@pytest.mark.parametrize("way", MAKERS)
def test_whole_step_is_resumable(way, tmp_path) -> None:
    step = MAKERS[way](tmp_path / "checkpoint-2")
    verdict = judge_path(str(step))
    assert (verdict.resumable, verdict.reasons, verdict.mixed) == ("yes", (), ())
    assert 2 in [each.step for each in verdict.steps] or way == "verl"
    assert main(["verify", str(step), "--for", "resume", "-q"]) == 0


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(("way", "file"), [(way, file) for way, files in NEEDED.items() for file in files])
def test_step_without_a_file_is_not_resumable(way, file, harm, tmp_path, capsys) -> None:
    step = MAKERS[way](tmp_path / "checkpoint-2")
    path = step / file
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: int(HARMS[harm] * path.stat().st_size)])
    assert main(["verify", "--level", "structure", str(step), "-q"]) in (3, 4)
    assert path.name.removesuffix(".metadata") in capsys.readouterr().out + capsys.readouterr().err + str(path)
    if way in ("fsdp", "accelerate"):
        assert main(["reshard", str(step), str(tmp_path / "out"), "--mesh", "dp_shard=2"]) in (3, 4)
        assert main(["gather", str(step), str(tmp_path / "model")]) == 0  # as the hint says
    if harm == "missing" and not file.startswith(("model", "optim", "latest", "global")):
        assert main(["verify", "--level", "structure", str(step), "--for", "weights", "-q"]) == 0


def mix_optimizer(one: Path, other: Path) -> None:
    shutil.copy(other / "optimizer.pt", one)


def mix_directory(one: Path, other: Path) -> None:
    shutil.rmtree(one / "optimizer_0")
    shutil.copytree(other / "optimizer_0", one / "optimizer_0")


def mix_rank(kind: str):
    return lambda one, other: shutil.copy(other / f"{kind}_world_size_2_rank_1.pt", one)


MIXES = {
    "ddp optimizer": (save_ddp, mix_optimizer),
    "ddp schedule": (save_ddp, lambda one, other: shutil.copy(other / "scheduler.pt", one)),
    "ddp progress": (save_ddp, lambda one, other: shutil.copy(other / "trainer_state.json", one)),
    "fsdp optimizer": (lambda path, step: toy_steps.save_trainer(path, step=step), mix_directory),
    "accelerate loop": (
        lambda path, step: toy_steps.save_accelerate(path, step=step),
        lambda one, other: shutil.copy(other / "random_states_1.pkl", one),
    ),
    "verl optimizer": (save_verl, mix_rank("optim")),
    "verl schedule": (save_verl, mix_rank("extra_state")),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("steps", [(2, 1), (1, 2)])
def test_files_of_two_steps_are_found_and_never_written(mix, steps, tmp_path, capsys) -> None:
    save, harm = MIXES[mix]
    one, other = (save(tmp_path / f"checkpoint-{step}", step) for step in steps)
    if mix == "accelerate loop":  # what accelerate writes has more beside
        for path in (*one.glob("random_*"), *other.glob("random_*")):
            torch.save({"step": int(path.parent.name[-1]), "random_state": ()}, path)
    harm(one, other)
    assert main(["verify", str(one), "-q"]) == 3
    assert "mixed-steps" in capsys.readouterr().out
    for command in (
        ["gather"],
        ["reshard", "--mesh", "dp_shard=2"] if "ddp" not in mix else ["shard", "--mesh", "tp=2"],
    ):
        assert main([command[0], str(one), str(tmp_path / "out"), *command[1:]]) == 4
        assert "not of one step" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    if mix == "fsdp optimizer":  # where the hint leads
        assert main(["gather", str(one / "pytorch_model_fsdp_0"), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("of_rank", [0, 1])
def test_ranks_of_zero_of_two_steps_are_found(of_rank, tmp_path, capsys) -> None:
    step = save_zero(tmp_path)
    for path in (step / "global_step2").glob(f"*rank_{of_rank}_*optim*"):
        content = path.read_bytes()
        number = content.index(torch.tensor(2.0).numpy().tobytes())
        path.write_bytes(content[:number] + torch.tensor(1.0).numpy().tobytes() + content[number + 4 :])
    assert main(["verify", str(step), "-q"]) == 3
    assert "the optimizer counts step" in capsys.readouterr().out
    assert main(["gather", str(step), str(tmp_path / "out")]) == 4


def test_model_of_one_step_and_optimizers_of_another_of_zero_are_found(tmp_path) -> None:
    step = save_zero(tmp_path)
    for path in (step / "global_step2").glob("*optim*"):
        content = path.read_bytes()
        number = content.index(torch.tensor(2.0).numpy().tobytes())
        path.write_bytes(content[:number] + torch.tensor(3.0).numpy().tobytes() + content[number + 4 :])
    assert main(["verify", str(step), "-q"]) == 3
    assert main(["gather", str(step), str(tmp_path / "out")]) == 4


# Healthy things stay healthy


def test_unused_experts_and_skipped_steps_are_of_one_step(tmp_path) -> None:
    step = save_ddp(tmp_path / "checkpoint-9", 7)
    adam = {number: {"step": torch.tensor(float(count))} for number, count in enumerate((7, 0, 3))}
    torch.save({"state": adam, "param_groups": [{"lr": 0.1 / 7}]}, step / "optimizer.pt")
    (step / "trainer_state.json").write_text('{"global_step": 9}')  # two were skipped for their gradients
    torch.save({"scale": 1.0}, step / "scaler.pt")
    assert judge_path(str(step)).resumable == "yes"
    assert judge_path(str(step.rename(tmp_path / "best"))).resumable == "yes"


def save_two(path: Path, models: int, params: list[int]) -> Path:
    """As accelerate does in DDP: models of three tensors, optimizers of so many."""
    path.mkdir()
    for number in range(models):
        weights = {name: torch.ones(2) for name in "abc"}
        save_file(weights, path / ("model.safetensors" if not number else f"model_{number}.safetensors"))
    for number, count in enumerate(params):
        adam = {"state": {}, "param_groups": [{"lr": 0.1 / (1 + number), "params": list(range(count))}]}
        torch.save(adam, path / ("optimizer.bin" if not number else f"optimizer_{number}.bin"))
    torch.save({"step": 2, "random_state": ()}, path / "random_states_0.pkl")
    return path


@pytest.mark.parametrize(
    ("models", "params", "known"),
    [(1, [2, 1], "yes"), (2, [6], "yes"), (2, [3], "not known"), (2, [3, 3], "yes"), (1, [3, 3], "no")],
)
def test_models_and_optimizers_need_not_be_as_many(models, params, known, tmp_path) -> None:
    step = save_two(tmp_path / "checkpoint_2", models, params)
    assert (judge_path(str(step)).resumable, main(["verify", str(step), "-q"])) == (known, 3 if known == "no" else 0)
    assert main(["verify", str(step), "-q", "--for", "resume"]) == (0 if known == "yes" else 3)


@pytest.mark.parametrize("way", ["dcp", "hub", "trainer", "torchtitan", "lightning"])
def test_weights_alone_are_whole_as_that(way, tmp_path, saved) -> None:
    path = tmp_path / "checkpoint-2"
    if way in ("dcp", "torchtitan"):
        toy_steps.save({"model": toy_steps.state_of(0)} if way == "dcp" else toy_steps.state_of(0), path)
    elif way == "lightning":
        toy_steps.save({"state_dict": toy_steps.state_of(0)}, path)
        torch.save({"global_step": 3, "epoch": 0}, path / "meta.pt")
    else:
        save_ddp(path)
        for name in (
            "optimizer.pt",
            "scheduler.pt",
            "rng_state.pth",
            *(["trainer_state.json"] if way == "hub" else []),
        ):
            (path / name).unlink()
        path = path.rename(tmp_path / "model") if way == "hub" else path
    assert api.verify(path).ok
    assert judge_path(str(path)).is_weights_only
    found = api.verify(path, purpose="resume")
    assert [each.code for each in found.errors] == ["not-resumable"]


def test_successor_of_weights_alone_supersedes_nothing(tmp_path, saved) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved / "step-3", run / "step-3")
    toy_steps.save(
        {fqn.removeprefix("model."): tensor for fqn, tensor in toy_steps.state_of(0).items()}, run / "step-4"
    )
    pruned = api.watch(run, once=True, settle=0, keep_last=1)
    assert pruned.removed == ()
    states = {each.name: each for each in pruned.checkpoints}
    assert states["step-4"].state == "unfit"
    assert "the optimizer's state" in states["step-4"].why


def test_contracts_name_every_file_as_trainers_do() -> None:
    shown = {need.file(1 if need.by_rank else None) for contract in CONTRACTS for need in contract.saved}
    assert {"optimizer.pt", "scheduler.bin", "rng_state_1.pth", "optimizer_0", "meta.pt", "model.safetensors"} <= shown
    assert not [name for name in shown if any(sign in name for sign in "()?[]|\\")]
