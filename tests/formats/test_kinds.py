"""Tensors of other kinds, saved by real torch and torchao: what only wraps a tensor is that, others are unsupported."""

from __future__ import annotations

import json
import tarfile
import zlib
from pathlib import Path
from typing import Self

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.utils._pytree import tree_map

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLE = Path(__file__).with_name("torchao-0.18.0.tar.xz")


class Wrapper(torch.Tensor):
    """Wraps a tensor, and whatever else it is given."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, dtype: torch.dtype | None = None, **_: object) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=dtype or inner.dtype)

    def __init__(self, inner: torch.Tensor, dtype: torch.dtype | None = None, **more: object) -> None:
        self.inner = inner
        vars(self).update(more)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map(lambda each: each.inner if isinstance(each, cls) else each, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func is not torch.ops.aten.detach.default:
            return out
        more = {name: value for name, value in vars(args[0]).items() if name not in ("inner", "_is_param")}
        return cls(out, args[0].dtype, **more)


class Plain(torch.Tensor):
    """Another name for a tensor."""


def save(tensor: torch.Tensor, path: Path) -> Path:
    dcp.save({"w": tensor, "x": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    return path


def codes(path: Path) -> set[str]:
    return {each.code for each in api.verify(path, level="data").findings if each.severity == "error"}


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(tmp_path / "sample", filter="data")
    return tmp_path / "sample"


VALUES = torch.arange(300.0).view(3, 100)


@pytest.mark.parametrize("file", ["dcp", "pt"])
@pytest.mark.parametrize(
    "make", [lambda: VALUES.clone().as_subclass(Plain), lambda: torch.nn.Parameter(VALUES.clone())]
)
def test_tensor_by_another_name_is_what_stock_torch_copies(make, file: str, tmp_path: Path) -> None:
    stock = {"w": torch.zeros(3, 100)}
    if file == "dcp":
        with torch.serialization.safe_globals([Wrapper, Plain]):
            dcp.load(stock, checkpoint_id=save(make(), tmp_path / "source"), no_dist=True)
    else:
        torch.save({"w": make()}, tmp_path / "source")
        stock["w"].data.copy_(torch.load(tmp_path / "source", weights_only=False)["w"].detach())
    api.gather(tmp_path / "source", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], stock["w"])
    assert torch.equal(stock["w"], VALUES)


OTHERS = {
    "one tensor": (lambda: Wrapper(VALUES.clone()), "Wrapper"),
    "two tensors": (lambda: Wrapper(VALUES, scale=torch.ones(3)), "Wrapper"),
    "an attribute": (lambda: Wrapper(VALUES, scale=2.0), "Wrapper"),
    "another dtype": (lambda: Wrapper(VALUES.to(torch.int8), torch.float32), "Wrapper"),
    "conj": (lambda: VALUES.to(torch.complex64).conj(), "lazy conj"),
    "sparse": (VALUES.to_sparse, "a sparse tensor"),
    "csr": (VALUES.to_sparse_csr, "a sparse tensor"),
    "meta": (lambda: VALUES.to("meta"), "a meta tensor"),
    "nested": (lambda: torch.nested.nested_tensor([VALUES, VALUES]), "a nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([VALUES, VALUES], layout=torch.jagged), "NestedTensor"),
    "quantised": (lambda: torch.quantize_per_tensor(VALUES, 0.1, 0, torch.qint8), "a quantised tensor"),
    "attributes": (lambda: with_note(VALUES.clone().as_subclass(Plain)), "Plain"),
}
IN_DCP = ("one tensor", "two tensors", "an attribute", "another dtype", "conj")  # stock DCP does not save the others


def with_note(tensor: torch.Tensor) -> torch.Tensor:
    tensor.quant_state = "4 bits"
    return tensor


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kind_in_a_file_is_unsupported_by_name(kind: str, tmp_path: Path, capsys) -> None:
    make, words = OTHERS[kind]
    torch.save({"w": make()}, tmp_path / "x.pt")
    assert main(["verify", str(tmp_path / "x.pt"), "--json"]) == 4
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["code"] == "unsupported"
    assert words in error["what"]
    assert "save" in error["hint"]


@pytest.mark.parametrize("kind", IN_DCP)
def test_other_kind_in_dcp_is_a_finding_of_its_own(kind: str, tmp_path: Path) -> None:
    make, words = OTHERS[kind]
    source = save(make(), tmp_path / "source")
    (found,) = (each for each in api.verify(source, level="data").findings if each.severity == "error")
    assert found.code == "unsupported"
    assert words in found.what
    assert found.hint
    with pytest.raises(UnsupportedError, match=words):
        api.gather(source, tmp_path / "out")


def test_damage_in_an_item_of_another_kind_is_damage(tmp_path: Path) -> None:
    (file,) = save(OTHERS["two tensors"][0](), tmp_path / "source").glob("*.distcp")
    whole = file.read_bytes()
    assert codes(tmp_path / "source") == {"unsupported"}
    for old in (b"_rebuild_from_type_v2", b"Wrapper\nq", b"scale"):
        at = whole.index(old) + 2
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert codes(tmp_path / "source") == {"bad-item"}


class Zlib(StreamTransformExtension):
    """As torch's ZStandard, which needs a package."""

    @staticmethod
    def registry_name() -> str:
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> Zlib:
        raise NotImplementedError(version)

    def get_descriptor(self) -> str:
        return "stream.zstd/1"

    def transform_from(self, stream):
        raise NotImplementedError

    def transform_to(self, output):
        class Stream:
            def write(self, data: bytes) -> int:
                return output.write(zlib.compress(bytes(data)))

            def flush(self) -> None:
                output.flush()

            def close(self) -> None:
                output.close()

        return Stream()


def test_compressed_items_are_unsupported(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "source", _extensions=[Zlib()])
    dcp.save({"x": "text"}, storage_writer=writer, no_dist=True)
    with pytest.raises(UnsupportedError, match=r"stream\.zstd/1") as caught:
        api.open_checkpoint(tmp_path / "source")
    assert "zstandard" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["float8", "ranks"])
def test_float8_all_gather_of_two_ranks_is_its_weights(name: str, sample: Path, tmp_path: Path) -> None:
    copied, full = torch.load(sample / "copied.pt"), torch.load(sample / "full.pt")
    assert api.verify(sample / name, level="data").ok
    api.gather(sample / name, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == full.keys()
    assert all(torch.equal(found[fqn], full[fqn]) and torch.equal(copied[fqn], full[fqn]) for fqn in full)


def test_int8_of_torchao_in_dcp_is_unsupported(sample: Path, tmp_path: Path) -> None:
    """Its item is shorter than the elements that `.metadata` promises."""
    assert codes(sample / "int8") == {"unsupported"}
    with pytest.raises(UnsupportedError, match=r"torchao\.quantization\.Int8Tensor"):
        api.gather(sample / "int8", tmp_path / "out")
    with (sample / "int8" / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(UnreadableError, match="cannot hold"):
        api.open_checkpoint(sample / "int8")


def test_steps_that_ckpt_cannot_read_supersede_nothing_and_stay(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    for step, tensor in ((10, VALUES), (20, VALUES), (30, OTHERS["two tensors"][0]()), (40, OTHERS["conj"][0]())):
        save(tensor, run / f"step-{step}")
    save(OTHERS["quantised"][0](), run / "step-50")  # its .metadata is not read at all
    assert main(["watch", str(run), "--once", "--settle", "0", "--keep-last", "1", "--json"]) == 0
    pruned = json.loads(capsys.readouterr().out)
    assert {each["name"]: (each["state"], each["stays"]) for each in pruned["checkpoints"]} == {
        "step-10": ("verified", False),
        "step-20": ("verified", True),
        "step-30": ("unsupported", True),
        "step-40": ("unsupported", True),
        "step-50": ("unsupported", True),
    }
    assert {each["code"] for each in pruned["findings"]} >= {"unsupported"}
    save(VALUES, run / "step-60")
    assert main(["watch", str(run), "--once", "--settle", "0", "--keep-last", "1"]) == 0
    assert {each.name for each in run.glob("step-*")} == {"step-30", "step-40", "step-50", "step-60"}
