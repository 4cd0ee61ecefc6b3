"""The reference engine: real gloo ranks, stock `dcp.load`, and the chunk table that the layout predicts."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader

from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Checkpoint
from ckpt_tools.checkpoint.formats.safetensors import parse_header, parse_length
from ckpt_tools.checkpoint.layout import Box, Mesh
from ckpt_tools.convert.dtensor import save_with_dtensor, torchrun_rank
from ckpt_tools.errors import CkptError, DestinationExistsError, UsageError
from ckpt_tools.transfer.placement.place import cut_entry, parse_rules, parse_set, place_tensors

EXOTIC = (
    *("bool", "int8", "int16", "uint16", "int32", "uint32", "uint64", "float16", "bfloat16", "float64", "complex64"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)


def describe(directory, *files):
    """A checkpoint of safetensors files, from their headers."""
    tensors, sizes = [], {}
    for file in files:
        data = (directory / file).read_bytes()
        length = parse_length(data[:8], where=file)
        tensors += parse_header(data[8 : 8 + length], file=file, file_nbytes=len(data)).tensors
        sizes[file] = len(data)
    return Checkpoint(root=str(directory), format="hf", tensors=tuple(tensors), files=sizes)


def numbers(*shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).reshape(shape).to(dtype)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_saved(source, destination, mesh, placements, expected):
    """The chunk table is the predicted one, owner by owner, and stock `dcp.load` gives `expected` back."""
    assert b"pathlib" not in (destination / ".metadata").read_bytes()
    metadata = FileSystemReader(destination).read_metadata()
    assert metadata.state_dict_metadata.keys() == {entry.fqn for entry in source.tensors}
    for entry in source.tensors:
        saved = metadata.state_dict_metadata[entry.fqn]
        scale = [1] * (len(entry.shape) - 1) + [entry.dtype.pack] if entry.shape else []
        assert tuple(n * s for n, s in zip(saved.size, scale, strict=True)) == entry.shape
        owners = {
            tuple(index.offset): int(info.relative_path.split("_")[2])
            for index, info in metadata.storage_data.items()
            if index.fqn == entry.fqn
        }
        theirs = [
            (
                owners[tuple(chunk.offsets)],
                Box(
                    tuple(o * s for o, s in zip(chunk.offsets, scale, strict=True)),
                    tuple(n * s for n, s in zip(chunk.sizes, scale, strict=True)),
                ),
            )
            for chunk in saved.chunks
        ]
        assert list(cut_entry(entry, mesh, placements.get(entry.fqn, {})).cells) == theirs, entry.fqn
    loaded = {fqn: torch.zeros_like(tensor) for fqn, tensor in expected.items()}
    from samples import without_ranks  # ranks of a script import this file from where it lies

    with without_ranks():
        dcp.load(loaded, checkpoint_id=destination, no_dist=True)
    for fqn, tensor in expected.items():
        assert loaded[fqn].dtype == tensor.dtype
        assert torch.equal(bits(loaded[fqn]), bits(tensor)), fqn


def save_forked(*args, **options):
    """Save, with the process between that a rank has forked."""
    from forked import call  # as above

    call(save_with_dtensor, *args, **options)


@pytest.fixture
def model(tmp_path):
    """Two files with every kind of shape, and a tensor that is cut in every way."""
    first = {
        "layers.0.q.weight": numbers(8, 6),
        "layers.0.q.bias": numbers(8),
        "layers.0.o.weight": numbers(6, 8, dtype=torch.bfloat16),
        "layers.0.o.bias": numbers(6),
        "norm.weight": numbers(5),
    }
    second = {
        "experts": numbers(4, 6, 5),
        "head.weight": numbers(7, 6),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "single": numbers(1, 3),
    }
    source_dir = tmp_path / "source"
    source_dir.mkdir()
    save_file(first, source_dir / "model-1.safetensors")
    save_file(second, source_dir / "model-2.safetensors")
    return describe(source_dir, "model-1.safetensors", "model-2.safetensors"), first | second


RULES = """
version: 1
rules:
  - {match: "layers.*.q", style: colwise}
  - {match: "layers.*.o", style: rowwise}
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "rules", "prefix", "save"),
    [
        ({"dp_replicate": 2, "dp_shard": 2}, ("experts=dp_shard:S(1)", "layers.0.o.bias=fsdp:R"), "", save_forked),
        ({"dp_shard": 2, "tp": 2}, RULES, "", save_with_dtensor),
        ({"ep": 2}, ("model.experts=ep:S(0)",), "model.", save_forked),  # found by their bytes
    ],
    ids=["hsdp", "fsdp and tp", "renamed, without fsdp"],
)
def test_save_with_dtensor_loads_and_has_the_predicted_table(model, tmp_path, axes, rules, prefix, save):
    source, expected = model
    source = replace(source, tensors=tuple(replace(entry, fqn=prefix + entry.fqn) for entry in source.tensors))
    mesh = Mesh(tuple(axes.items()))
    rules = parse_rules(rules, where="r").rules if rules is RULES else tuple(map(parse_set, rules))
    placements = place_tensors(source.tensors, mesh, rules).placements
    save(source, str(tmp_path / "out"), mesh, placements, timeout_s=60)
    assert_saved(source, tmp_path / "out", mesh, placements, {prefix + fqn: each for fqn, each in expected.items()})


@pytest.mark.full
def test_save_with_dtensor_every_dtype_comes_back_bit_by_bit(tmp_path):
    raw = torch.arange(256, dtype=torch.uint8).repeat(2).reshape(8, 64)
    tensors = {name: (raw % 2 == 0 if name == "bool" else raw.view(getattr(torch, name))).clone() for name in EXOTIC}
    f4 = torch.arange(48, dtype=torch.uint8).reshape(8, 6).view(torch.float4_e2m1fn_x2)
    save_file(tensors | {"f4": f4}, tmp_path / "m.safetensors")
    source = describe(tmp_path, "m.safetensors")
    mesh = Mesh((("dp_shard", 1), ("tp", 2)))
    placements = place_tensors(source.tensors, mesh, (parse_set("**=tp:S(1)"),)).placements
    save_forked(source, str(tmp_path / "out"), mesh, placements, timeout_s=60)
    assert_saved(source, tmp_path / "out", mesh, placements, tensors)
    # Torch cannot copy F4, so dcp.load cannot either: read the items where the metadata says they are.
    storage = FileSystemReader(tmp_path / "out").read_metadata().storage_data
    parts = {index.offset: info for index, info in storage.items() if index.fqn == "f4"}
    assert sorted(parts) == [(0, 0), (0, 3)]
    for offset, info in parts.items():
        data = (tmp_path / "out" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        item = torch.load(io.BytesIO(data), weights_only=True)
        assert torch.equal(item.view(torch.uint8), f4.view(torch.uint8)[:, offset[1] : offset[1] + 3])


@pytest.mark.full
def test_save_with_dtensor_truncated_file_fails_with_the_rank_s_reason(tmp_path):
    save_file({"a": numbers(64, 64)}, tmp_path / "m.safetensors")
    source = describe(tmp_path, "m.safetensors")
    os.truncate(tmp_path / "m.safetensors", 1000)
    with pytest.raises(CkptError) as caught:
        save_with_dtensor(source, str(tmp_path / "out"), Mesh((("dp_shard", 2),)), {}, timeout_s=60)
    assert "a" in caught.value.what
    assert caught.value.where is not None


@pytest.mark.full
def test_save_with_dtensor_missing_file_fails_without_waiting_for_the_timeout(tmp_path):
    save_file({"a": numbers(4)}, tmp_path / "m.safetensors")
    source = describe(tmp_path, "m.safetensors")
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(CkptError, match="FileNotFoundError"):
        save_with_dtensor(source, str(tmp_path / "out"), Mesh((("dp_shard", 2),)), {}, timeout_s=300)


KILLED = """
import faulthandler, os, signal, sys, threading, time
from ckpt_tools.convert.dtensor import save_with_dtensor
from ckpt_tools.errors import CkptError
from ckpt_tools.checkpoint.layout import Mesh
sys.path.insert(0, sys.argv[1])
from test_dtensor_engine import describe
from pathlib import Path

def parents():
    # process: its parent, of all that run
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found

ranks = []

def kill_one():
    while len(ranks) < 2:
        of = parents()
        ranks[:] = [pid for pid, parent in of.items() if of.get(parent) == os.getpid()]
        time.sleep(0.01)
    os.kill(ranks[0], signal.SIGKILL)

if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # says where it hangs, if it does
    threading.Thread(target=kill_one, daemon=True).start()
    directory = Path(sys.argv[2])
    try:
        save_with_dtensor(describe(directory, "m.safetensors"), str(directory / "out"), Mesh((("dp_shard", 2),)), {})
    except CkptError as error:
        print(error.what, len(set(ranks) & set(parents())))
"""


@pytest.mark.full
def test_save_with_dtensor_killed_rank_ends_the_others(tmp_path):
    save_file({"a": numbers(4)}, tmp_path / "m.safetensors")
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL 0" in done.stdout


def test_save_with_dtensor_existing_destination_is_left_alone(model, tmp_path):
    source, _ = model
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(DestinationExistsError):
        save_with_dtensor(source, str(tmp_path / "out"), Mesh((("dp_shard", 2),)), {})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_save_with_dtensor_source_with_blobs_is_refused(model, tmp_path):
    source, _ = model
    blob = BlobEntry(fqn="step", span=ByteSpan(file="x", offset=0, nbytes=1))
    with_blob = Checkpoint(root=source.root, format="dcp", tensors=source.tensors, blobs=(blob,))
    with pytest.raises(UsageError, match="'step' is not a tensor"):
        save_with_dtensor(with_blob, str(tmp_path / "out"), Mesh((("dp_shard", 2),)), {})
    assert not (tmp_path / "out").exists()


def test_torchrun_rank_needs_one_process_per_rank(monkeypatch):
    mesh = Mesh((("dp_shard", 2),))
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun_rank(mesh) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert torchrun_rank(mesh) == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert torchrun_rank(mesh) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UsageError, match="torchrun started 4 processes"):
        torchrun_rank(mesh)


UNDER_TORCHRUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_dtensor_engine import describe
from ckpt_tools.convert.dtensor import save_with_dtensor
from ckpt_tools.checkpoint.layout import Mesh, Shard
directory = Path(sys.argv[2])
placements = {"a": {"dp_shard": Shard(0)}}
save_with_dtensor(describe(directory, "m.safetensors"), str(directory / "out"), Mesh((("dp_shard", 2),)), placements)
"""


@pytest.mark.full
def test_save_with_dtensor_under_torchrun_is_one_rank(tmp_path):
    save_file({"a": numbers(5, 2)}, tmp_path / "m.safetensors")
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += [str(Path(__file__).parent), str(tmp_path)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    source, mesh = describe(tmp_path, "m.safetensors"), Mesh((("dp_shard", 2),))
    placements = place_tensors(source.tensors, mesh, ()).placements
    assert_saved(source, tmp_path / "out", mesh, placements, {"a": numbers(5, 2)})
