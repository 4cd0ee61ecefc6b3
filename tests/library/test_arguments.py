"""What the functions take in place of text: paths, meshes, dtypes, the command line's words; what they raise."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from library.world import params

import ckpt_tools
from ckpt_tools.adapters.ecosystems.output import Output, staged
from ckpt_tools.checkpoint.layout import mesh_text, parse_mesh
from ckpt_tools.cli import main
from ckpt_tools.convert.finish import kept_or_discarded
from ckpt_tools.errors import DestinationExistsError, MissingError, UnreadableError, UsageError
from ckpt_tools.storage import shared_staging
from ckpt_tools.storage.claim import claim_directory
from ckpt_tools.storage.staging import Staging

DEVICE_MESH = SimpleNamespace(mesh_dim_names=("dp_replicate", "dp_shard"), shape=(2, 4))
UNNAMED = SimpleNamespace(mesh_dim_names=None, shape=(8,))
EIGHT = (8, np.int64(8), "8", "dp_shard=8", {"dp_shard": 8}, {"fsdp": 8}, UNNAMED, parse_mesh("dp=8"))


@pytest.mark.parametrize(
    "mesh", [8, np.int64(8), "8", "dp_shard=8", {"dp_shard": 8}, {"fsdp": 8}, UNNAMED, parse_mesh("dp=8")]
)
def test_mesh_is_a_number_text_a_mapping_or_a_mesh(mesh: Any, world: Path) -> None:
    assert str(ckpt_tools.inspect(world / "model", mesh=mesh).mesh) == "dp_shard=8"
    assert ckpt_tools.estimate(params="1B", layers=2, hidden=64, mesh=mesh).cases[0].case.mesh == parse_mesh("dp=8")


def test_mesh_of_torch_is_taken_by_its_names(world: Path, tmp_path: Path) -> None:
    found = ckpt_tools.shard(world / "model", tmp_path / "out", mesh=DEVICE_MESH)
    assert found.published
    assert str(ckpt_tools.inspect(tmp_path / "out").mesh) == "dp_replicate=2,dp_shard=4"


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        (3.5, "mesh must be a number, text, a mapping or a mesh, got 3.5"),
        (True, "not an axis of a mesh"),
        ({"width": 2}, "unknown mesh axis"),
        ({}, "not an axis of a mesh"),
        (0, "must be at least 1"),
        (SimpleNamespace(mesh_dim_names=None, shape=(2, 4)), "have no names"),
        (SimpleNamespace(mesh_dim_names=("batch",), shape=(2,)), "unknown mesh axis"),
    ],
)
def test_what_is_no_mesh_is_refused(mesh: Any, says: str, world: Path) -> None:
    with pytest.raises(UsageError, match=says):
        ckpt_tools.inspect(world / "model", mesh=mesh)


def test_device_mesh_is_what_torch_has() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        named = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_shard", "tp"))
        assert mesh_text(named) == "dp_shard=2,tp=4"
        assert mesh_text(init_device_mesh("cpu", (8,))) == "dp_shard=8"
        assert mesh_text(named["tp"]) == "tp=4"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "bf16", "torch.bfloat16"])
def test_dtype_is_one_of_torch_or_its_name(dtype: Any, world: Path, tmp_path: Path) -> None:
    ckpt_tools.gather(world / "model-dp8", tmp_path / "out", dtype=dtype)
    assert ckpt_tools.identify(tmp_path / "out").dtypes.keys() == {"BF16"}


@pytest.mark.parametrize("dtype", [torch.int8, 3, "bf17"])
def test_what_is_no_dtype_is_refused_with_those_that_are(dtype: Any, world: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"'{str(dtype).removeprefix('torch.')}' is not a dtype.*keep, bf16, f16, f32"):
        ckpt_tools.gather(world / "model-dp8", tmp_path / "out", dtype=dtype)


def test_command_line_takes_the_same_words(world: Path, tmp_path: Path) -> None:
    argv = ["shard", str(world / "model"), str(tmp_path / "out"), "--mesh", "4", "--dtype", "bfloat16", "-q"]
    assert main(argv) == 0
    assert str(ckpt_tools.inspect(tmp_path / "out").mesh) == "dp_shard=4"


class Place:
    """An `os.PathLike` that is no `Path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def calls(world: Path, out: Path, take: Callable[[Path], Any]) -> dict[str, Callable[[], Any]]:
    """Every function with a path in every argument that takes one."""
    model, sharded, adapter = take(world / "model"), take(world / "model-dp8"), take(world / "adapter")
    config = take(world / "model" / "config.json")
    c = ckpt_tools
    return {
        "average": lambda: c.average([model, take(world / "tuned")], take(out / "average")),
        "check_lora": lambda: c.check_lora(adapter, base=model),
        "diff": lambda: c.diff(model, sharded),
        "estimate": lambda: c.estimate(model, mesh=2),
        "export_lora": lambda: c.export_lora(adapter, take(out / "export"), base=model),
        "extract": lambda: c.extract(model, take(out / "extract"), include="**.embed_tokens.*"),
        "gather": lambda: c.gather(sharded, take(out / "gather"), assets=model, like=model),
        "identify": lambda: c.identify(model),
        "inspect": lambda: c.inspect(model, map=take(world / "names.txt")),
        "merge_lora": lambda: c.merge_lora(model, [adapter], take(out / "merge")),
        "merge one": lambda: c.merge_lora(model, adapter, take(out / "merge-one")),
        "open_checkpoint": lambda: c.open_checkpoint(model),
        "preflight": lambda: c.preflight(take(world / "train.toml"), model=model, only="rules"),
        "preflight many": lambda: c.preflight([take(world / "train.toml")], only=["rules"]),
        "prune": lambda: c.prune(take(world / "run"), keep_last=9, dry_run=True, also_used_by=[take(world)]),
        "rename": lambda: c.rename(model, take(out / "rename"), map=take(world / "names.txt")),
        "reshard": lambda: c.reshard(
            sharded, take(out / "reshard"), mesh="dp_shard=2,tp=2", tp_plan="auto", assets=model
        ),
        "scan": lambda: c.scan(model),
        "shard": lambda: c.shard(model, take(out / "shard"), mesh=2, rules=take(_rules(out))),
        "smoke": lambda: c.smoke(model, model=config, steps=1, nproc=1),
        "stats": lambda: c.stats(model, against=sharded),
        "verify": lambda: c.verify(model, against=sharded),
        "watch": lambda: c.watch(take(world / "run"), status=True, gather=take(out / "g"), assets=model),
    }


def _rules(out: Path) -> Path:
    (out / "rules.yaml").write_text("version: 1\nrules: []\n")
    return out / "rules.yaml"


@pytest.mark.parametrize("name", params(((name,) for name in calls(Path(), Path(), Place)), pytest.mark.zoo))
def test_paths_are_taken_as_they_come(name: str, world: Path, tmp_path: Path) -> None:
    assert calls(world, tmp_path, Place)[name]()


@pytest.mark.parametrize("wrong", [5, b"model", 1.5, object()])
def test_what_is_no_path_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"source must be a path, got .*os\.PathLike"):
        ckpt_tools.verify(wrong)
    with pytest.raises(UsageError, match="sources must be a path"):
        ckpt_tools.average([wrong], "out")


def test_paths_of_what_writes_elsewhere_are_taken(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="no conversion is in progress"):
        ckpt_tools.commit(Place(tmp_path / "out"))
    with pytest.raises(MissingError, match="no such file or directory"):
        ckpt_tools.push(Place(tmp_path / "out"), "me/model")


def test_one_of_what_can_be_several_is_not_taken_letter_by_letter(world: Path) -> None:
    assert ckpt_tools.inspect(world / "model", include="lm_head.weight").num_tensors == 1


def test_words_of_the_command_line_are_taken(world: Path) -> None:
    assert ckpt_tools.verify(world / "model-dp8", from_="dcp", for_="weights").ok  # type: ignore[call-arg]
    assert ckpt_tools.verify(world / "model-dp8", format="dcp", purpose="weights").ok
    with pytest.raises(UsageError, match="given twice"):
        ckpt_tools.verify(world / "model-dp8", from_="dcp", format="dcp")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="--for must be one of resume, weights"):
        ckpt_tools.verify(world / "model-dp8", for_="fun")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"verify\(\) has no .fro_.; it takes source, .*from_"):
        ckpt_tools.verify(world / "model-dp8", fro_="dcp")  # type: ignore[call-arg]


MISSING: dict[str, Callable[[Path, Path], Any]] = {
    "verify": lambda no, _: ckpt_tools.verify(no),
    "inspect": lambda no, _: ckpt_tools.inspect(no),
    "open_checkpoint": lambda no, _: ckpt_tools.open_checkpoint(no),
    "identify": lambda no, _: ckpt_tools.identify(no),
    "scan": lambda no, _: ckpt_tools.scan(no),
    "stats": lambda no, _: ckpt_tools.stats(no),
    "diff": lambda no, world: ckpt_tools.diff(world / "model", no),
    "against": lambda no, world: ckpt_tools.verify(world / "model", against=no),
    "shard": lambda no, world: ckpt_tools.shard(no, world / "x", mesh=2),
    "gather": lambda no, world: ckpt_tools.gather(no, world / "x"),
    "average": lambda no, world: ckpt_tools.average([world / "model", no], world / "x"),
    "merge_lora": lambda no, world: ckpt_tools.merge_lora(world / "model", no, world / "x"),
    "check_lora": lambda no, _: ckpt_tools.check_lora(no),
    "push": lambda no, _: ckpt_tools.push(no, "me/model"),
    "watch": lambda no, _: ckpt_tools.watch(no, once=True),
    "preflight": lambda no, _: ckpt_tools.preflight(no),
    "smoke": lambda no, _: ckpt_tools.smoke(no),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_source_is_a_file_not_found_error(name: str, world: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such") as caught:
        MISSING[name](tmp_path / "nowhere", world)
    assert isinstance(caught.value, UnreadableError)
    assert isinstance(caught.value, MissingError)
    assert caught.value.exit_code == 4
    assert str(tmp_path / "nowhere") in str(caught.value)


def test_what_is_there_and_not_readable_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(UnreadableError) as caught:
        ckpt_tools.verify(tmp_path / "bad.safetensors")
    assert not isinstance(caught.value, OSError)


def test_destination_that_exists_is_a_file_exists_error(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    writers: list[Callable[[], Any]] = [
        lambda: ckpt_tools.gather(world / "model-dp8", out),
        lambda: ckpt_tools.shard(world / "model", out, mesh=2, part="0/2"),
        lambda: ckpt_tools.export_lora(world / "adapter", out),
        lambda: ckpt_tools.merge_lora(world / "model", world / "adapter", out),
    ]
    for write in writers:
        with pytest.raises(FileExistsError) as caught:
            write()
        assert isinstance(caught.value, DestinationExistsError)
        assert caught.value.exit_code == 5
        assert "hint: choose another" in str(caught.value)
    assert os.listdir(out) == ["mine"]


def test_destination_that_another_ckpt_writes_to_is_refused_as_such(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_staging, "_PATIENCE_S", 0.0)
    _, lock = claim_directory(str(tmp_path / "out"))
    try:
        for write in (
            lambda: ckpt_tools.gather(world / "model-dp8", tmp_path / "out"),
            lambda: ckpt_tools.shard(world / "model", tmp_path / "out", mesh=2, part="0/2"),
            lambda: ckpt_tools.export_lora(world / "adapter", tmp_path / "out"),
        ):
            with pytest.raises(DestinationExistsError, match="another ckpt is writing"):
                write()
    finally:
        os.close(lock)


def test_destination_that_appears_meanwhile_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, begin = tmp_path / "out", Staging.begin

    def late(staging: Staging) -> None:
        out.mkdir(exist_ok=True)
        begin(staging)

    monkeypatch.setattr(Staging, "begin", late)
    output = Output(file="x", items=(), metadata={}, documents={})
    lent = staged(str(out), output, overwrite=False)
    with pytest.raises(DestinationExistsError, match="the destination exists"):
        lent.__enter__()


def test_command_line_says_the_same_of_both(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "nowhere")]) == 4
    assert capsys.readouterr().err == f"error: no such file or directory\n   at: {tmp_path}/nowhere\n"
    assert main(["gather", str(world / "model-dp8"), str(world / "model")]) == 5
    assert capsys.readouterr().err.startswith(f"error: the destination exists\n   at: {world}/model\n hint: ")


@pytest.mark.parametrize("kind", [MissingError, DestinationExistsError])
def test_what_is_missing_or_there_in_a_conversion_is_no_fault_of_the_disk(kind: type[Exception]) -> None:
    sink: Any = SimpleNamespace(destination="out", num_kept=1, is_published=False, discard=lambda: None)
    with pytest.raises(kind, match="it is so"), kept_or_discarded(sink):
        raise kind("it is so")
