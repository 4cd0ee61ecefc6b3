"""Every layout of the ecosystem is named, with the way out."""

import io
import json
import re
import shlex
import tarfile
from pathlib import Path

import pytest
import torch
from samples import safetensors_bytes, tensor, write_model

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.file_names import is_hf_asset, is_weights
from ckpt_tools.checkpoint.formats.table import detect_format
from ckpt_tools.checkpoint.formats.unsupported import explain
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError


def detect(files: dict[str, int], *, path: str):
    if (found := detect_format(files, is_file=False)) is None:
        raise explain(files, path)
    return found


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((".metadata", "__0_0.distcp"), "dcp"),
        ((".metadata", "model.safetensors"), "dcp"),
        ((".metadata",), "dcp"),
        (("model.safetensors",), "hf"),
        (("model.safetensors.index.json", "model-00001-of-00002.safetensors"), "hf"),
        (("anything.safetensors",), "hf"),
        (("diffusion_pytorch_model.safetensors", "config.json"), "hf"),
        (("shard-00001-model-00001-of-00001.safetensors",), "hf-sharded"),
        (("pytorch_model.bin", "config.json", "training_args.bin"), "torch-dir"),
        (("pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"), "torch-dir"),
        (("pytorch_model.bin", "model.safetensors"), "hf"),
        (("pytorch_model_fsdp.bin", "optimizer.bin"), "torch-dir"),
        (("last.ckpt",), "torch-dir"),
        (("consolidated.00.pth", "params.json"), "torch-dir"),
        (("model_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt", "huggingface/config.json"), "ranks"),
        (("actor/model_world_size_2_rank_0.pt", "critic/model_world_size_2_rank_0.pt", "data.pt"), "ranks"),
        (("pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin", "scheduler.bin"), "ranks"),
        (("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0_rank0.bin"), "step"),
    ],
)
def test_detect_of_known_files_is_their_format(files, expected: str) -> None:
    assert detect(dict.fromkeys(files, 1), path="p").name == expected


def _layouts() -> dict[str, list[str]]:
    """Name → files, what is said, what the hint says."""
    lines = Path(__file__).with_name("layouts.txt").read_text(encoding="utf-8").splitlines()[1:]
    return {name: rest for name, *rest in ([cell.strip() for cell in line.split("|")] for line in lines)}


LAYOUTS = _layouts()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_another_kind_is_named_with_a_hint(layout: str, tmp_path: Path, capsys) -> None:
    files, what, hint = LAYOUTS[layout]
    directory = tmp_path / "source"
    directory.mkdir()
    for name in files.split():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    assert main(["inspect", str(directory)]) == 4
    err = capsys.readouterr().err
    assert what in err
    assert hint.format(path=directory) in err
    assert f"at: {directory}" in err


def test_layout_of_a_parent_hint_opens(tmp_path: Path) -> None:
    """The hint is followed and works."""
    write_model(tmp_path / "model")
    (tmp_path / "runs").mkdir()
    for step in (9, 10):
        api.shard(tmp_path / "model", tmp_path / "runs" / f"step-{step}", mesh="dp_shard=2")
    with pytest.raises(UnreadableError) as caught:
        api.open_checkpoint(tmp_path / "runs")
    hint = str(caught.value.hint).removeprefix("use ")
    assert api.open_checkpoint(hint).format == "dcp"
    assert hint.endswith("step-10")


def test_config_without_weights_is_led_to_what_reads_it(tmp_path: Path, capsys) -> None:
    """The hint is followed and works."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 4
    (command,) = re.findall("hint: ckpt (.*) says what", capsys.readouterr().err)
    assert main(shlex.split(command)) == 0


NESTED = {
    "trainer-deepspeed": (
        ("checkpoint-9/latest", "checkpoint-10/latest", "checkpoint-10/global_step10/mp_rank_00_model_states.pt"),
        "",
        "a directory of checkpoints",
    ),
    "killed-save": (("step-10/__0_0.distcp",), "step-10", "the save was killed"),
}


@pytest.mark.parametrize("layout", NESTED)
def test_layout_in_a_directory_below_is_named_there(layout: str) -> None:
    files, child, what = NESTED[layout]
    with pytest.raises(UnreadableError, match=what) as caught:
        detect(dict.fromkeys(files, 1), path="run/")
    assert caught.value.where == f"run/{child}".rstrip("/")
    assert caught.value.hint


PARENTS = {
    "readable-beside-killed": (("step-9/.metadata", "step-10/__0_0.distcp", "data.pt"), "step-9"),
    "trainer-full-state-dict": (
        ("checkpoint-10/pytorch_model_fsdp.bin", "checkpoint-10/optimizer.bin"),
        "checkpoint-10",
    ),
    "trainer-pickled": (("checkpoint-2/pytorch_model.bin", "training_args.bin"), "checkpoint-2"),
    "verl": (
        (
            *("latest_checkpointed_iteration.txt", "global_step_9/data.pt"),
            *(f"global_step_{n}/{role}/model_world_size_1_rank_0.pt" for role in ("actor", "critic") for n in (9, 10)),
        ),
        "global_step_10",
    ),
}


@pytest.mark.parametrize("parent", PARENTS)
def test_parent_of_steps_that_are_read_names_the_latest(parent: str) -> None:
    files, child = PARENTS[parent]
    with pytest.raises(UnreadableError, match="a directory of checkpoints") as caught:
        detect(dict.fromkeys(files, 1), path="run")
    assert caught.value.hint == f"use run/{child}"


FILES = {
    "model.safetensors": ("with the name of another kind", "--from torch"),
    "model_world_size_2_rank_0.pt": ("one rank's part", "pass the directory: {path}"),
    "pytorch_model_fsdp_0_rank1.bin": ("one rank's part", "pass the directory: {path}"),
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": ("one rank's part", "pass the directory: {path}"),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_file_that_torch_saved_by_a_name_that_says_more_is_named(name: str, legacy: bool, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / name, _use_new_zipfile_serialization=not legacy)
    what, hint = FILES[name]
    for source in (tmp_path / name, tmp_path) if name == "model.safetensors" else (tmp_path / name,):
        with pytest.raises(UnreadableError, match=what) as caught:
            api.open_checkpoint(source)
        assert caught.value.where == str(tmp_path / name)
        assert hint.format(path=tmp_path) in str(caught.value.hint)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["model.pt", "model.pth", "last.ckpt", "model.bin", "no-ending", "weights.pth.tar"])
def test_file_that_torch_saved_is_read_whatever_its_ending(name: str, legacy: bool, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / name, _use_new_zipfile_serialization=not legacy)
    found = api.open_checkpoint(tmp_path / name)
    assert (found.format, [entry.fqn for entry in found.tensors]) == ("torch", ["w"])


_NPZ = b"PK\3\4" + bytes(22) + b"\5\0\0\0a.npy"


@pytest.mark.parametrize(
    ("name", "content", "what", "hint"),
    [
        ("x.distcp", b"x", "a part of a checkpoint", "pass the directory"),
        ("model.bin", b"x", "not one that torch.save wrote whole", "pass a safetensors"),
        ("model.gguf", b"GGUF\3\0\0\0", "a GGUF file", "that it was converted from"),
        ("tf_model.h5", b"\x89HDF\r\n\x1a\n", "an HDF5 file", "save it as safetensors"),
        ("arrays.npz", _NPZ, "numpy or MLX arrays", "safetensors.numpy.save_file"),
        ("array.npy", b"\x93NUMPY\1\0", "a numpy array", "numpy.load"),
        ("model.pdparams", b"\x80\4}q\0.", "Paddle weights", "paddle.load"),
        ("flax_model.msgpack", b"\x81\xa6params\x80", "flax weights", "from_flax=True"),
        ("model.onnx", b"\x08\x08\x12\x07pytorch", "an ONNX graph", "exported from"),
        ("model.keras", b"PK\3\4" + bytes(30), "a Keras model", "keras.models.load_model"),
        ("model.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:", "a Git LFS pointer", "git lfs pull"),
        ("model.pt", b"\x1f\x8b\x08", "a gzip file", "unpack it"),
        ("notes.txt", b"x", "not a safetensors file", "pass a safetensors"),
        ("empty", b"", "not a safetensors file", "pass a safetensors"),
    ],
)
def test_file_that_is_no_safetensors_is_refused(
    name: str, content: bytes, what: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableError, match=what) as caught:
        api.open_checkpoint(tmp_path / name)
    assert hint in str(caught.value.hint)


def test_program_of_torch_is_named(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "x.pt2")
    with pytest.raises(UnreadableError, match=r"an archive of torch\.export") as caught:
        api.open_checkpoint(tmp_path / "x.pt2")
    assert "torch.export.load" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("member", "name", "what"),
    [
        ("sys_info", "resnet.pth", "a tar that torch before 0.1.10 saved"),
        ("model_weights.ckpt", "model.nemo", "a NeMo 1 archive"),
        ("weights.safetensors", "model.tar", "a tar archive"),
    ],
)
def test_tar_is_named_by_what_it_begins_with(member: str, name: str, what: str, tmp_path: Path) -> None:
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / name, "w", format=form) as archive:
            archive.addfile(tarfile.TarInfo(member), io.BytesIO())
        with pytest.raises(UnreadableError, match=what) as caught:
            api.open_checkpoint(tmp_path / name)
        assert "again" in str(caught.value.hint) or "unpack it" in str(caught.value.hint)


def test_readable_checkpoint_wins_over_another_framework_s_files_beside_it() -> None:
    for files in (
        ("config.json", "flax_model.msgpack", "model.safetensors", "onnx/model.onnx"),
        ("config.json", "tf_model.h5", "pytorch_model.bin"),
        (".metadata", "__0_0.distcp", "export/saved_model.pb"),
    ):
        assert detect(dict.fromkeys(files, 1), path="model").name in ("hf", "torch-dir", "dcp")
    with pytest.raises(UnreadableError, match="a directory of checkpoints"):
        detect(dict.fromkeys(("step-1/.metadata", "export/saved_model.pb"), 1), path="run")


def test_safetensors_of_several_models_need_a_choice(tmp_path: Path) -> None:
    for name in ("adapter.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes({"w": tensor("U8", 2)}))
    with pytest.raises(UnreadableError, match="no index tells which") as caught:
        api.open_checkpoint(tmp_path)
    assert "adapter.safetensors" in str(caught.value.hint)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"m": tensor("U8", 2)}))
    assert [entry.fqn for entry in api.open_checkpoint(tmp_path).tensors] == ["m"]


@pytest.mark.parametrize(
    ("name", "weights", "asset"),
    [
        ("config.json", False, True),
        ("tokenizer.model", False, True),
        ("tokenizer_config.json", False, True),
        ("modeling_x.py", False, True),
        ("preprocessor_config.json", False, True),
        ("chat_template.jinja", False, True),
        ("1_Pooling/config.json", False, True),
        ("model.safetensors", True, False),
        ("sub/model.safetensors", True, False),
        ("model.safetensors.index.json", True, False),
        ("pytorch_model.bin.index.json", True, False),
        (".metadata", True, False),
        ("__0_0.distcp", True, False),
        ("rng_state_0.pth", True, False),
        ("events.out.tfevents", False, False),
    ],
)
def test_names_of_weights_and_assets(name: str, weights: bool, asset: bool) -> None:
    assert is_weights(name) == weights
    assert is_hf_asset(name) == asset


def test_verl_hint_points_at_weights_only_where_there_are_some() -> None:
    rank = {"optim_world_size_1_rank_0.pt": 9, "huggingface/config.json": 2}
    with pytest.raises(UnreadableError) as caught:
        detect(rank, path="run/actor/")
    assert "huggingface" not in str(caught.value.hint)
    with pytest.raises(UnreadableError) as caught:
        detect(rank | {"huggingface/model.safetensors": 9}, path="run/actor")
    assert caught.value.hint == "use run/actor/huggingface, which holds the model's weights"
