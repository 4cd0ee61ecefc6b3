"""What ckpt calls good, stock libraries load alike; `bin/oracle` tries many more mutants of many more seeds."""

from __future__ import annotations

import contextlib
import pickle
import re
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from oracle.mutants import members
from oracle.run import Verdict, hunt, judge
from oracle.seeds import SEEDS, load
from oracle.stock import Stock

from ckpt_tools import api
from ckpt_tools.errors import UnreadableError

_QUICK = ("safetensors-index", "dcp-flat", "pt-zip")
_REST = [name for name in SEEDS if name not in (*_QUICK, "dcp-2-ranks-stock")]


@pytest.mark.parametrize("name", [*_QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in _REST)])
def test_green_mutants_load_in_stock_libraries_with_the_same_values(name: str) -> None:
    with contextlib.closing(Stock()) as stock:
        counts, wrong = hunt(name, 20, seed=1, stock=stock)
    assert wrong == []
    assert counts["red"] > 5


def test_judge_names_what_is_wrong_with_a_green_mutant() -> None:
    good = {"m.w": (torch.float32, (1,), b"abcd")}
    bad = {"m.w": (torch.float32, (1,), b"abce")}
    verdict = Verdict(verified=True, gathered={"w": good["m.w"]}, is_held=True, said="")
    sealed, free = SEEDS["dcp-manifest"], SEEDS["safetensors"]
    assert judge(sealed, "bit", verdict, good, good, good) is None
    assert "stock loads others: 1 tensors, m.w" in str(judge(free, "bit", verdict, good, bad, good))
    assert "does not load" in str(judge(free, "bit", verdict, good, "RuntimeError", good))
    assert "gather wrote others" in str(judge(free, "bit", verdict, bad, bad, good))
    changed = verdict._replace(gathered={"w": bad["m.w"]})
    assert judge(free, "bit", changed, bad, bad, good) is None
    assert "in spite of the manifest" in str(judge(sealed, "bit", changed, bad, bad, good))
    assert "in spite of CRC-32s" in str(judge(SEEDS["dcp-flat"], "bit", changed, bad, bad, good))


class _NoPath:
    def __reduce__(self) -> tuple:
        return PosixPath, (("a", "b"),)


def _with_record(path: Path, name: str, content: bytes) -> Path:
    """Write a zip of torch.save again with another small record, its CRC-32 right."""
    made = path.with_name("made.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, content if info.filename.endswith(name) else old.read(info))
    return made


@pytest.mark.parametrize(
    ("name", "content"), [("/version", b"x\n"), ("/.storage_alignment", b"6\0"), ("/.data/serialization_id", b"\xff")]
)
def test_small_record_that_torch_does_not_parse_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    damaged = _with_record(tmp_path / "m.pt", name, content)
    with pytest.raises((RuntimeError, ValueError)):
        torch.load(damaged)
    with pytest.raises(UnreadableError, match=re.escape(name[1:])):
        api.verify(damaged)


def test_locator_of_no_disk_is_refused(tmp_path: Path) -> None:
    """One bit, that torch's zip reader looks at."""
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    raw = bytearray((tmp_path / "m.pt").read_bytes())
    at = raw.rindex(b"PK\6\7") + 16
    assert raw[at] == 1
    raw[at] = 0
    (tmp_path / "m.pt").write_bytes(raw)
    with pytest.raises(RuntimeError, match="multidisk"):
        torch.load(tmp_path / "m.pt")
    with pytest.raises(UnreadableError, match="zip64 locator"):
        api.verify(tmp_path / "m.pt")


def test_saver_of_no_path_is_refused(tmp_path: Path) -> None:
    """A memo index that is another one: torch unpickles it, and stops."""
    SEEDS["dcp-flat"].make(tmp_path)
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_meta.checkpoint_id = _NoPath()
    file.write_bytes(pickle.dumps(metadata, protocol=4))
    with pytest.raises(dcp.api.CheckpointException, match="not tuple"):
        load(tmp_path)
    with pytest.raises(UnreadableError, match="storage_meta"):
        api.verify(tmp_path)


@pytest.mark.parametrize("name", ["safetensors-manifest", "bin-manifest"])
def test_tensor_that_the_manifest_does_not_record_stops_a_conversion(name: str, tmp_path: Path) -> None:
    """As long a name in a header of one length: every byte of every tensor is as it was."""
    source = tmp_path / "source"
    source.mkdir()
    SEEDS[name].make(source)
    for file in (file for file in source.iterdir() if file.suffix in (".safetensors", ".bin", ".json")):
        if file.name != "ckpt_manifest.json":
            raw = file.read_bytes()
            crcs = [zlib.crc32(each).to_bytes(4, "little") for each in _renamed(raw)]
            file.write_bytes(raw.replace(b"embed.weight", b"embed.weigit").replace(*crcs))
    with pytest.raises(UnreadableError, match=r"embed\.weigit.*no such tensor"):
        api.gather(source, tmp_path / "out", allow_foreign_names=True)


def _renamed(raw: bytes) -> tuple[bytes, bytes]:
    """The pickle of a zip, if it is one, before and after."""
    spans = [(start, end) for record, start, end in members(raw) if record.endswith("data.pkl")]
    before = raw[slice(*spans[0])] if spans else b""
    return before, before.replace(b"embed.weight", b"embed.weigit")


class _Odd:
    def __init__(self, *given: object) -> None:
        self.given = given

    def __reduce__(self) -> tuple:
        return OrderedDict, self.given


def test_dict_of_what_makes_none_is_refused(tmp_path: Path) -> None:
    for given in ((1,), (1, 2), ([("a", 1)], 2)):
        torch.save({"w": torch.ones(2), "x": _Odd(*given)}, tmp_path / "m.pt")
        with pytest.raises(Exception, match=r"argument|iterable"):
            torch.load(tmp_path / "m.pt", weights_only=True)
        with pytest.raises(UnreadableError, match="OrderedDict of"):
            api.verify(tmp_path / "m.pt")
    torch.save({"x": _Odd({"w": torch.ones(2)})}, tmp_path / "m.pt")
    assert [entry.fqn for entry in api.open_checkpoint(tmp_path / "m.pt").tensors] == ["x.w"]
