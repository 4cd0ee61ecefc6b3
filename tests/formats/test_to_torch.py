"""`gather --to torch`: what PyTorch itself reads back, byte for byte, and what a damaged or interrupted file is."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.checkpoint.formats._pickle_objects import parse_objects
from ckpt_tools.checkpoint.formats._pickle_values import build_pickle
from ckpt_tools.checkpoint.formats.torch_zip import ArchiveFrame, archive_frame
from ckpt_tools.cli import main
from ckpt_tools.errors import StorageError, UsageError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64, torch.float8_e8m0fnu),
]


def a_model(root: Path, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {f"t.{str(dtype)[6:]}": (torch.rand(3, 5) * 100).to(dtype) for dtype in DTYPES}
    state |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(7.5), "large": torch.rand(1500, 1000), **more}
    root.mkdir(exist_ok=True)
    save_file(state, root / "model.safetensors")
    return state


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return is_alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_torch_reads_what_gather_writes_and_every_record_holds(tmp_path: Path) -> None:
    state = a_model(tmp_path / "in")
    planned = api.gather(tmp_path / "in", tmp_path / "out", to="torch", dry_run=True)
    done = api.gather(tmp_path / "in", tmp_path / "out", to="torch")
    assert done.verified
    assert done.files == planned.files
    loaded = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    mapped = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True, mmap=True)
    assert list(loaded) == list(mapped)
    assert loaded.keys() == state.keys()
    assert all(same(loaded[name], state[name]) for name in state)
    assert all(torch.equal(loaded[n].view(torch.uint8), mapped[n].view(torch.uint8)) for n in ("large", "t.bfloat16"))
    with zipfile.ZipFile(tmp_path / "out/pytorch_model.bin") as archive:
        assert archive.testzip() is None
    assert api.diff(tmp_path / "in", tmp_path / "out").equal
    assert api.verify(tmp_path / "out", level="data").ok
    api.gather(tmp_path / "out", tmp_path / "back")
    assert api.diff(tmp_path / "in", tmp_path / "back").equal


def test_files_of_several_and_their_index_are_those_of_transformers(tmp_path: Path) -> None:
    state = a_model(tmp_path / "in", other=torch.rand(1500, 1000))
    api.gather(tmp_path / "in", tmp_path / "out", to="torch", max_shard_size="6MB")
    index = json.loads((tmp_path / "out/pytorch_model.bin.index.json").read_text())
    assert index["weight_map"].keys() == state.keys()
    for file in set(index["weight_map"].values()):
        loaded = torch.load(tmp_path / "out" / file, weights_only=True)
        assert {name for name, of in index["weight_map"].items() if of == file} == loaded.keys()
        assert all(same(loaded[name], state[name]) for name in loaded)


def test_cast_and_cut_checkpoints_are_written_too(tmp_path: Path) -> None:
    state = a_model(tmp_path / "in")
    api.shard(tmp_path / "in", tmp_path / "run", mesh="dp_shard=3")
    api.gather(tmp_path / "run", tmp_path / "out", to="torch", dtype="bf16", include=["large", "scalar"])
    loaded = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded["large"], state["large"].bfloat16())
    assert torch.equal(loaded["scalar"], state["scalar"].bfloat16())


def test_what_torch_has_no_dtype_for_is_refused_with_its_name(tmp_path: Path) -> None:
    header = json.dumps({"six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "in.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(UsageError, match=r"tensor 'six': F6_E2M3 cannot be stored"):
        api.gather(tmp_path / "in.safetensors", tmp_path / "out", to="torch")
    assert not (tmp_path / "out").exists()


def test_a_destination_that_looks_like_a_file_is_refused(tmp_path: Path) -> None:
    a_model(tmp_path / "in")
    with pytest.raises(UsageError, match=r"should not end in \.pt"):
        api.gather(tmp_path / "in", tmp_path / "model.pt", to="torch")


def test_a_run_that_met_a_full_disk_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_tools.storage.staging import Staging

    a_model(tmp_path / "in", more=torch.rand(3000, 1000))
    api.gather(tmp_path / "in", tmp_path / "whole", to="torch")
    write, count = Staging.write, iter(range(1000))

    def fail(self: Staging, file: str, offset: int, parts: list[bytes]) -> int:
        if next(count) == 5:
            raise StorageError("No space left on device", where=file)
        return write(self, file, offset, parts)

    monkeypatch.setattr(Staging, "write", fail)
    with pytest.raises(StorageError):
        api.gather(tmp_path / "in", tmp_path / "out", to="torch", num_workers=1)
    monkeypatch.undo()
    done = api.gather(tmp_path / "in", tmp_path / "out", to="torch", num_workers=1)
    assert any("continued an interrupted run" in note for note in done.notes)
    assert (tmp_path / "out/pytorch_model.bin").read_bytes() == (tmp_path / "whole/pytorch_model.bin").read_bytes()


def _archive(frame: ArchiveFrame, payloads: list[bytes]) -> bytes:
    content = bytearray(frame.nbytes)
    content[: len(frame.before)] = frame.before
    for start, payload in zip(frame.starts, payloads, strict=True):
        content[start : start + len(payload)] = payload
    for offset, part in frame.seal([zlib.crc32(payload) for payload in payloads]):
        content[offset : offset + len(part)] = part
    return bytes(content)


@pytest.mark.full
def test_archive_of_more_entries_than_a_plain_zip_has(tmp_path: Path) -> None:
    payloads = [b"%05d" % i for i in range(70_000)]
    content = _archive(archive_frame(build_pickle({}), [len(payload) for payload in payloads]), payloads)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert len(archive.namelist()) == 70_005
        assert archive.read("archive/data/69999") == b"69999"
    assert torch.load(io.BytesIO(content), weights_only=True) == {}


def test_archive_of_nothing_is_one(tmp_path: Path) -> None:
    assert torch.load(io.BytesIO(_archive(archive_frame(build_pickle({}), []), [])), weights_only=True) == {}


def test_archive_beyond_four_gib_has_the_places_of_zip64(tmp_path: Path) -> None:
    lengths = [3 << 30, 5 << 30, 8]
    frame = archive_frame(build_pickle({}), lengths)
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(frame.nbytes)
        file.write(frame.before)
        for offset, part in frame.seal([1, 2, 3]):
            file.seek(offset)
            file.write(part)
    with zipfile.ZipFile(path) as archive:
        found = [(e.file_size, e.CRC) for e in archive.infolist() if "/data/" in e.filename]
        assert found == list(zip(lengths, [1, 2, 3], strict=True))
        assert archive.open("archive/data/2").read(0) == b""
    reader = torch._C.PyTorchFileReader(str(path))
    assert [reader.get_record_offset(f"data/{i}") for i in range(3)] == list(frame.starts)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -1, 255, 1 << 15, -(1 << 31), 1 << 80, 2.5, "", "é☃", (), (1,), (1, 2, 3, 4), [], {}),
        [1] * 2500,
        {i: str(i) for i in range(1001)},
        {"a": [{"b": ({},)}], "c": "a"},
    ],
    ids=lambda value: str(value)[:20],
)
def test_pickles_are_those_of_pythons_own_pickler(value: object) -> None:
    import pickle

    content = build_pickle(value)
    assert pickle.loads(content) == value
    assert parse_objects(content).value == value


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_one_file_is_held_to_the_manifest_beside_it(tmp_path: Path, to: str) -> None:
    (tmp_path / "a").mkdir()
    save_file({"w": torch.arange(64.0), "b": torch.zeros(3)}, tmp_path / "a" / "model.safetensors")
    assert main(["gather", str(tmp_path / "a"), str(tmp_path / "b"), "--to", to, "-q"]) == 0
    (file,) = (path for path in (tmp_path / "b").iterdir() if "model" in path.name and path.suffix != ".json")
    assert main(["verify", str(file), "-q"]) == 0
    content = file.read_bytes()
    at = content.index(torch.arange(64.0).numpy().tobytes())
    file.write_bytes(content[: at + 9] + bytes([content[at + 9] ^ 1]) + content[at + 10 :])
    assert main(["verify", str(file), "-q"]) == 3
    assert main(["gather", str(file), str(tmp_path / "c"), "--dtype", "bf16", "-q"]) == 4
