"""Both engines of `shard` write the same checkpoint: the same chunks by the same ranks, the same bytes."""

from __future__ import annotations

import pytest
import torch
from forked import call
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, parse_manifest
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.infer_mesh import rank_of_file
from ckpt_tools.cli import main

pytestmark = pytest.mark.full

RULES = """
version: 1
rules:
  - {match: "layers.*.{q,up}", style: colwise}
  - {match: "layers.*.{o,down}", style: rowwise}
  - {match: "experts", place: {tp: S(2)}}
"""
CASES = {
    "fsdp-tp": ("dp_shard=2,tp=2", RULES, {}),
    "uneven-and-prefix": ("dp_shard=3", None, {"set": ["**.experts=dp_shard:S(2)"], "prefix": "net."}),
}


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    layers = {}
    for i in range(2):
        layers |= {
            f"layers.{i}.q.weight": numbers(8, 6),
            f"layers.{i}.q.bias": numbers(8),
            f"layers.{i}.o.weight": numbers(6, 8, dtype=torch.bfloat16),
            f"layers.{i}.o.bias": numbers(6),
            f"layers.{i}.up.weight": numbers(10, 6, dtype=torch.float16),
            f"layers.{i}.down.weight": numbers(6, 10, dtype=torch.float64),
        }
    save_file(layers, directory / "model-00001-of-00002.safetensors")
    rest = {
        "embed.weight": numbers(7, 6),
        "experts": numbers(3, 5, 12),
        "norm.weight": numbers(1),
        "ids": torch.arange(9),
        "mask": torch.tensor([True, False, True, True, False]),
        "scale": torch.tensor(0.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "quantised": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(8, 8),
    }
    save_file(rest, directory / "model-00002-of-00002.safetensors")
    weight_map = {name: f"model-{i:05d}-of-00002.safetensors" for i, part in ((1, layers), (2, rest)) for name in part}
    (directory / "model.safetensors.index.json").write_text(str({"weight_map": weight_map}).replace("'", '"'))
    (directory / "config.json").write_text("{}")
    return directory


def table_and_bytes(directory):
    """(fqn, dtype, shape) → (rank, box, bytes) of every chunk, in the order of the metadata."""
    with open_path(str(directory)) as opened:
        return {
            (entry.fqn, entry.dtype.name, entry.shape): [
                (
                    rank_of_file(chunk.span.file),
                    chunk.box,
                    opened.source.read(chunk.span.file, chunk.span.offset, chunk.span.nbytes),
                )
                for chunk in entry.chunks
            ]
            for entry in opened.resolved().tensors
        }


@pytest.fixture(scope="module", params=CASES)
def both(request, source, tmp_path_factory):
    """The same conversion by each engine."""
    mesh, rules, options = CASES[request.param]
    directory = tmp_path_factory.mktemp("both")
    if rules is not None:
        (directory / "rules.yaml").write_text(rules)
        options = options | {"rules": directory / "rules.yaml"}
    for engine in ("stream", "dtensor"):
        result = call(api.shard, source, directory / engine, mesh=mesh, engine=engine, **options)
        assert result.verified
        assert result.num_tensors == 20
    return directory


def test_engines_write_the_same_chunks_with_the_same_bytes(both):
    stream, dtensor = (table_and_bytes(both / engine) for engine in ("stream", "dtensor"))
    assert len(stream) == 20
    assert sorted(stream) == sorted(dtensor)
    assert stream == dtensor


def test_engines_write_what_torch_reads_as_the_same_table(both):
    tables = []
    for engine in ("stream", "dtensor"):
        metadata = FileSystemReader(both / engine).read_metadata()
        tables.append(metadata.state_dict_metadata)
        assert metadata.storage_data.keys() == {
            type(index)(fqn=fqn, offset=chunk.offsets)
            for fqn, entry in metadata.state_dict_metadata.items()
            for chunk in entry.chunks
            for index in list(metadata.storage_data)[:1]
        }
    assert tables[0].keys() == tables[1].keys()
    for fqn, entry in tables[0].items():
        other = tables[1][fqn]
        assert (entry.size, entry.chunks) == (other.size, other.chunks), fqn
        assert entry.properties.dtype == other.properties.dtype, fqn


def test_engines_write_checkpoints_that_pass_the_same_checks_and_record_the_same_manifest(both):
    for engine in ("stream", "dtensor"):
        assert api.verify(both / engine, level="data").findings == ()
    assert api.diff(both / "stream", both / "dtensor").equal
    manifests = [parse_manifest((both / engine / MANIFEST_NAME).read_bytes()) for engine in ("stream", "dtensor")]
    for field in ("mesh", "tensors", "assets", "origin", "format"):
        assert getattr(manifests[0], field) == getattr(manifests[1], field), field


def test_engines_gather_back_to_the_same_files(both, tmp_path):
    for engine in ("stream", "dtensor"):
        api.gather(both / engine, tmp_path / engine)
    names = sorted(path.name for path in (tmp_path / "stream").iterdir() if path.name != MANIFEST_NAME)
    assert "config.json" in names
    for name in names:
        assert (tmp_path / "stream" / name).read_bytes() == (tmp_path / "dtensor" / name).read_bytes()


def test_dtensor_engine_with_a_cast_is_refused_before_any_write(source, tmp_path, capsys):
    arguments = ["shard", str(source), str(tmp_path / "out"), "--mesh", "dp_shard=2", "--engine", "dtensor"]
    assert main([*arguments, "--dtype", "bf16"]) == 2
    assert "--engine dtensor does not cast" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
