"""A quantised weight is one unit: no command casts, averages, names or leaves out a part of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from quantised.test_samples import FEW, NAMES, SAMPLES, opened
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROOTS = {"model": ("model.", True), "state": ("state.model.", True), "module": ("module.", False), "flat": ("", False)}


def nested(prefix: str, tensors: dict) -> dict:
    found: dict = dict(tensors)
    for key in reversed(prefix.rstrip(".").split(".")):
        found = {key: found}
    return found


def write(directory: Path, tensors: dict, settings: dict | None, **config: object) -> str:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    told = {} if settings is None else {"quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config | told))
    return str(directory)


def of_bnb(nested: bool = True, storage: torch.dtype = torch.uint8) -> tuple[dict, torch.Tensor]:
    """Return a layer as bitsandbytes saves it, and what it computes with."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(
        weight, compress_statistics=nested, quant_type="nf4", quant_storage=storage
    )
    parts = {f"a.weight.{name}": value.contiguous() for name, value in state.as_dict(packed=True).items()}
    return {"a.weight": packed, **parts, "norm.weight": torch.ones(7) / 3}, functional.dequantize_4bit(packed, state)


OTHERS = {  # method → its tensors; what stays is told by `parts`
    "fp8": {"a.weight": torch.ones(32, 32).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 2) / 3},
    "fbgemm_fp8": {"a.weight": torch.ones(32, 32).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(32, 1) / 3},
    "mxfp4": {"e.w_blocks": torch.ones(2, 4, 1, 16).byte(), "e.w_scales": torch.ones(2, 4, 1).byte()},
    "eight bits": {"a.weight": torch.ones(8, 8).to(torch.int8), "a.SCB": torch.ones(8) / 3},
    "hqq": {"a.W_q": torch.ones(8, 8).byte(), "a.scale": torch.ones(8, 1) / 3, "a.zero": torch.ones(8, 1) / 3},
    "quanto": {"a.weight._data": torch.ones(8, 8).to(torch.int8), "a.weight._scale": torch.ones(8, 1) / 3},
    "quanto of 4 bits": {
        "a.weight._data._data": torch.ones(4, 8).byte(),
        "a.weight._scale": torch.ones(8, 1) / 3,
        "a.weight._shift": torch.ones(8, 1) / 3,
    },
    "aqlm": {
        "a.codes": torch.ones(8, 8).to(torch.int8),
        "a.codebooks": torch.ones(2, 8) / 3,
        "a.scales": torch.ones(8) / 3,
    },
    "vptq": {"a.indices": torch.ones(8, 8).to(torch.int16), "a.centroids.weight": torch.ones(1, 8) / 3},
    "spqr": {"a.dense_weights": torch.ones(8, dtype=torch.int64), "a.in_perm_scale": torch.ones(8) / 3},
}
PLAIN = {"a.bias": torch.ones(3) / 3, "norm.weight": torch.ones(7) / 3}


@pytest.mark.parametrize(
    ("method", "is_told"), [(m, told) for m in OTHERS for told in (True, False) if told or m != "spqr"]
)
def test_cast_leaves_the_whole_unit(tmp_path, capsys, method, is_told) -> None:
    hub = write(tmp_path / "hub", OTHERS[method] | PLAIN, {"quant_method": method} if is_told else None)
    packed, out = str(tmp_path / "dcp"), tmp_path / "out"
    assert main(["shard", hub, packed, "--mesh", "dp_shard=2", "--dtype", "bf16"]) == 0
    assert main(["gather", packed, str(out), "--dtype", "f16"]) == 0
    said = capsys.readouterr().err
    assert "mxfp4" in method or "not cast" in said
    found = load_file(out / "model.safetensors")
    for name, tensor in OTHERS[method].items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert {found[name].dtype for name in PLAIN} == {torch.float16}


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("is_nested", [False, True])
def test_qlora_base_survives_every_command(tmp_path, capsys, is_nested, storage) -> None:
    tensors, wanted = of_bnb(is_nested, storage)
    hub = write(tmp_path / "hub", tensors, {"quant_method": "bitsandbytes"})
    lines = [f"{name} = {name.replace('a.', 'b.', 1)}\n" for name in tensors]
    (tmp_path / "map").write_text("[*]\n" + "".join(lines))
    commands = {
        "gather": ["gather", hub, "--dtype", "f16"],
        "dtype-for": ["gather", hub, "--dtype-for", "**=f16"],
        "rename": ["rename", hub, "--map", str(tmp_path / "map"), "--dtype", "bf16"],
        "extract": ["extract", hub, "--include", "a.**", "--dtype", "bf16"],
        "shard": ["shard", hub, "--mesh", "dp_shard=3", "--dtype", "bf16"],
    }
    for name, (command, source, *options) in commands.items():
        out = str(tmp_path / name)
        assert main([command, source, out, *options, "-q"]) == 0, capsys.readouterr().err
        back = str(tmp_path / f"{name} back")
        assert main(["gather", out, back, "--dequantize", "--dtype", "f32", "-q"]) == 0, capsys.readouterr().err
        found = load_file(Path(back) / "model.safetensors")
        assert torch.equal(found["b.weight" if name == "rename" else "a.weight"], wanted), name


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("gather", ["--exclude", "**.absmax"]),
        ("gather", ["--dtype-for", "**.quant_map=bf16"]),
        ("extract", ["--include", "**.weight"]),
        ("shard", ["--mesh", "dp_shard=2", "--exclude", "**.quant_state.**"]),
        ("rename", ["--map", "MAP"]),
    ],
)
def test_what_would_part_a_unit_is_refused(tmp_path, capsys, command, options) -> None:
    hub = write(tmp_path / "hub", of_bnb()[0], {"quant_method": "bitsandbytes"})
    lines = [f"{name} = {name}\n" for name in of_bnb()[0] if name != "a.weight"]
    (tmp_path / "map").write_text("[*]\na.weight = b.weight\n" + "".join(lines))
    options = [str(tmp_path / "map") if option == "MAP" else option for option in options]
    assert main([command, hub, str(tmp_path / "out"), *options]) == 2
    assert "quantised weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", [*OTHERS, "bitsandbytes"])
def test_quantised_weights_have_no_average(tmp_path, capsys, method) -> None:
    tensors = OTHERS.get(method) or of_bnb()[0]
    sides = [write(tmp_path / name, tensors | PLAIN, {"quant_method": method}) for name in "ab"]
    assert main(["average", *sides, str(tmp_path / "out")]) == 2
    assert "cannot be averaged" in capsys.readouterr().err


def test_figures_and_differences_are_of_weights(tmp_path) -> None:
    tensors, _ = of_bnb(nested=False)
    other = tensors | {name: tensors[name] * 1.001 for name in ("a.weight.absmax", "a.weight.quant_map")}
    one, two = (
        write(tmp_path / name, given, {"quant_method": "bitsandbytes"})
        for name, given in (("a", tensors), ("b", other))
    )
    for tolerance in (None, 1.0):
        (change,) = api.diff(one, two, atol=tolerance).changed
        assert change.fqn == "a.weight"
        assert change.relative is None
    found = api.stats(one, against=two)
    assert {row.fqn for row in found.tensors if row.moments is not None} == {"norm.weight"}
    assert any("1 quantised weights" in each for each in found.not_checked)
    assert {row.fqn for row in api.stats(one, dequantize=True).tensors} == {"a.weight", "norm.weight"}


def test_scale_of_a_plain_module_is_cast(tmp_path) -> None:
    tensors = {"a.weight": torch.ones(4, 4), "a.scale": torch.ones(4) / 3, "logit_scale": torch.ones(1) / 3}
    hub = write(tmp_path / "hub", tensors, None)
    assert main(["gather", hub, str(tmp_path / "out"), "--dtype", "bf16", "-q"]) == 0
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


# Roots


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("sample", [p for p in FEW if p.stem != "torchao"], ids=lambda path: path.stem)
def test_model_is_decoded_wherever_it_lies(tmp_path, sample, root) -> None:
    prefix, is_nested = ROOTS[root]
    wanted = opened(sample, tmp_path / "hub")
    dtype = NAMES[next(iter(wanted.values())).dtype]
    stored = load_file(tmp_path / "hub" / "model.safetensors") | {"norm.weight": torch.ones(8)}
    state = nested(prefix, stored) if is_nested else {prefix + name: tensor for name, tensor in stored.items()}
    dcp.save(state | {"optim": {"state": {"norm.weight": {"exp_avg": torch.ones(8)}}}}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / "config.json").write_text((tmp_path / "hub" / "config.json").read_text())
    out = tmp_path / "out"
    assert main(["gather", str(tmp_path / "dcp"), str(out), "--dequantize", "--dtype", dtype, "-q"]) == 0
    found = load_file(out / "model.safetensors")
    assert found.keys() == {*wanted, "norm.weight"}
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []
    cut = str(tmp_path / "cut")
    options = ["--mesh", "dp_shard=2", "--dequantize", "--dtype", dtype, "-q"]
    assert main(["reshard", str(tmp_path / "dcp"), cut, *options]) == 0
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    loaded = nested(prefix, state) if is_nested else {prefix + name: tensor for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=cut, no_dist=True)
    assert [name for name, tensor in wanted.items() if not torch.equal(state[name], tensor)] == []


@pytest.mark.full(but=["fp8-state", "bitsandbytes-module"])
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("method", [*OTHERS, "bitsandbytes"])
def test_casts_leave_the_whole_unit_wherever_the_model_lies(tmp_path, method, root) -> None:
    unit = OTHERS.get(method) or of_bnb()[0]
    run = save_under(root, unit | PLAIN, {"quant_method": method}, tmp_path / "dcp")
    assert main(["reshard", run, str(tmp_path / "cut"), "--mesh", "dp_shard=2", "--dtype", "bf16", "-q"]) == 0
    assert main(["gather", str(tmp_path / "cut"), str(tmp_path / "out"), "--dtype-for", "**=f16", "-q"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == (unit | PLAIN).keys()
    for name, tensor in unit.items():
        assert (name in PLAIN) or torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert {found[name].dtype for name in PLAIN} == {torch.float16}
    hub = write(tmp_path / "hub", unit | PLAIN, {"quant_method": method})
    assert api.diff(hub, run)
    assert api.verify(run, against=hub)
    part = "e" if method == "mxfp4" else "a"
    assert main(["gather", run, str(tmp_path / "part"), "--include", f"{part}.**", "-q"]) == 0
    assert load_file(tmp_path / "part" / "model.safetensors").keys() == {
        name for name in unit | PLAIN if name.startswith(f"{part}.")
    }
    assert main(["average", run, hub, str(tmp_path / "mean")]) == 2


def save_under(root: str, tensors: dict, settings: dict, directory: Path) -> str:
    """Save a model below a root by DCP, with its config beside."""
    prefix, is_nested = ROOTS[root]
    dcp.save(
        nested(prefix, tensors) if is_nested else {prefix + name: tensor for name, tensor in tensors.items()},
        checkpoint_id=directory,
    )
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return str(directory)


@pytest.mark.parametrize("root", ROOTS)
def test_qlora_base_is_decoded_under_a_key(tmp_path, root) -> None:
    tensors, wanted = of_bnb()
    save_under(root, tensors, {"quant_method": "bitsandbytes"}, tmp_path / "dcp")
    assert main(["gather", str(tmp_path / "dcp"), str(tmp_path / "out"), "--dequantize", "--dtype", "f32", "-q"]) == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], wanted)


# The model and nothing else


@pytest.mark.parametrize("command", [("reshard", "--mesh", "dp_shard=2"), ("extract", "--include", "**")])
def test_casts_touch_the_model_alone(tmp_path, capsys, command) -> None:
    moments = {"exp_avg_sq": torch.full((4,), 1e-12), "step": torch.tensor(3001.0)}
    state = {"model": {"a.weight": torch.ones(4) / 3}, "optim": {"state": {"a.weight": moments}}}
    dcp.save(state | {"scheduler": {"base": torch.ones(1) / 3}}, checkpoint_id=tmp_path / "dcp")
    verb, *options = command
    out = str(tmp_path / "out")
    assert main([verb, str(tmp_path / "dcp"), out, *options, "--dtype", "bf16"]) == 0
    said = capsys.readouterr().err
    tensors = {e.fqn: e.dtype.name for e in api.open_checkpoint(out).tensors}
    assert tensors.pop("model.a.weight") == "BF16"
    assert set(tensors.values()) <= {"F32"}
    if verb == "reshard":
        assert len(tensors) == 3
        assert "not the model's" in said
        loaded = {"optim": {"state": {"a.weight": {"step": torch.tensor(0.0)}}}}
        dcp.load(loaded, checkpoint_id=out, no_dist=True)
        assert loaded["optim"]["state"]["a.weight"]["step"] == 3001


# torchao


def test_files_of_torchao_keep_their_header_or_are_refused(tmp_path, capsys) -> None:
    wanted = opened(next(path for path in SAMPLES if path.stem == "torchao"), tmp_path / "hub")
    hub, cut, back = (str(tmp_path / name) for name in ("hub", "cut", "back"))
    assert main(["shard", hub, cut, "--mesh", "dp_shard=3", "--prefix", "model.", "-q"]) == 0
    assert main(["gather", cut, back, "-q"]) == 0
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "hub/model.safetensors").read_bytes()
    held = api.gather(cut, str(tmp_path / "floats"), dequantize=True)
    assert held.checked["digests"] == len(api.open_checkpoint(cut).tensors)  # by the names below the prefix
    assert held.verified
    found = load_file(tmp_path / "floats" / "model.safetensors")
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []
    capsys.readouterr()
    for command in (
        ["gather", cut, "--dtype", "f16"],
        ["shard", hub, "--mesh", "dp_shard=2", "--dtype", "f16"],
        ["shard", hub, "--mesh", "dp_shard=2", "--serialization", "safetensors"],
        ["extract", hub, "--include", "a.**"],
        ["gather", hub, "--to", "torch"],
    ):
        assert main([*command[:2], str(tmp_path / "no"), *command[2:]]) == 2
        assert "header of their file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        ("Int4Tensor", {}, "is a Int4Tensor of torchao"),
        ("Int8Tensor", {"block_size": [1, 3]}, "is [4, 2], which is no grid"),
        ("Float8Tensor", {}, "a Float8Tensor of torchao, and 'a._weight_qdata' I8"),
    ],
)
def test_what_torchao_says_otherwise_is_refused(tmp_path, capsys, kind, change, what) -> None:
    tensors = {"a._weight_qdata": torch.ones(4, 8).to(torch.int8), "a._weight_scale": torch.ones(4, 2)}
    said = {"_type": kind, "_data": {"block_size": [1, 8]} | change, "_tensor_data_names": ["qdata", "scale"]}
    hub = write(tmp_path / "hub", tensors, {"quant_method": "torchao"})
    for header, wanted in (({"a.weight": json.dumps(said), "tensor_names": "[]"}, what), ({}, "is not here")):
        save_file(tensors, tmp_path / "hub" / "model.safetensors", metadata=header | {"format": "pt"})
        assert main(["gather", hub, str(tmp_path / "out"), "--dequantize"]) in (2, 4)
        assert wanted in capsys.readouterr().err
