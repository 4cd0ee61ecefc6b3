"""`--for TRAINER`: names, prefix and directories that the trainer loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from steps.toy_steps import is_equal, save, state_of

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A model of no architecture that ckpt knows."""
    path = tmp_path_factory.mktemp("model")
    save_file(state_of(0), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text('{"model_type": "toy"}')
    return path


@pytest.mark.parametrize(
    ("trainer", "part", "root", "companions"),
    [
        ("accelerate", "pytorch_model_fsdp_0", "model", set()),
        ("trainer", "pytorch_model_fsdp_0", "model", set()),
        ("lightning", "", "state_dict", {".metadata", "__0_0.distcp", "__1_0.distcp", "config.json"}),
        ("plain", "", "", {".metadata", "__0_0.distcp", "__1_0.distcp", "config.json"}),
    ],
)
def test_shard_for_a_trainer_writes_what_it_loads(model, trainer, part, root, companions, tmp_path, read_dcp) -> None:
    result = api.shard(model, tmp_path / "start", mesh="dp_shard=2", trainer=trainer)
    found = {path.name for path in (tmp_path / "start").iterdir()}
    assert found == {"ckpt_manifest.json", *companions, *([part] if part else [])}
    flat = {f"{root}.{fqn}" if root else fqn: tensor for fqn, tensor in state_of(0).items()}
    assert is_equal(read_dcp(tmp_path / "start" / part), flat)
    assert any("start" in note for note in result.notes) is (trainer != "plain")
    assert api.verify(tmp_path / "start").ok
    api.gather(tmp_path / "start", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_start_says_that_it_is_none_to_resume_from(model, tmp_path) -> None:
    api.shard(model, tmp_path / "start", mesh="dp_shard=2", trainer="accelerate")
    (finding,) = api.verify(tmp_path / "start").findings
    assert (finding.code, finding.severity, finding.where) == ("weights-only", "info", str(tmp_path / "start"))


def test_start_is_resharded_as_it_is(model, tmp_path, read_dcp) -> None:
    api.shard(model, tmp_path / "start", mesh="dp_shard=2", trainer="trainer")
    api.reshard(tmp_path / "start", tmp_path / "other", mesh="dp_shard=3")
    api.gather(tmp_path / "other", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_lightning_takes_the_name_of_the_modules_attribute(model, tmp_path) -> None:
    api.shard(model, tmp_path / "start", mesh="dp_shard=2", trainer="lightning", prefix="state_dict.model.")
    names = [entry.fqn for entry in api.open_checkpoint(tmp_path / "start").tensors]
    assert sorted(names) == sorted(f"state_dict.model.{fqn}" for fqn in state_of(0))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"trainer": "verl"}, "own rank files"),
        ({"trainer": "accelerate", "names": "hub"}, "--names hub is given"),
        ({"trainer": "accelerate", "prefix": "app."}, "--prefix app. is given"),
        ({"trainer": "torchtitan", "names": "live"}, "--names live is given"),
        ({"trainer": "accelerate", "engine": "dtensor"}, "only writes a DCP directory"),
        ({"trainer": "nemo"}, "must be one of"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_options_that_contradict_each_other_are_refused(model, options, what, tmp_path) -> None:
    with pytest.raises(UsageError, match=what):
        api.shard(model, tmp_path / "start", mesh="dp_shard=2", **options)
    assert not list(tmp_path.iterdir())


def test_options_that_agree_are_taken(model, tmp_path) -> None:
    api.shard(model, tmp_path / "a", mesh="dp_shard=2", trainer="accelerate", prefix="model.", names="auto")


def test_refusal_for_verl_says_what_to_do(model, tmp_path, capsys) -> None:
    assert main(["shard", str(model), str(tmp_path / "no"), "--mesh", "dp_shard=2", "--for", "verl"]) == 2
    assert f"hint: set actor_rollout_ref.model.path to {model}" in capsys.readouterr().err


def test_torchtitan_of_an_unknown_architecture_is_refused(model, tmp_path) -> None:
    with pytest.raises(UsageError, match="torchtitan"):
        api.shard(model, tmp_path / "start", mesh="dp_shard=2", trainer="torchtitan")


def test_dry_run_for_a_trainer_shows_the_directories(model, tmp_path, capsys) -> None:
    command = ["shard", str(model), str(tmp_path / "x"), "--mesh", "dp_shard=2", "--for", "trainer", "-n", "--json"]
    assert main(command) == 0
    files = {row["file"] for row in json.loads(capsys.readouterr().out)["plan"]["files"]}
    assert {"ckpt_manifest.json", "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/config.json"} <= files
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "trainer"),
    [
        *[("accelerate", "plain"), ("accelerate", "lightning"), ("trainer", "accelerate"), ("trainer", "plain")],
        *[("last.ckpt", "plain"), ("last.ckpt", "accelerate"), ("accelerate/pytorch_model_fsdp_0", "accelerate")],
    ],
)
def test_reshard_for_another_trainer_takes_the_model_alone(saved, source, trainer, tmp_path, read_dcp) -> None:
    root = {"plain": "", "lightning": "state_dict", "accelerate": "model"}[trainer]
    result = api.reshard(saved / source, tmp_path / "out", mesh="dp_shard=2", trainer=trainer)
    part = "pytorch_model_fsdp_0" if trainer == "accelerate" else ""
    flat = {f"{root}.{fqn}" if root else fqn: tensor for fqn, tensor in state_of(0).items()}
    assert is_equal(read_dcp(tmp_path / "out" / part), flat)
    assert not (tmp_path / "out" / "optimizer_0").exists()
    assert not (tmp_path / "out" / "meta.pt").exists()
    left = {"last.ckpt": "meta.pt", "accelerate/pytorch_model_fsdp_0": "one part of a step"}.get(source, "optimizer_0")
    assert any(left in note for note in result.notes)


def test_reshard_for_its_own_trainer_is_a_whole_step(saved, tmp_path) -> None:
    api.reshard(saved / "accelerate", tmp_path / "a", mesh="dp_shard=2", trainer="accelerate")
    assert (tmp_path / "a" / "optimizer_0" / ".metadata").exists()
    api.reshard(saved / "last.ckpt", tmp_path / "b", mesh="dp_shard=2", trainer="lightning")
    assert (tmp_path / "b" / "meta.pt").exists()
    api.reshard(saved / "step-3", tmp_path / "c", mesh="dp_shard=2", trainer="torchtitan")
    assert api.open_checkpoint(tmp_path / "c").blobs


def test_reshard_of_two_models_for_another_trainer_asks_which(saved, tmp_path) -> None:
    with pytest.raises(UsageError, match="step of 2 models"):
        api.reshard(saved / "two", tmp_path / "out", mesh="dp_shard=2", trainer="plain")


def test_digests_of_the_source_are_checked_under_other_names(model, tmp_path) -> None:
    api.shard(model, tmp_path / "start", mesh="dp_shard=2", trainer="accelerate")
    result = api.reshard(tmp_path / "start", tmp_path / "out", mesh="dp_shard=2", trainer="lightning")
    assert result.checked["digests"] == len(state_of(0))
    api.gather(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_names_of_another_library_are_told(tmp_path) -> None:
    save({"layers.0.attention.wq.weight": torch.ones(4, 4), "tok_embeddings.weight": torch.ones(4, 4)}, tmp_path / "t")
    result = api.reshard(tmp_path / "t", tmp_path / "out", mesh="dp_shard=1", trainer="accelerate")
    assert any("torchtitan's or Meta's own" in text for text in result.warnings)
    plain = api.reshard(tmp_path / "t", tmp_path / "plain", mesh="dp_shard=1", trainer="plain")
    assert not plain.warnings
