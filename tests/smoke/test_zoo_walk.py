"""The zoo of healthy models: a slice of it, or with --zoo all of it; `python -m smoke.zoo` prints the table."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from smoke.zoo import CONFIGS, SPECS, lacks
from smoke.zoo.text import Gpt

from ckpt_tools import api

SLICE = ("Gpt", "compiled_blocks", "Odd", "Diffusion", "VqVae", "Critic", "Clip", "Orthogonal", "Energy", "SharedNorm")
"""A tuple with a loss, dropout, ties; compiled; scalars; noise and computed tensors; state that runs or iterates; a
forward that communicates, cannot be built on meta, takes gradients; a module in a block and outside of it."""
SAID = {
    "Clip": "forward communicates: every rank has a reference of its own",
    "Orthogonal": "on the meta device it has other tensors: head.parametrizations.weight.0.base",
    "Measured": "on the meta device it raises RuntimeError: Tensor.item()",
    "Energy": "forward takes gradients itself: it is evaluated with them on",
}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def silent(farm, tmp_path_factory):
    directory = tmp_path_factory.mktemp("zoo")

    def walk(name, **options):
        if name in CONFIGS:
            farm.call("smoke.makers:configs", str(directory), name)
            options["model"] = str(directory / name)
        else:
            options["factory"] = SPECS[name]
        report = farm.smoke(steps=2, **options)
        assert not report.findings
        assert report.max_grad_error is not None
        assert len(report.reference_losses) == 2
        return report

    return walk


def pytest_generate_tests(metafunc):
    if "healthy" in metafunc.fixturenames:
        is_whole = metafunc.config.getoption("--zoo")
        metafunc.parametrize("healthy", [*SPECS, *CONFIGS] if is_whole else SLICE)


def test_healthy_model_is_silent_and_followed(silent, healthy):
    if library := lacks(healthy):
        pytest.skip(f"{library} is not installed")
    report = silent(healthy)
    assert report.max_grad_error <= 1e-6
    assert SAID.get(healthy, "") in "\n".join(report.notes)


def test_statistics_that_differ_between_ranks_are_a_note(silent):
    notes = silent("ResNet").notes
    assert any(note.startswith("10 buffers differ between ranks (stem.1.running_mean") for note in notes)
    assert not any("buffers" in note for note in silent("FrozenNorm").notes)  # in evaluation


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Balanced", {"mesh": "dp_replicate=2,dp_shard=2"}),
        ("Clip", {"nproc": 1}),
        ("FlowMatching", {"mesh": "dp_replicate=2,dp_shard=2"}),
        ("Gpt", {"param_dtype": "bf16", "reduce_dtype": "f32"}),
    ],
)
def test_draws_are_followed_on_other_meshes_and_in_other_dtypes(silent, kind, options):
    silent(kind, **options)


def test_compiled_model_takes_a_checkpoint_with_plain_names(silent, tmp_path):
    torch.manual_seed(0)
    state = {name: value.clone() for name, value in Gpt().state_dict().items()}  # tied names, too
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    api.shard(tmp_path / "model.safetensors", tmp_path / "dcp", mesh="dp_shard=2")
    report = silent("compiled_blocks", source=str(tmp_path / "dcp"))
    assert any(note.startswith("dcp.load finds layers.0._orig_mod.norm.weight and") for note in report.notes)


def test_draws_that_tensor_parallelism_cuts_are_not_compared(farm):
    report = farm.smoke(factory="smoke.factories:Draws", mesh="dp_shard=1,tp=2", steps=1)
    assert not report.findings
    assert report.max_grad_error is None
    assert any("under tp every rank draws for its own part" in note for note in report.notes)
