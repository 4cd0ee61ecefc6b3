"""`verify --level structure` finds every file that is missing, short, long, empty, in another's place, or strange."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from corrupt import damage
from corrupt.every_byte import LAYOUTS, made
from samples import MODEL, shard_model, tensor

from ckpt_tools import api
from ckpt_tools.errors import UnreadableError

WITH_MANIFEST = [name for name in LAYOUTS if name.endswith("-manifest")]


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "short": lambda path: damage.truncate(path, 1),
    "empty": lambda path: damage.truncate(path, path.stat().st_size),
    "long": lengthen,
}


def findings(path: Path) -> list[str]:
    """Codes of what is found; "unreadable" when the checkpoint cannot even be opened."""
    try:
        return [finding.code for finding in api.verify(path, level="structure", num_workers=1).findings]
    except UnreadableError:
        return ["unreadable"]


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_file_damaged_as_a_whole_is_found(layout: str, kind: str) -> None:
    # Without a manifest an asset is just there or not; without a manifest there is none to lose.
    spared = {"config.json"} if layout not in WITH_MANIFEST else {"ckpt_manifest.json"} if kind == "missing" else set()
    if layout == "hf-sharded" and kind == "missing":
        spared |= {"shard-00002-model-00001-of-00001.safetensors"}  # its end: see the document
    with made(layout) as path:
        names = sorted({entry.name for entry in path.iterdir()} - spared)
        assert len(names) >= 1
        assert findings(path) == []
        for name in names:
            if kind == "missing" and len(names) == 1:
                continue
            whole = (path / name).read_bytes()
            DAMAGES[kind](path / name)
            assert findings(path), f"{layout}: {name} {kind}"
            (path / name).write_bytes(whole)
        assert findings(path) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_two_data_files_that_changed_places_are_found(layout: str) -> None:
    with made(layout) as path:
        names = sorted(p.name for p in path.iterdir() if p.suffix in (".distcp", ".safetensors"))
        for one, other in itertools.combinations(names, 2):
            damage.swap(path / one, path / other)
            if layout == "hf-sharded":  # the files say themselves which rows they hold: nothing is lost
                assert findings(path) == []
            else:
                assert findings(path), f"{layout}: {one} and {other}"
            damage.swap(path / one, path / other)


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=3,tp=1"])
@pytest.mark.parametrize("tensors", [{"w": tensor("F32", 6, 4)}, MODEL], ids=["even", "model"])
def test_ranks_files_that_changed_places_are_found_with_a_manifest(tmp_path: Path, mesh: str, tensors: dict) -> None:
    run = shard_model(tmp_path, mesh, tensors)
    files = sorted(p.name for p in run.glob("*.distcp"))
    for one, other in itertools.combinations(files, 2):
        damage.swap(run / one, run / other)
        assert findings(run), (one, other)
        damage.swap(run / one, run / other)


STRANGE = {"dcp": ["__7_0.distcp", "__0_1.distcp"], "hf": ["model-00003-of-00003.safetensors", "other.safetensors"]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_strange_data_file_is_found(layout: str) -> None:
    with made(layout) as path:
        for name in STRANGE[layout[: layout.index("-")]]:
            shutil.copyfile(next(p for p in path.iterdir() if p.suffix in (".distcp", ".safetensors")), path / name)
            assert findings(path) == ["unreferenced-file"], name
            (path / name).unlink()


@pytest.mark.parametrize("layout", WITH_MANIFEST)
@pytest.mark.parametrize("name", ["__9_0.distcp", "old/model.safetensors", "pytorch_model.bin", "optimizer.pt"])
def test_strange_weights_of_any_kind_beside_a_manifest_are_found(layout: str, name: str) -> None:
    with made(layout) as path:
        (path / "old").mkdir()
        (path / name).write_bytes(b"")
        assert findings(path) == ["several-weights" if name == "pytorch_model.bin" else "unreferenced-file"]
        (path / name).unlink()
        (path / "notes.txt").write_text("not weights")
        assert findings(path) == []


def test_bytes_after_the_last_item_are_found_without_a_manifest(tmp_path: Path) -> None:
    run = shard_model(tmp_path)
    damage.forget_manifest(run)
    lengthen(run / "__1_0.distcp")
    assert findings(run) == ["long-file"]
