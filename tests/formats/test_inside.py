"""Tensors inside of DCP objects, and arrays among tensors; stock torch wrote them and says what they are."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckpt_tools
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError
from ckpt_tools.fsdp2 import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _save(state: dict[str, Any], path: Path, *, flat: bool = True) -> Path:
    dcp.save(state, checkpoint_id=path, planner=DefaultSavePlanner(flatten_state_dict=flat), no_dist=True)
    return path


def _gathered(source: Path, **options: Any) -> dict[str, torch.Tensor]:
    out = source.with_name("out")
    ckpt_tools.gather(source, out, **options)
    return load_file(out / "model.safetensors")


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_gather_tuples_of_tensors_reads_them_by_their_indices(tmp_path: Path) -> None:
    a, b, c, w = _tensor(3, 4), _tensor(5), _tensor(6, 2).T, _tensor(2)
    source = _save({"x": (a, b), "y": {"z": ([c, 1], {"k": b})}, "w": w}, tmp_path / "dcp")
    _same(_gathered(source), {"w": w, "x.0": a, "x.1": b, "y.z.0.0": c, "y.z.1.k": b})


def test_gather_not_flattened_takes_the_model_alone(tmp_path: Path) -> None:
    model = {"layers.0.weight": _tensor(4, 4), "layers.1.weight": _tensor(4)}
    state = {"model": model, "optimizer": {"state": {0: {"exp_avg": _tensor(4, 4)}}}, "rng": torch.get_rng_state()}
    source = _save(state, tmp_path / "dcp", flat=False)
    _same(_gathered(source), model)
    assert ckpt_tools.diff(source, tmp_path / "out").equal


_STATE = {
    "rng_state": (torch.get_rng_state(), 1),
    "lr_scheduler": {"base": (torch.zeros(1),), "x": np.zeros(3)},
    "optimizer": {"param_groups": [{"lr": (torch.ones(1),)}]},
    "dataloader": {"dp_rank_0": b"bytes", "seen": (torch.zeros(2),)},
}


@pytest.mark.parametrize("root", ["", "model"])
def test_gather_step_leaves_train_state_out(tmp_path: Path, root: str) -> None:
    model = {"layers.0.weight": _tensor(4, 4), "layers.1.weight": _tensor(4)}
    state = {root: model} if root else dict(model)
    _same(_gathered(_save({**state, **_STATE}, tmp_path / "dcp")), model)


class _Holder:
    def __init__(self) -> None:
        self.held = torch.zeros(4)


_SEALED = {"array": np.arange(5.0), "object": _Holder(), "deep": ({"a": np.zeros((2, 2), np.float16)},)}


@pytest.mark.parametrize("kind", _SEALED)
@pytest.mark.parametrize("where", ["dcp", "pt", "nested.pt"])
def test_gather_arrays_and_objects_are_refused_unless_left_out(tmp_path: Path, kind: str, where: str) -> None:
    w, source = _tensor(2, 2), tmp_path / where
    state = {"w.a": w, "odd": _SEALED[kind]}
    if where == "dcp":
        _save(state, source)
    else:
        torch.save({"state_dict": state} if where == "nested.pt" else state, source)
    with pytest.raises(UnreadableError, match=r"odd") as caught:
        ckpt_tools.gather(source, tmp_path / "out")
    assert caught.value.exit_code == 4
    _same(_gathered(source, exclude=["**odd**"]), {"w.a": w})


def test_gather_array_beside_the_model_is_no_part_of_it(tmp_path: Path) -> None:
    w = _tensor(2, 2)
    torch.save({"state_dict": {"w.a": w}, "rng": {"numpy": np.random.default_rng(0).random(3)}}, tmp_path / "a.pt")
    _same(_gathered(tmp_path / "a.pt"), {"w.a": w})


def test_reshard_keeps_objects_byte_for_byte(tmp_path: Path) -> None:
    a, w = _tensor(3, 4), _tensor(8, 2)
    source = _save({"x": (a, 1), "w": w}, tmp_path / "dcp")
    ckpt_tools.reshard(source, tmp_path / "new", mesh="dp_shard=2")
    old, new = (ckpt_tools.open_checkpoint(path) for path in (source, tmp_path / "new"))
    assert [entry.fqn for entry in new.tensors] == ["w"]
    (one,), (other,) = old.blobs, new.blobs
    bytes_of = [
        Path(c.root, b.span.file).read_bytes()[b.span.offset :][: b.span.nbytes] for c, b in ((old, one), (new, other))
    ]
    assert bytes_of[0] == bytes_of[1]
    loaded: dict[str, Any] = {"x": (torch.zeros(3, 4), 0), "w": torch.zeros(8, 2)}
    dcp.load(loaded, checkpoint_id=tmp_path / "new", no_dist=True)
    assert torch.equal(loaded["x"][0], a)


def test_diff_sees_a_change_inside_of_an_object(tmp_path: Path) -> None:
    a, w = _tensor(3, 4), _tensor(2)
    one, other = _save({"x": (a,), "w": w}, tmp_path / "a"), _save({"x": (a + 1,), "w": w}, tmp_path / "b")
    assert [change.fqn for change in ckpt_tools.diff(one, other).changed] == ["x.0"]


def test_average_reads_what_lies_inside_and_refuses_what_it_cannot(tmp_path: Path) -> None:
    a, w = _tensor(3, 4), _tensor(2)
    for name, factor in (("a", 1.0), ("b", 3.0)):
        _save({"x": (a * factor,), "w": w}, tmp_path / name)
    ckpt_tools.average([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    loaded = {"x.0": torch.zeros(3, 4), "w": torch.zeros(2)}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.allclose(loaded["x.0"], a * 2)
    for name in ("c", "d"):
        _save({"x": np.zeros(3), "w": w}, tmp_path / name)
    with pytest.raises(UnreadableError, match="numpy"):
        ckpt_tools.average([tmp_path / "c", tmp_path / "d"], tmp_path / "no")


@pytest.mark.parametrize("kind", ["dcp", "pt"])
def test_objects_are_counted_by_class_in_text_json_and_page(tmp_path: Path, capsys: Any, kind: str) -> None:
    holders, source = {"a": _Holder(), "b": [_Holder(), slice(1)]}, tmp_path / kind
    state = {"model": {"l.0.w": _tensor(2)}, "rng": (torch.zeros(3), 1), "lr": 0.1, "o": (holders,)}
    _save(state, source) if kind == "dcp" else torch.save(state, source)
    counted = {f"{__name__}._Holder": 2, "__builtin__.slice": 1, "tensors": 2}
    counted |= {"tensors": 3, "bytes": 44} if kind == "dcp" else {}  # of a .pt, that of rng is read as a tensor
    documents = []
    for verb in ("inspect", "verify"):
        assert main([verb, str(source), "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0]["objects"] == documents[1]["objects"] == counted
    line = f"{'3 tensors, 44 B' if kind == 'dcp' else '2 tensors'}; 1 × __builtin__.slice, 2 × {__name__}._Holder"
    assert main(["inspect", str(source), "--html", str(tmp_path / "page.html")]) == 0
    assert f": {line}\n" in capsys.readouterr().out
    assert line in (tmp_path / "page.html").read_text()
    if kind == "dcp":
        assert [blob["census"] for blob in documents[0]["blobs"] if blob["fqn"] == "lr"] == [{}]
        (told,) = (text for text in documents[1]["not_checked"] if "beyond their bytes" in text)
        assert "rng (1 tensor, 12 B), o (2 tensors, 32 B" in told
        assert "lr" not in told


_READ = {"None": None, "True": True, str(2**200): 2**200}
_REFUSED = {"bytes": b"k", "float": 1.5, "tuple": ("a", 1), "list": frozenset("a"), "torch.float32": torch.float32}


@pytest.mark.parametrize("where", ["dcp", "a.pt", "model_world_size_1_rank_0.pt"])
@pytest.mark.parametrize("name", [*_READ, *_REFUSED])
def test_odd_keys_are_read_as_dcp_spells_them_or_refused_by_name(tmp_path: Path, name: str, where: str) -> None:
    a, w, key = _tensor(2, 2), _tensor(2), {**_READ, **_REFUSED}[name]
    state, file = {"l.0.w": w, "odd": ({key: a},)}, tmp_path / "in" / where
    (tmp_path / "in").mkdir()
    _save(state, file) if where == "dcp" else torch.save(state, file)
    source = file.parent if where.startswith("model") else file
    if name in _READ:
        assert ckpt_tools.open_checkpoint(_save({"odd": {key: a}}, tmp_path / "x")).tensors[0].fqn == f"odd.{name}"
        _same(_gathered(source), {"l.0.w": w, f"odd.0.{name}": a})
        return
    clean = _save({"l.0.w": w}, tmp_path / "clean")
    diffs = (partial(ckpt_tools.diff, clean), partial(ckpt_tools.diff, b=clean))
    for refuse in (ckpt_tools.stats, *diffs, partial(ckpt_tools.gather, destination="no")):
        with pytest.raises(UnreadableError, match=re.escape(f"odd.0.({name} as key): a tensor")):
            refuse(source)
    assert ckpt_tools.diff(source, source, exclude=["**odd**"]).equal
    assert ckpt_tools.stats(source, exclude=["**odd**"]).tensors[0].fqn == "l.0.w"
    ckpt_tools.extract(source, tmp_path / "new", exclude=["**odd**"])  # the hint
    _same(_gathered(tmp_path / "new"), {"l.0.w": w})
    model = torch.nn.ParameterDict({"w": torch.zeros(2)})
    report = load_checkpoint(model, source, names=lambda name: f"l.0.{name}")
    assert any(each.startswith("odd") for each in report.unread)


@pytest.mark.parametrize("where", ["dcp", "a.pt"])
def test_export_lora_refuses_a_part_that_it_cannot_read(tmp_path: Path, where: str) -> None:
    root, source = "base_model.model.layers", tmp_path / where
    state = {f"{root}.0.q_proj.lora_A.weight": _tensor(2, 4), f"{root}.0.q_proj.lora_B.weight": _tensor(4, 2)}
    odd = {**state, f"{root}.1.q_proj": (np.zeros(3),)}
    _save(odd, source) if where == "dcp" else torch.save(odd, source)
    with pytest.raises(UnreadableError, match=r"layers\.1\.q_proj\.0: a numpy array"):
        ckpt_tools.export_lora(source, tmp_path / "out", to="peft", alpha=2)
    ckpt_tools.export_lora(source, tmp_path / "out", to="peft", alpha=2, exclude=["**layers.1**"])
    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == 2


def test_inside_damaged_item_is_not_known_and_refused(tmp_path: Path) -> None:
    source = _save({"w": _tensor(2), "x": (_tensor(3),)}, tmp_path / "dcp")
    (blob,) = ckpt_tools.open_checkpoint(source).blobs
    content = bytearray((source / blob.span.file).read_bytes())
    content[blob.span.offset + content[blob.span.offset :].index(b"_rebuild")] ^= 1
    (source / blob.span.file).write_bytes(content)
    assert "never unpickled): not known: " in ckpt_tools.inspect(source).objects
    with pytest.raises(UnreadableError, match="x: an object that is not read"):
        ckpt_tools.gather(source, tmp_path / "out")
