"""Every dtype of safetensors through HF → DCP → another mesh → HF: the same bits, or a refusal before any write.

The files are made by hand: torch has no tensor of some of these types, and would not keep odd bits of others.
"""

from __future__ import annotations

import json
import math
import struct
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from samples import safetensors_bytes, without_ranks
from torch.distributed.checkpoint import FileSystemReader

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME, DType
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.cli import main

IN_BOTH = [dtype for dtype in BY_NAME.values() if dtype.in_safetensors and dtype.torch_name]
HF_ONLY = [dtype for dtype in BY_NAME.values() if dtype.in_safetensors and not dtype.torch_name]
DCP_ONLY = [dtype for dtype in BY_NAME.values() if not dtype.in_safetensors]
SHAPES = {
    "matrix": (7, 12),  # uneven over 3 ranks, and over 2 along the last dim once packed in pairs
    "cube": (3, 5, 4),
    "vector": (96,),
    "single": (1, 4),
    "empty": (0,),
    "hollow": (3, 0, 2),
    "scalar": (),
}
BITS = {  # values whose bits a copy through numbers would lose
    "F64": (0x7FF0000000000001, 0xFFFDEADBEEF12345, 0x8000000000000000, 0x7FF0000000000000, 1),
    "F32": (0x7F800001, 0xFFC12345, 0x80000000, 0x7F800000, 1),
    "F16": (0x7C01, 0xFE12, 0x8000, 0x7C00, 1),
    "BF16": (0x7F81, 0xFFC3, 0x8000, 0x7F80, 1),
}
IDS = {"ids": lambda dtype: dtype.name}


def content(dtype: DType, num_elems: int, seed: int) -> bytes:
    """Bytes of every kind: all 256 values in turn, NaN payloads and −0.0 first."""
    num_bytes = dtype.num_bytes(num_elems)
    raw = bytearray((seed + 37 * i) % 256 for i in range(num_bytes))
    width = dtype.bits // 8
    for i, bits in enumerate(BITS.get(dtype.name, ())):
        if (i + 1) * width <= num_bytes:
            raw[i * width : (i + 1) * width] = bits.to_bytes(width, "little")
    return bytes(raw)


def tensors_of(dtype: DType) -> dict[str, tuple[tuple[int, ...], bytes]]:
    shapes = {name: shape for name, shape in SHAPES.items() if dtype.granule == 1 or name != "scalar"}
    return {name: (shape, content(dtype, math.prod(shape), i)) for i, (name, shape) in enumerate(shapes.items())}


def write_safetensors(path: Path, dtype: DType, tensors) -> None:
    named = {name: (dtype.name, shape, raw) for name, (shape, raw) in tensors.items()}
    path.write_bytes(safetensors_bytes(named, metadata={"format": "pt"}))


def read_safetensors(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    data = data[8 + length :]
    return {name: (tuple(f["shape"]), data[slice(*f["data_offsets"])]) for name, f in header.items()}


def items_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every item of a checkpoint with one rank, by `torch.load` alone."""
    metadata = FileSystemReader(directory).read_metadata()
    found = {}
    for index, info in metadata.storage_data.items():
        with open(directory / info.relative_path, "rb") as file:
            file.seek(info.offset)
            (directory / "item.pt").write_bytes(file.read(info.length))
        found[index.fqn] = torch.load(directory / "item.pt", weights_only=True)
        (directory / "item.pt").unlink()
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", IN_BOTH, **IDS)
def test_round_trip_of_every_dtype_is_bitwise(tmp_path, dtype):
    tensors = tensors_of(dtype)
    (tmp_path / "hf").mkdir()
    write_safetensors(tmp_path / "hf" / "model.safetensors", dtype, tensors)
    columns = ["matrix=tp:S(1)", "cube=tp:S(2),dp_shard:S(0)"]
    api.shard(tmp_path / "hf", tmp_path / "dcp", mesh="dp_shard=3")
    api.reshard(tmp_path / "dcp", tmp_path / "dcp2", mesh="dp_shard=2,tp=2", set=columns)
    assert api.verify(tmp_path / "dcp2", against=tmp_path / "hf").findings == ()
    api.gather(tmp_path / "dcp2", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()
    # Without the manifest nothing remembers the original: what comes back was in the items.
    (tmp_path / "dcp2" / MANIFEST_NAME).unlink()
    api.gather(tmp_path / "dcp2", tmp_path / "plain")
    assert read_safetensors(tmp_path / "plain" / "model.safetensors") == tensors
    with safe_open(tmp_path / "plain" / "model.safetensors", "pt") as file:  # the reference reader takes it
        assert sorted(file.keys()) == sorted(tensors)


@pytest.mark.parametrize("name", ["F4", "BOOL", "BF16", "F64"])
def test_round_trip_of_tensors_longer_than_a_block_is_bitwise(tmp_path, name):
    dtype = BY_NAME[name]
    length = (10 << 20) * 8 // dtype.bits + 2 * dtype.granule  # of bytes: several blocks of 4 MiB
    pattern = content(dtype, 1 << 16, 1)
    raw = (pattern * (dtype.num_bytes(length) // len(pattern) + 1))[: dtype.num_bytes(length)]
    tensors = {"long": ((length,), raw), "wide": ((2, length // 2), raw)}
    write_safetensors(tmp_path / "m.safetensors", dtype, tensors)
    api.shard(tmp_path / "m.safetensors", tmp_path / "dcp", mesh="dp_shard=3")
    api.reshard(tmp_path / "dcp", tmp_path / "dcp2", mesh="dp_shard=5,tp=2", set=["wide=tp:S(1)"])
    api.gather(tmp_path / "dcp2", tmp_path / "out")
    assert (tmp_path / "out" / "m.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("dtype", IN_BOTH, **IDS)
def test_shard_of_every_dtype_loads_with_stock_torch(tmp_path, dtype, read_dcp):
    tensors = tensors_of(dtype)
    write_safetensors(tmp_path / "m.safetensors", dtype, tensors)
    api.shard(tmp_path / "m.safetensors", tmp_path / "one", mesh="dp_shard=1")
    items = items_of(tmp_path / "one")
    torch_dtype = getattr(torch, dtype.torch_name)
    assert {name: (tensor.dtype, bytes_of(tensor)) for name, tensor in items.items()} == {
        name: (torch_dtype, raw) for name, (_, raw) in tensors.items()
    }
    for name, (shape, _) in tensors.items():
        assert tuple(items[name].shape) == ((*shape[:-1], shape[-1] // dtype.pack) if shape else ())
    api.shard(tmp_path / "m.safetensors", tmp_path / "three", mesh="dp_shard=3")
    loaded = read_dcp(tmp_path / "three")
    expected = {name: raw for name, (_, raw) in tensors.items()}
    if dtype.name == "BOOL":  # dcp.load copies the parts together, and torch's copy turns every other byte into 1
        expected = {name: bytes(map(bool, raw)) for name, raw in expected.items()}
    assert {name: bytes_of(tensor) for name, tensor in loaded.items()} == expected


@pytest.mark.parametrize("verb", [["shard", "--mesh", "dp_shard=2"], ["shard", "--mesh", "dp_shard=2", "--dry-run"]])
@pytest.mark.parametrize("dtype", HF_ONLY, **IDS)
def test_shard_of_a_dtype_that_torch_lacks_is_refused_before_any_write(tmp_path, capsys, dtype, verb):
    write_safetensors(tmp_path / "m.safetensors", dtype, tensors_of(dtype))
    assert main([verb[0], str(tmp_path / "m.safetensors"), str(tmp_path / "out"), *verb[1:]]) == 2
    assert dtype.name in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("dtype", HF_ONLY, **IDS)
def test_gather_of_a_dtype_that_torch_lacks_keeps_its_bits(tmp_path, dtype):
    tensors = tensors_of(dtype)
    write_safetensors(tmp_path / "m.safetensors", dtype, tensors)
    api.gather(tmp_path / "m.safetensors", tmp_path / "out", max_shard_size="1KB")
    assert read_safetensors(tmp_path / "out" / "model.safetensors") == tensors


@pytest.mark.parametrize("extra", [[], ["--dry-run"], ["--max-shard-size", "1KB"]])
@pytest.mark.parametrize("dtype", DCP_ONLY, **IDS)
def test_gather_of_a_dtype_that_safetensors_lacks_is_refused_before_any_write(tmp_path, capsys, dtype, extra):
    save_dcp(tmp_path / "dcp", dtype)
    assert main(["gather", str(tmp_path / "dcp"), str(tmp_path / "out"), *extra]) == 2
    error = capsys.readouterr().err
    assert dtype.name in error
    assert "odd" in error
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize("dtype", DCP_ONLY, **IDS)
def test_dtype_that_safetensors_lacks_keeps_its_bits_in_reshard_and_can_be_left_out(tmp_path, dtype, read_dcp):
    raw = save_dcp(tmp_path / "dcp", dtype)
    api.gather(tmp_path / "dcp", tmp_path / "back", exclude=["odd"])
    assert list(read_safetensors(tmp_path / "back" / "model.safetensors")) == ["plain"]
    api.reshard(tmp_path / "dcp", tmp_path / "out", mesh="dp_shard=2,tp=2", set=["odd=tp:S(1)"])
    assert bytes_of(read_dcp(tmp_path / "out")["odd"]) == raw


def save_dcp(directory: Path, dtype: DType) -> bytes:
    raw = content(dtype, 8 * 6, 3)
    with without_ranks():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype.torch_name))
        state = {"odd": tensor.reshape(8, 6), "plain": torch.ones(3)}
        torch.distributed.checkpoint.save(state, checkpoint_id=directory, no_dist=True)
    return raw


@pytest.mark.parametrize("wanted", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("dtype", [d for d in IN_BOTH if d.is_float], **IDS)
def test_cast_gives_the_bits_that_torch_gives(tmp_path, dtype, wanted, read_dcp):
    raw = content(dtype, 96, 5)
    write_safetensors(tmp_path / "m.safetensors", dtype, {"w": ((96,), raw), "v": ((3, 32), raw)})
    api.shard(tmp_path / "m.safetensors", tmp_path / "dcp", mesh="dp_shard=2", dtype=wanted)
    api.gather(tmp_path / "dcp", tmp_path / "out")
    original = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype.torch_name))
    expected = original.to(getattr(torch, BY_NAME[wanted.upper()].torch_name))
    # NaN payloads may differ by the width of torch's vector loops: a NaN stays a NaN, everything else is exact.
    loaded = (*read_dcp(tmp_path / "dcp").values(), *load_file(tmp_path / "out" / "model.safetensors").values())
    for found in (tensor.reshape(-1) for tensor in loaded):
        assert found.dtype == expected.dtype
        assert torch.equal(found.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert bytes_of(found[numbers]) == bytes_of(expected[numbers])


@pytest.mark.parametrize("dtype", [d for d in IN_BOTH if not d.is_float], **IDS)
def test_cast_leaves_other_dtypes_as_they_are(tmp_path, dtype):
    tensors = tensors_of(dtype)
    write_safetensors(tmp_path / "m.safetensors", dtype, tensors)
    api.shard(tmp_path / "m.safetensors", tmp_path / "dcp", mesh="dp_shard=2", dtype="bf16")
    api.gather(tmp_path / "dcp", tmp_path / "out", dtype="bf16")
    assert read_safetensors(tmp_path / "out" / "model.safetensors") == tensors
