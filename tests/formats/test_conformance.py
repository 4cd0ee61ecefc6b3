"""One suite for every format: what is whole goes there and back, and of what is not nobody makes other tensors.

A new format is a row of `ROWS`. Whatever happens to a file, `gather` gives the tensors that were saved or refuses, and
`verify` is not green where `gather` refuses; where nothing in a format could tell, `verify` says what it did not check.
"""

from __future__ import annotations

import itertools
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from formats.saved import Flat, read, save_ranks
from oracle.seeds import MODEL, SEEDS, load
from samples import content, memory_directory
from steps import toy_steps
from torch.distributed.tensor import Replicate, Shard

from ckpt_tools import api
from ckpt_tools.errors import CkptError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
HERE = Path(__file__).parent
FLIPS = 7
"""In every file."""
UNTOLD = ("checksum", "were swapped", "global shapes", "same layout", "equal layout", "that .metadata stores only once")
"""What `verify` says that it did not check, where bytes or files of a format could be others."""


class Row(NamedTuple):
    """A format: how a small checkpoint of it is made below a directory, and how commands are told what it is."""

    make: Callable[[Path], object]
    given: str = ""
    kind: str | None = None
    is_sharded: bool = False


def ranks(*placements: object, **sizes: int) -> Callable[[Path], object]:
    def place(name: str) -> object:
        return [Replicate()] * len(sizes) if name == "steps" else placements

    return lambda path: save_ranks(path, MODEL, sizes, place)


def zero(case: str) -> Callable[[Path], object]:
    def unpack(path: Path) -> None:
        with tarfile.open(HERE / "deepspeed.tar.xz") as archive:
            archive.extractall(path, filter="data", members=[m for m in archive if m.name.startswith(f"{case}/")])
        shutil.rmtree(path / case / "global_step2_universal", ignore_errors=True)
        (path / case / "latest_universal").unlink(missing_ok=True)

    return unpack


def megatron(path: Path) -> None:
    with zipfile.ZipFile(HERE / "megatron" / "llama-0.16.1-tp2.zip") as archive:
        archive.extractall(path)


ROWS = {name: Row(seed.make, seed.file, None, "dcp" in name) for name, seed in SEEDS.items() if "stock" not in name}
ROWS |= {
    "ranks": Row(ranks(Shard(0), fsdp=2), is_sharded=True),
    "ranks-hsdp": Row(ranks(Replicate(), Shard(0), ddp=2, fsdp=2), is_sharded=True),
    "zero2": Row(zero("zero2-bf16"), "zero2-bf16", "deepspeed-fp32", is_sharded=True),
    "zero3": Row(zero("zero3-bf16"), "zero3-bf16", is_sharded=True),
    "torch-dist": Row(megatron, is_sharded=True),
    "accelerate": Row(toy_steps.save_accelerate, is_sharded=True),
    "trainer": Row(toy_steps.save_trainer, is_sharded=True),
}
QUICK = ("dcp-nested", "pt-zip", "ranks")


class World:
    """A checkpoint of a row, and what is gathered of it while it is whole."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.row, self.root = name, ROWS[name], root
        self.path, row = root / "source" / self.row.given, self.row
        (root / "source").mkdir()
        row.make(root / "source")
        self.files = sorted(path for path in (root / "source").rglob("*") if path.is_file())
        self.whole = self.gather(self.path, row.kind)
        assert self.whole

    def gather(self, path: Path, kind: str | None = None) -> Flat | None:
        """The tensors that come out, or None where it refuses."""
        out = self.root / "out"
        shutil.rmtree(out, ignore_errors=True)
        code = 0
        try:
            options = {"allow_foreign_names": True, "names": "live", "num_workers": 1}
            self.unheld = " ".join(api.gather(path, out, format=kind, **options).not_checked)
        except CkptError as error:
            code = error.exit_code
        assert code in (0, 2, 4)
        assert out.exists() is (code == 0)
        return None if code else load(out)

    def judge(self, what: object) -> bool:
        """Is it red? Whatever it is, it must not be wrong."""
        code, is_red, untold = 4, True, ""
        try:
            result = api.verify(self.path, format=self.row.kind, num_workers=1)
            is_red, untold = not result.ok, " ".join(result.not_checked)
        except CkptError as error:
            code = error.exit_code
        assert code == 4, what
        found = self.gather(self.path, self.row.kind)
        assert found is not None or is_red, (what, "gather refuses what verify calls good")
        if found not in (None, self.whole):
            said = ("unchecked, because",) if is_red else UNTOLD
            assert any(words in (self.unheld if is_red else untold) for words in said), (what, untold, self.unheld)
        return is_red


@pytest.fixture(params=[n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in ROWS])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with memory_directory() as root:
        yield World(request.param, Path(root))


def test_whole_checkpoint_goes_there_and_back(world: World) -> None:
    path, kind = world.path, world.row.kind
    assert api.inspect(path, format=kind).num_tensors == len(read(path, kind=kind))
    result = api.verify(path, format=kind)
    assert not result.errors, result.findings
    first, second = world.root / "first", world.root / "second"
    (api.reshard if world.row.is_sharded else api.shard)(path, first, mesh="dp_shard=2", format=kind)
    api.reshard(first, second, mesh="dp_shard=3")
    assert api.verify(second, against=first).ok
    assert world.gather(second) == world.whole


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long", "noise", "link"])
def test_file_that_is_not_as_it_was_is_red_or_harmless(world: World, damage: str) -> None:
    red = []
    for file in world.files:
        raw = file.read_bytes()
        file.unlink()
        if damage == "link":
            (world.root / "outside").write_bytes(raw)
            file.symlink_to(world.root / "outside")
        elif damage != "missing":
            noise = content(len(raw), 7)
            file.write_bytes({"empty": b"", "short": raw[:-1], "long": raw + b"\0", "noise": noise}[damage])
        red.append(world.judge((damage, file.name)))
        file.unlink(missing_ok=True)
        file.write_bytes(raw)
    assert any(red) or (world.name, damage) == ("ranks-hsdp", "missing")  # of which another rank has a copy
    assert not world.judge("as it was")


def test_flipped_byte_is_red_or_harmless_or_said_not_to_be_checked(world: World) -> None:
    for file in world.files:
        raw = file.read_bytes()
        for number in range(FLIPS):
            at = (2 * number + 1) * len(raw) // (2 * FLIPS)
            if raw:
                file.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << number % 8)]) + raw[at + 1 :])
                world.judge((file.name, at))
        file.write_bytes(raw)


def test_files_that_changed_places_are_red_or_harmless_or_said_not_to_be_checked(
    world: World, request: pytest.FixtureRequest
) -> None:
    if world.name == "zero3":
        why = "no file of ZeRO-3's optimizer has its rank in it: exchanged ones are read, and nothing says so"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    for one, other in itertools.combinations(world.files, 2):
        if one.suffix == other.suffix:
            first, second = one.read_bytes(), other.read_bytes()
            one.write_bytes(second)
            other.write_bytes(first)
            world.judge((one.name, other.name))
            one.write_bytes(first)
            other.write_bytes(second)
