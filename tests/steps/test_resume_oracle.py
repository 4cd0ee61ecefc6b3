"""`verify` of a damaged step says what its trainer does with it; `resume_world` asked the trainers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from steps import resume_world as world

from ckpt_tools.cli import main

KNOWN = yaml.safe_load(world.RECORD.read_text())
_RNG = ("rng_state_0.pth", "rng_state_1.pth")
_MODEL = ("pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp")
_TWO = ("model.safetensors", "model_1.safetensors")
UNSEEN: dict[str, tuple[str, ...]] = {
    "trainer": ("model.safetensors", "rng_state.pth"),
    "trainer-ddp": ("model.safetensors", *_RNG),
    "trainer-sharded": (*_MODEL, "optimizer_0/__0_0.distcp", *_RNG),
    "trainer-full": _RNG,
    "trainer-deepspeed": _RNG,
    "accelerate": ("model.safetensors", "random_states_0.pkl"),
    "accelerate-two": (*_TWO, "optimizer_1.bin", "random_states_0.pkl"),
    "accelerate-sharded": (*_MODEL, "optimizer_0/__0_0.distcp"),
    "lightning-fsdp2": ("__0_0.distcp",),
    "loop": ("__0_0.distcp", "__1_0.distcp"),
}
"""Trainer → files of another step that it goes on with, and that nothing tells from its own: they hold weights,
moments or RNG states and no count of steps; the second of `loop` holds all counts."""
UNREAD: dict[str, tuple[tuple[str, str], ...]] = {
    "trainer": (("empty", "generation_config.json"),),
    "trainer-ddp": (("empty", "generation_config.json"),),
    "trainer-full": (
        ("empty", "generation_config.json"),
        ("empty", "model.safetensors"),
        ("foreign", "model.safetensors"),
    ),
    "trainer-deepspeed": (
        ("empty", "config.json"),
        ("empty", "generation_config.json"),
        *(("foreign", f"global_step2/zero_pp_rank_{rank}_mp_rank_00_model_states.pt") for rank in range(2)),
    ),
}
"""Trainer → damage to files of which it reads nothing that counts on resuming: a finding for all who load the model."""
WEIGHTS: dict[str, tuple[str, ...]] = {
    "accelerate": ("optimizer.bin",),
    "accelerate-two": ("model_1.safetensors", "optimizer.bin"),
    "accelerate-sharded": ("optimizer_0/__0_0.distcp",),
}
"""Trainer → before these files of a save nothing is there but a model, as if only that had been meant."""
FROZEN = {"accelerate-two": ("optimizer_1.bin",)}
"""Trainer → files without which a model has no optimizer, as if it were frozen: a warning."""


def cases_of(name: str) -> list[tuple[str, str, str]]:
    """Damage, file, what the trainer did."""
    files = KNOWN[name]["files"]
    rest = [(damage, file, did) for file, each in files.items() for damage, did in each.items()]
    return [("intact", "", KNOWN[name]["intact"]), *rest]


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> Path:
    world.unpack(directory := tmp_path_factory.mktemp("saves"))
    return directory


@pytest.mark.full(but=["trainer", "accelerate-sharded", "lightning-fsdp2", "torchtitan", "deepspeed-1"])
@pytest.mark.parametrize("name", KNOWN)
def test_verify_says_what_the_trainer_does(name, saves, tmp_path, capsys):
    step = Path(world.WAYS[name].step.format(world.SAVED)).name
    order, wrong = list(KNOWN[name]["files"]), []
    for number, (damage, file, did) in enumerate(cases_of(name)):
        path = tmp_path / str(number) / step
        world.make(damage, file, order, saves / name / str(world.SAVED), saves / name / str(world.FOREIGN), path)
        codes, options = (0,) if did == "resumes" else (3, 4), []
        if damage == "foreign" and file in UNSEEN.get(name, ()):
            assert did.startswith("restarts")
            codes = (0,)
        if (damage, file) in UNREAD.get(name, ()):
            assert did == "resumes"
            codes = (3,) if damage == "empty" else (3, 4)
        maybe_meant = {"until": WEIGHTS, "missing": FROZEN}.get(damage, {})
        if file in maybe_meant.get(name, ()):
            assert main(["verify", str(path), "--quiet"]) == 0
            options = ["--for", "resume"]
        code = main(["verify", str(path), "--quiet", *options])
        said = capsys.readouterr()
        wrong += [] if code in codes else [(damage, file, did, code, said)]
    assert wrong == []


def test_schedule_of_deepspeeds_own_needs_no_file_of_the_trainers(saves, tmp_path):
    step = shutil.copytree(saves / "trainer-deepspeed/2", tmp_path / "checkpoint-2")
    (step / "scheduler.pt").unlink()
    shutil.copytree(saves / "deepspeed-3/2/global_step2", step / "global_step2", dirs_exist_ok=True)
    assert main(["verify", str(step), "--quiet", "--for", "resume"]) == 0


def table() -> str:
    """Counts, for the page."""
    rows = [
        "| saved by | cases | resumes | stops or hangs | goes on wrong | … and `verify` cannot tell |",
        "|---|---|---|---|---|---|",
    ]
    sums = [0] * 5
    for name, entry in KNOWN.items():
        did = [each.partition(":")[0] for _, _, each in cases_of(name)]
        counts = [len(did), did.count("resumes"), did.count("crashes") + did.count("hangs"), did.count("restarts")]
        counts.append(len(UNSEEN.get(name, ())))
        sums = [one + other for one, other in zip(sums, counts, strict=True)]
        rows.append(f"| {name} ({entry['by'].partition(',')[0]}) | {' | '.join(map(str, counts))} |")
    return "\n".join([*rows, f"| all | {' | '.join(map(str, sums))} |"])


def test_page_has_the_counts():
    assert table() in (Path(__file__).parents[2] / "docs/dev/detection.md").read_text()


@pytest.mark.full
@pytest.mark.timeout(3600)  # with --zoo: a training for every case
@pytest.mark.parametrize("name", KNOWN)
def test_trainers_still_do_what_is_recorded(name, request):
    packages = {needed.partition(".")[0] for needed in world.WAYS[name].needs}
    if lacking := [package for package in sorted(packages) if importlib.util.find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(lacking)}")
    known = {(damage, file): did for damage, file, did in cases_of(name)}
    some = [("intact", ""), *(case for case in list(known)[4::11] if case[0] in ("missing", "empty", "foreign"))]
    chosen = list(known) if request.config.getoption("zoo") else some
    command = [sys.executable, "-m", "steps.resume_world", "--again", name, json.dumps(chosen)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {(damage, file): did for damage, file, did in json.loads(done.stdout.splitlines()[-1])}
    assert found == {case: known[case] for case in chosen}
