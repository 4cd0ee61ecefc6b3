"""Files of torch.save, compared with what `torch.load` makes of them, bit for bit."""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from formats.saved import flat, read
from hypothesis import assume, given, settings, strategies as st
from samples import examples

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import LimitError, UnreadableError, UsageError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = 1
    for size in shape:
        count *= size
    spare = draw(st.integers(0, 3))
    width = dtype.itemsize
    content = draw(st.binary(min_size=(count + spare) * width, max_size=(count + spare) * width)) or bytes(width)
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    storage = torch.frombuffer(bytearray(content), dtype=dtype)
    tensor = storage[draw(st.integers(0, spare)) :][:count].reshape(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, len(shape) - 1)
    return torch.nn.Parameter(tensor, requires_grad=False) if draw(st.booleans()) else tensor


@st.composite
def states(draw: st.DrawFn) -> dict[str, object]:
    names = st.text("ab.", min_size=1, max_size=4).filter(lambda name: name.strip("."))
    leaves = tensors() | st.integers() | st.none() | st.text(max_size=3) | st.floats()
    nested = st.recursive(
        leaves, lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3), max_leaves=4
    )
    state: dict[str, object] = draw(st.dictionaries(names, nested, max_size=5))
    found = [value for value in state.values() if isinstance(value, torch.Tensor)]
    if found and draw(st.booleans()):  # ties and views of another's storage
        first = draw(st.sampled_from(found))
        state["tied"], state["view"] = first, first[1:] if first.ndim and len(first) else first.view(first.shape)
    return collections.OrderedDict(state) if draw(st.booleans()) else state


@settings(max_examples=examples(60), deadline=None)
@given(state=states(), legacy=st.booleans(), protocol=st.sampled_from([2, 2, 4, 5]))
def test_file_reads_as_torch_loads_it(state: dict[str, object], legacy: bool, protocol: int, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("saved") / "model.pt"
    # torch does not load what it saves of the newer dtypes in this form
    assume(not legacy or not any(dtype in DTYPES[12:] for dtype, _, _ in flat(state).values()))
    torch.save(state, path, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
    loaded = flat(torch.load(path, weights_only=protocol == 2))
    assert read(path) == loaded


def trained(directory: Path, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    """A file as trainers write it: a model, an optimizer, and objects of all kinds."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    config = argparse.Namespace(lr=1.0, layers={3, 4}, best=torch.ones(2))
    config.parent = config  # as omegaconf's nodes refer to each other
    torch.save(
        {
            "epoch": 3,
            "args": config,
            "counts": collections.defaultdict(int, {("a", 1): 2}),
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        },
        directory / name,
    )
    return model.state_dict()


def test_gather_takes_the_model_out_of_a_trainers_file_and_says_what_it_left(tmp_path: Path, capsys) -> None:
    model = trained(tmp_path)
    assert main(["gather", str(tmp_path / "last.ckpt"), str(tmp_path / "out")]) == 0
    told = capsys.readouterr().err
    assert read(tmp_path / "out") == flat(model)
    for part in ("args (argparse.Namespace with 1 tensor)", "epoch", "optimizer state", "'state_dict.'"):
        assert part in told


def test_verify_of_a_trainers_file_says_what_it_did_not_read(tmp_path: Path, capsys) -> None:
    trained(tmp_path)
    assert main(["verify", str(tmp_path / "last.ckpt"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["findings"] == []
    assert any("argparse.Namespace" in text for text in document["not_checked"])
    assert not any("checksum" in text for text in document["not_checked"])


def test_shard_of_a_trainers_file_writes_the_model_alone(tmp_path: Path, capsys) -> None:
    model = trained(tmp_path)
    arguments = ["shard", str(tmp_path / "last.ckpt"), str(tmp_path / "run"), "--mesh", "dp_shard=2"]
    assert main(arguments) == 0
    assert read(tmp_path / "run") == flat(model)
    assert "optimizer state" in capsys.readouterr().err


def test_several_models_in_a_file_need_a_choice(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(2)}
    torch.save({"params": state, "params_ema": {"a.weight": torch.zeros(2)}}, tmp_path / "x.pth")
    with pytest.raises(UsageError, match="params, params_ema") as caught:
        api.gather(tmp_path / "x.pth", tmp_path / "out")
    assert "--strip-prefix params" in str(caught.value.hint)
    api.gather(tmp_path / "x.pth", tmp_path / "out", strip_prefix="params_ema")
    assert read(tmp_path / "out") == flat({"a.weight": torch.zeros(2)})
    assert len(read(tmp_path / "x.pth")) == 2


def test_the_only_state_dict_is_the_model_whatever_its_key(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(2), "scale": torch.ones(1)}
    torch.save(
        {"net": state, "best": torch.tensor(0.5), "opt": {"state": {0: {"exp_avg": torch.ones(2)}}}}, tmp_path / "x.pt"
    )
    notes = api.gather(tmp_path / "x.pt", tmp_path / "out").notes
    assert read(tmp_path / "out") == flat(state)
    assert any("took 'net'" in note for note in notes)
    assert any("best" in note for note in notes)
    nested = {"encoder": {"w": torch.ones(2)}, "decoder": {"w": torch.zeros(2)}}
    torch.save(nested, tmp_path / "nested.pt")
    api.gather(tmp_path / "nested.pt", tmp_path / "all")
    assert read(tmp_path / "all") == flat(nested)


def test_names_of_one_tensor_are_said(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    torch.save({"embed": weight, "head": weight, "part": weight[:2]}, tmp_path / "x.pt")
    notes = api.gather(tmp_path / "x.pt", tmp_path / "out").notes
    assert any("embed = head" in note and "part" not in note for note in notes)


@pytest.mark.parametrize("name", ["pytorch_model", "diffusion_pytorch_model"])
def test_directory_with_an_index_is_one_model(name: str, tmp_path: Path) -> None:
    state = {f"layers.{i}.w": torch.full((3,), float(i)) for i in range(4)}
    halves = {f"{name}-{i + 1:05d}-of-00002.bin": dict(list(state.items())[2 * i : 2 * i + 2]) for i in range(2)}
    for file, half in halves.items():
        torch.save(half, tmp_path / file)
    index = {"metadata": {}, "weight_map": {fqn: file for file, half in halves.items() for fqn in half}}
    (tmp_path / f"{name}.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "training_args.bin")
    assert read(tmp_path) == flat(state)
    assert api.verify(tmp_path).findings == ()
    result = api.gather(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", allow_foreign_names=True)
    assert "config.json" in dict(result.files)
    os.remove(tmp_path / f"{name}-00002-of-00002.bin")
    with pytest.raises(UnreadableError, match="1 of 2 files of the index are missing"):
        read(tmp_path)


# What is damaged


def test_stream_has_no_checksums_and_verify_says_so(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(50.0)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    result = api.verify(tmp_path / "x.pt")
    assert result.ok
    assert any("1 of 1 chunk" in text for text in result.not_checked)


# What is not read


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        ({"model": torch.nn.Linear(2, 2)}, r"model \(torch.nn.modules.linear.Linear\)"),
        ({"w": torch.zeros(4).as_strided((2, 3), (1, 1))}, "share memory"),
        (torch.ones(3), "without a name"),
    ],
)
def test_value_of_another_kind_is_refused_by_name(value: object, words: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(UnreadableError, match=words) as caught:
        read(tmp_path / "x.pt")
    assert caught.value.where == str(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused_by_name(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.pt")
    with pytest.raises(UnreadableError, match="TorchScript"):
        read(tmp_path / "x.pt")


def test_expanded_tensor_is_read_part_by_part(tmp_path: Path) -> None:
    state = {"ids": torch.arange(5).expand(3, 5), "one": torch.ones(1).expand(7)}
    torch.save(state, tmp_path / "x.pt")
    assert read(tmp_path / "x.pt") == flat(state)
    assert api.verify(tmp_path / "x.pt").findings == ()
    torch.save({"huge": torch.ones(1).expand(1 << 30, 1 << 20)}, tmp_path / "x.pt")
    with pytest.raises(LimitError, match="expanded"):
        read(tmp_path / "x.pt")


def test_file_of_python_2_is_read(tmp_path: Path) -> None:
    """The opcodes of cPickle: strings of bytes, a memo that begins at 1, an OrderedDict made of lists of pairs."""
    pickled = (
        b"\x80\x02ccollections\nOrderedDict\nq\x01]q\x02]q\x03(U\x01wq\x04ctorch._utils\n_rebuild_tensor\nq\x05"
        b"((U\x07storageq\x06ctorch\nFloatStorage\nq\x07U\x010q\x08U\x03cpuq\tK\x02Ntq\nQK\x00K\x02\x85q\x0bK\x01\x85"
        b"q\x0ctq\rRq\x0eea\x85q\x0fRq\x10."
    )
    head = io.BytesIO()
    torch.save({}, head, _use_new_zipfile_serialization=False)
    begin = head.getvalue()[: head.getvalue().index(b"\x80\x02}q\x00.")]
    keys = b"\x80\x02]q\x01U\x010q\x02a."
    (tmp_path / "x.pth").write_bytes(
        begin + pickled + keys + (2).to_bytes(8, "little") + torch.ones(2).numpy().tobytes()
    )
    assert torch.equal(torch.load(tmp_path / "x.pth", weights_only=False)["w"], torch.ones(2))
    assert read(tmp_path / "x.pth") == flat({"w": torch.ones(2)})


def test_reading_does_not_import_torch(tmp_path: Path) -> None:
    trained(tmp_path)
    script = (
        "import sys; from ckpt_tools.cli import main; "
        f"codes = [main([verb, {str(tmp_path / 'last.ckpt')!r}, *rest]) for verb, rest in "
        f"(('inspect', []), ('verify', []), ('gather', [{str(tmp_path / 'out')!r}]))]; "
        "assert codes == [0, 0, 0], codes; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ}, stdout=subprocess.DEVNULL)


def test_tensor_subclass_of_torchao_is_refused_with_what_makes_it_plain() -> None:
    """Saved by torchao 0.18.0: quantize_(Sequential(Linear(32, 32)), Int8WeightOnlyConfig()), then torch.save."""
    with pytest.raises(UnreadableError, match=r"0\.weight.*torchao\.quantization\.Int8Tensor") as caught:
        api.open_checkpoint(Path(__file__).parent / "torchao-0.18.0-int8.bin")
    assert "dequantize()" in str(caught.value.hint)
