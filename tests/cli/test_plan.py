"""The plan of `--dry-run` and the result: the same files, and the same sizes where they can be known."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import call
from samples import MODEL, shard_model, write_model

from ckpt_tools import api

CONFIG = {"config.json": b'{"dtype": "float32"}', "empty.txt": b"", "sub/chat.jinja": b"\xc3\xa9"}
NAMES = {**MODEL, 'model.\u00e9."weight"': MODEL["model.embed.weight"]}


def sizes_of(directory: Path) -> dict[str, int]:
    return {str(p.relative_to(directory)): p.stat().st_size for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "many", NAMES, num_files=2, assets=CONFIG)


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    api.shard(model, tmp_path / "run", mesh="dp_shard=2,tp=2", set=["**.up.weight=tp:S(0)"], num_workers=1)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bf16"},
        {"max_shard_size": "300B"},
        {"include": ["**.up.weight"], "dtype": "f32"},
        {"like": True},
        {"assets": True},
    ],
    ids=str,
)
def test_gather_writes_what_its_plan_says(options: dict, run: Path, model: Path, tmp_path: Path) -> None:
    options = {name: model if value is True else value for name, value in options.items()}
    out = tmp_path / "out"
    planned = api.gather(run, out, dry_run=True, **options)
    result = api.gather(run, out, **options)
    assert dict(planned.files) == dict(result.files) == sizes_of(out)
    assert planned.files == result.files
    assert planned.bytes_written == result.bytes_written == sum(sizes_of(out).values())


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"prefix": "app."}], ids=str)
@pytest.mark.parametrize("verb", ["shard", "reshard"])
def test_sharding_writes_what_its_plan_says(verb: str, options: dict, run: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def convert(*, dry_run: bool):
        source = model if verb == "shard" else run
        return getattr(api, verb)(source, out, mesh="dp_replicate=2,dp_shard=3", dry_run=dry_run, **options)

    planned, result = convert(dry_run=True), convert(dry_run=False)
    on_disk = sizes_of(out)
    assert dict(result.files) == on_disk
    assert result.bytes_written == sum(on_disk.values())
    assert [name for name, _ in planned.files] == [name for name, _ in result.files]
    expected = dict(planned.files)
    assert on_disk[".metadata"] <= expected.pop(".metadata")
    assert abs(on_disk["ckpt_manifest.json"] - expected.pop("ckpt_manifest.json")) <= 2  # digits of .metadata's size
    assert expected == {name: on_disk[name] for name in expected}


@pytest.mark.full
def test_sharding_with_torch_s_writer_writes_the_files_of_its_plan(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    planned = api.shard(source, tmp_path / "out", mesh="dp_shard=2", engine="dtensor", dry_run=True)
    result = call(api.shard, source, tmp_path / "out", mesh="dp_shard=2", engine="dtensor")
    assert (
        {name for name, _ in planned.files} == {name for name, _ in result.files} == sizes_of(tmp_path / "out").keys()
    )
    assert dict(result.files) == sizes_of(tmp_path / "out")


def test_plan_of_a_trainer_s_checkpoint_without_a_manifest_is_what_is_written(tmp_path: Path) -> None:
    run = shard_model(tmp_path)
    (run / "ckpt_manifest.json").unlink()
    planned = api.gather(run, tmp_path / "out", dry_run=True)
    assert dict(planned.files) == dict(api.gather(run, tmp_path / "out").files) == sizes_of(tmp_path / "out")
