"""Steps of Megatron-core: samples that it saved itself (`megatron_ranks.py` is the recipe), and what is beside them.

With megatron-core on PYTHONPATH it also saves here, and loads what ckpt wrote.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from formats.megatron_ranks import KINDS, hub_model, whole_state
from formats.saved import read
from names.keymaps import per_expert
from safetensors.torch import load_file

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.dcp_metadata import parse_metadata
from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, ForeignLayoutError, UnreadableError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAMPLES = Path(__file__).parent / "megatron"
NAMES = tuple(sorted(path.stem for path in SAMPLES.iterdir()))
NO_STATE = ("--exclude", "optimizer.**", "--exclude", "**_extra_state**")


@pytest.fixture
def sample(tmp_path):
    def unpack(name: str) -> tuple[str, str]:
        step, hub = tmp_path / "iter_0000100", tmp_path / "hub"
        with zipfile.ZipFile(SAMPLES / f"{name}.zip") as archive:
            archive.extractall(step)
        hub_model(name.partition("-")[0]).save_pretrained(hub)
        return str(step), str(hub)

    return unpack


def is_same_model(kind: str, directory: str) -> bool:
    """Are the files the hub's, and does transformers compute what it did before Megatron had it?"""
    before = hub_model(kind)
    expected = {name: tensor.detach() for name, tensor in per_expert(before.state_dict()).items()}
    if before.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    found = load_file(f"{directory}/model.safetensors")
    after = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        is_equal = torch.equal(before(ids).logits, after(ids).logits)
    return is_equal and found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def test_samples_are_of_every_kind_that_counts() -> None:
    """Stacked layers and single ones, experts, two versions, tensor, expert and data parallel."""
    assert {"llama", "qwen2", "qwen3_moe", "deepseek_v3"} <= {name.partition("-")[0] for name in NAMES}
    assert {"0.15.3", "0.16.1"} == {name.split("-")[1] for name in NAMES}


@pytest.mark.full(but=["llama-0.16.1-tp2"])
@pytest.mark.parametrize("name", NAMES)
def test_step_verifies_and_gathers_to_what_the_hub_had(name: str, sample, tmp_path, capsys) -> None:
    step, hub = sample(name)
    assert api.open_checkpoint(step).format == "torch-dist"
    assert main(["verify", step, "-q"]) == 0
    assert main(["gather", step, str(tmp_path / "hf"), "--assets", hub]) == 0
    err = capsys.readouterr().err
    assert "left out 2 rows of padding of embedding.word_embeddings.weight" in err
    assert re.search(r"left out \d+ non-tensor items", err)
    assert is_same_model(name.partition("-")[0], str(tmp_path / "hf"))


@pytest.mark.full(but=["llama-0.16.1-tp2"])
@pytest.mark.parametrize("name", NAMES)
def test_step_becomes_dcp_of_the_hub_s_names_and_equals_the_hub(name: str, sample, tmp_path) -> None:
    step, hub = sample(name)
    Path(step, "config.json").write_bytes(Path(hub, "config.json").read_bytes())
    assert main(["diff", step, hub, "-q"]) == 0
    assert main(["verify", step, "--against", hub, "-q"]) == 0
    made = str(tmp_path / "made")
    known = [entry.fqn for entry in api.inspect(step).tensors]
    state = NO_STATE if any(fqn.startswith("optimizer.") for fqn in known) else NO_STATE[2:]
    assert main(["reshard", step, made, "--mesh", "dp_shard=2", "--names", "hub", *state, "-q"]) == 0
    assert main(["verify", made, "--against", hub, "-q"]) == 0
    (first, *_) = load_file(f"{hub}/model.safetensors").items()
    state = {first[0]: torch.zeros_like(first[1])}
    dcp.load(state, checkpoint_id=made)
    assert torch.equal(state[first[0]], first[1])


def test_names_for_a_whole_step_are_refused_with_a_way_that_works(sample, tmp_path) -> None:
    step, hub = sample("llama-0.16.1-tp2")
    Path(step, "config.json").write_bytes(Path(hub, "config.json").read_bytes())
    with pytest.raises(UsageError, match="only a model's weights") as caught:
        api.reshard(step, tmp_path / "made", mesh="dp_shard=2", names="hub")
    globs = re.findall(r"--exclude '([^']+)'", str(caught.value.hint))
    made = api.reshard(step, tmp_path / "made", mesh="dp_shard=2", names="hub", exclude=globs)
    assert made.num_tensors == 21
    assert not (tmp_path / "made" / "metadata.json").exists(), "it is no step of Megatron's any more"


def test_optimizer_state_with_names_is_carried_for_another_mesh(sample, tmp_path) -> None:
    step, _ = sample("llama-0.16.1-tp2")
    made = tmp_path / "made"
    api.reshard(step, made, mesh="dp_shard=3")
    assert read(made) == read(Path(step))
    moment = f"optimizer.state.exp_avg.{'decoder.layers.self_attention.linear_proj.weight'}"
    state = {moment: torch.zeros(2, 16, 16)}
    dcp.load(state, checkpoint_id=made)
    whole = whole_state("llama")
    parts = [whole[f"decoder.layers.{at}.self_attention.linear_proj.weight"] for at in range(2)]
    assert torch.equal(state[moment], torch.stack(parts) + 1)


def test_flat_ranges_of_an_optimizer_lose_no_shape_unsaid(sample, tmp_path) -> None:
    step, _ = sample("llama-0.15.3-dp2")
    with pytest.raises(UsageError, match="9 tensors are flat ranges of blocks") as caught:
        api.reshard(step, tmp_path / "made", mesh="dp_shard=2")
    (glob,) = re.findall(r"--exclude '([^']+)'", str(caught.value.hint))
    assert api.reshard(step, tmp_path / "made", mesh="dp_shard=2", exclude=[glob]).num_tensors == 9


def test_buckets_of_an_optimizer_are_said_and_kept(sample, tmp_path, capsys) -> None:
    step, _ = sample("llama-0.16.1-tp2")
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.exp_avg"
    state = {"output_layer.weight": torch.ones(4, 4), bucket: torch.arange(64.0)}
    Path(step, ".metadata").unlink()
    dcp.save(state, checkpoint_id=step)
    assert main(["reshard", step, str(tmp_path / "made"), "--mesh", "dp_shard=2"]) == 0
    assert "1 tensors of optimizer state are Megatron's buckets" in capsys.readouterr().err
    assert read(tmp_path / "made") == read(Path(step))


def test_step_of_nemo_is_opened_at_its_weights(sample, tmp_path, capsys) -> None:
    step, hub = sample("qwen2-0.16.1-tp2-layers")
    nemo = tmp_path / "model_name=0--val_loss=1.00-step=9"
    (nemo / "context").mkdir(parents=True)
    (nemo / "context" / "io.json").write_text("{}")
    Path(step).rename(nemo / "weights")
    assert main(["verify", str(nemo), "-q"]) == 0
    assert main(["gather", str(nemo), str(tmp_path / "hf"), "--assets", hub]) == 0
    assert "reads weights/ of NeMo's step" in capsys.readouterr().err
    assert is_same_model("qwen2", str(tmp_path / "hf"))


def test_directory_of_a_run_names_the_last_whole_step(sample, tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number in (200, 100):
        step, _ = sample("qwen2-0.16.1-tp2-layers")
        Path(step).rename(run / f"iter_0000{number}")
    (run / "latest_checkpointed_iteration.txt").write_text("200")
    (run / "iter_0000200" / ".metadata").unlink()
    with pytest.raises(UnreadableError, match="a directory of checkpoints") as caught:
        api.open_checkpoint(run)
    assert caught.value.hint == f"use {run}/iter_0000100"
    with pytest.raises(UnreadableError, match="killed before it finished"):
        api.open_checkpoint(run / "iter_0000200")


def test_metadata_json_of_somebody_else_leaves_it_a_dcp_checkpoint(tmp_path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    for text in ("{}", '{"total_size": 8}', "[]"):
        (tmp_path / "metadata.json").write_text(text)
        assert api.open_checkpoint(tmp_path).format == "dcp"
    for backend in (
        {"sharded_backend": "fsdp_dtensor"},
        {"sharded_backend": "torch_dist", "sharded_backend_version": 2},
    ):
        (tmp_path / "metadata.json").write_text(json.dumps(backend))
        with pytest.raises(UnreadableError, match=backend["sharded_backend"]) as caught:
            api.open_checkpoint(tmp_path)
        assert "--from dcp" in str(caught.value.hint)
        assert main(["verify", str(tmp_path), "--from", "dcp", "-q"]) == 0


def note(step: str, **settings: object) -> None:
    """Save common.pt as Megatron-LM does, with these of its arguments."""
    args = argparse.Namespace(num_attention_heads=4, **settings)
    torch.save({"args": args, "iteration": 100, "checkpoint_version": 3.0}, Path(step, "common.pt"))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"apply_layernorm_1p": True}, "trained with apply_layernorm_1p: weights of norms are stored minus 1"),
        ({"rotary_interleaved": True}, "rows of queries and keys"),
        ({"attention_output_gate": True}, "rows of gates"),
        ({"group_query_attention": True, "num_query_groups": 1}, "num_key_value_heads is 2 in config.json"),
        ({"group_query_attention": False, "num_query_groups": 1}, "trained with num_query_groups 4"),
        ({"kv_channels": 8}, "head_dim is 4"),
    ],
)
def test_settings_under_which_the_names_mean_other_rows_are_refused(settings, what, sample, tmp_path) -> None:
    step, hub = sample("llama-0.16.1-tp2")
    note(step, **settings)
    with pytest.raises(UsageError, match=what):
        api.gather(step, tmp_path / "hf", assets=hub)
    assert api.gather(step, tmp_path / "own", names="live").num_tensors == 9


def test_settings_that_config_json_contradicts_are_said_and_others_are_not(sample, tmp_path) -> None:
    step, hub = sample("llama-0.16.1-tp2")
    config = json.loads(Path(hub, "config.json").read_text())
    theta = config["rope_parameters"]["rope_theta"]
    note(step, rotary_base=int(theta), norm_epsilon=1e-6, group_query_attention=True, num_query_groups=2, kv_channels=4)
    assert api.gather(step, tmp_path / "right", assets=hub).warnings == ()
    note(step, rotary_base=500000, norm_epsilon=1e-6)
    (warning,) = api.gather(step, tmp_path / "wrong", assets=hub).warnings
    assert "trained with rotary_base 500000" in warning


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("model:\n  layernorm_zero_centered_gamma: true\n", "trained with layernorm_zero_centered_gamma"),
        ("model:\n  num_attention_heads: 4\n  num_query_groups: 4\n", "num_key_value_heads is 2"),
        ("model:\n  _target_: x.LlamaModelProvider\n  num_attention_heads: 4\n  num_query_groups: 2\n", None),
        ("model: !!python/object/new:os.system [x]\n", "config.json was trusted"),
    ],
)
def test_settings_of_megatron_bridge_are_held_against_config_json(text: str, what, sample, tmp_path) -> None:
    step, hub = sample("llama-0.16.1-tp2")
    Path(step, "common.pt").unlink()
    Path(step, "run_config.yaml").write_text(text)
    try:
        done = api.gather(step, tmp_path / "hf", assets=hub)
        said = [one for one in (*done.warnings, *done.notes) if "config.json" in one]
    except UsageError as error:
        said = [error.what]
    assert [what in one for one in said] == [True] * (what is not None)


def test_name_of_the_format_opens_a_step_without_its_metadata_json_and_nothing_else(sample, tmp_path) -> None:
    step, hub = sample("llama-0.16.1-tp2")
    Path(step, "metadata.json").unlink()
    assert api.open_checkpoint(step).format == "dcp"
    with pytest.raises(UsageError, match="several matrices in one tensor"):  # nobody says who cut them
        api.gather(step, tmp_path / "hf", assets=hub)
    assert main(["gather", step, str(tmp_path / "hf"), "--assets", hub, "--from", "torch-dist", "-q"]) == 0
    assert is_same_model("llama", str(tmp_path / "hf"))
    with pytest.raises(UnreadableError, match="metadata"):
        api.open_checkpoint(hub, format="torch-dist")


def test_common_state_is_not_run(sample, tmp_path) -> None:
    step, _ = sample("llama-0.16.1-tp2")

    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"args": Attack()}, Path(step, "common.pt"))
    assert api.open_checkpoint(step).format == "torch-dist"
    assert main(["verify", step, "-q"]) == 3
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("damage", ["gone", "short", "pickle"])
def test_common_state_that_megatron_cannot_load_is_a_finding_and_the_weights_are_read(damage, sample, tmp_path) -> None:
    step, hub = sample("llama-0.16.1-tp2")
    file = Path(step, "common.pt")
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[:-100] if damage == "short" else content.replace(b"num_layers", b"num_layerz"))
    (finding,) = api.verify(step).findings
    assert (finding.code, finding.severity, finding.where) == ("not-resumable", "error", "common.pt")
    api.gather(step, tmp_path / "hf", assets=hub)
    assert is_same_model("llama", str(tmp_path / "hf"))


def test_common_state_inside_of_the_checkpoint_is_looked_for_nowhere_else(tmp_path) -> None:
    """As Megatron-core after 0.16 saves it: a ShardedObject."""
    dcp.save({"w": torch.ones(2), "common_state/shard_0_1": {"iteration": 1}}, checkpoint_id=tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    assert api.verify(tmp_path).findings == ()


@pytest.mark.parametrize("name", ["llama-0.15.3-dp2", "deepseek_v3-0.16.1-ep2-layers"])
def test_metadata_with_changed_bytes_is_read_or_refused(name: str) -> None:
    with zipfile.ZipFile(SAMPLES / f"{name}.zip") as archive:
        sound = archive.read(".metadata")
    chance = random.Random(0)
    refused = 0
    for _ in range(150):
        changed = bytearray(sound)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            parse_metadata(bytes(changed))
        except CkptError:
            refused += 1
    assert refused > 50


def test_zarr_step_of_megatron_is_named(tmp_path) -> None:
    """As megatron-core before 0.16 saved with --dist-ckpt-format zarr."""
    for name in ("common.pt", "metadata.json", "embedding.word_embeddings.weight/.zarray"):
        path = tmp_path / "iter_0000100" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for path in (tmp_path / "iter_0000100", tmp_path):
        with pytest.raises(ForeignLayoutError, match="zarr") as caught:
            api.open_checkpoint(path)
        assert "torch_dist" in str(caught.value.hint)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("llama", ["tp=2", "pp=2"]),
        ("qwen2", ["tp=2"]),
        ("qwen3", ["pp=2", "layers"]),
        ("qwen3_moe", ["tp=2", "ep=2", "layers"]),
        ("deepseek_v3", ["tp=2"]),
    ],
)
def test_megatron_saves_and_loads_again_what_ckpt_resharded(kind: str, asked: list[str], tmp_path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    assert kind in KINDS
    step, hub = str(tmp_path / "iter"), str(tmp_path / "hub")
    hub_model(kind).save_pretrained(hub)
    recipe = [sys.executable, "-m", "formats.megatron_ranks"]
    subprocess.run([*recipe, step, kind, *asked], check=True, cwd=Path(__file__).parents[1], timeout=300)
    assert main(["gather", step, str(tmp_path / "hf"), "--assets", hub, "-q"]) == 0
    assert is_same_model(kind, str(tmp_path / "hf"))
    api.reshard(step, tmp_path / "made", mesh="dp_shard=3")
    layers = [word for word in asked if word == "layers"]
    loaded = [*recipe, str(tmp_path / "made"), kind, "load", *layers]
    subprocess.run(loaded, check=True, cwd=Path(__file__).parents[1], timeout=300)
