"""`ckpt average`: weighted means and moving averages against torch, bit for bit, of any formats."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import small_blocks

from ckpt_tools import average, diff, gather, shard, verify
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError


def model(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(64, 48).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(70, 33) * 10.0**seed,
        "model.layers.0.mlp.down_proj.weight": torch.randn(33, 70).half(),
        "model.layers.0.norm.weight": torch.randn(48, dtype=torch.float64),
        "model.layers.0.bn.num_batches_tracked": torch.tensor(100 + seed),
        "model.mask": torch.tensor([True, False, True]),
        "model.none.weight": torch.zeros(0, 4),
    }


def write(path, tensors) -> str:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "unknown", "torch_dtype": "bfloat16"}))
    return str(path)


def oracle(models, steps, dtype=None):
    """Return the average as the module's docstring defines it, by torch."""
    found = {}
    for name, first in models[0].items():
        if not first.is_floating_point():
            found[name] = models[-1][name]
            continue
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        mean = first.to(wide)
        for other, step in zip(models[1:], steps, strict=True):
            mean = mean + (other[name].to(wide) - mean) * torch.tensor(step, dtype=wide)
        found[name] = mean.to(dtype or first.dtype)
    return found


def same(path, expected) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_infinity_and_a_number_are_infinity(tmp_path, dtype) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[inf, 1.0, inf, inf, nan, -inf], [1.0, inf, inf, -inf, 1.0, 2.0], [2.0, 2.0, inf, 1.0, inf, 3.0]]
    sources = [write(tmp_path / str(i), {"w": torch.tensor(row, dtype=dtype)}) for i, row in enumerate(rows)]
    assert main(["average", *sources, str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert found.tolist()[:3] + found.tolist()[5:] == [inf, inf, inf, -inf]
    assert found[3:5].isnan().all()


@pytest.fixture
def three(tmp_path):
    models = [model(seed) for seed in range(3)]
    return models, [write(tmp_path / f"m{i}", tensors) for i, tensors in enumerate(models)]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [1 / 2, 1 / 3]),
        ({"weights": "0.5,0.3,0.2"}, [0.3 / 0.8, 0.2 / (0.5 + 0.3 + 0.2)]),
        ({"ema": 0.99}, [1 - 0.99] * 2),
        ({"dtype": "bf16"}, [1 / 2, 1 / 3]),
    ],
)
def test_average_is_the_definition_bit_for_bit(tmp_path, three, options, steps) -> None:
    models, paths = three
    with small_blocks(1000):
        result = average(paths, str(tmp_path / "out"), num_workers=3, **options)
        assert verify(str(tmp_path / "out")).ok
    same(tmp_path / "out" / "model.safetensors", oracle(models, steps, torch.bfloat16 if "dtype" in options else None))
    assert "numbers that are not averaged, taken from the last: model.layers.0.bn.num_batches_tracked" in result.notes
    assert result.bytes_read == 3 * sum(t.numel() * t.element_size() for t in models[0].values())


def test_average_is_the_mean_and_torch_lerp_agrees(tmp_path, three) -> None:
    models, paths = three
    average(paths, str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.norm.weight"
    mean = torch.stack([m[name] for m in models]).mean(0)
    torch.testing.assert_close(found[name], mean, rtol=1e-14, atol=1e-14)
    name = "model.layers.0.mlp.up_proj.weight"
    expected = models[0][name]
    for other in models[1:]:
        expected = torch.lerp(expected, other[name], 1 - 0.9)  # as torch.optim.swa_utils has it
    average(paths, str(tmp_path / "ema"), ema=0.9)
    torch.testing.assert_close(load_file(tmp_path / "ema" / "model.safetensors")[name], expected)


def test_average_of_equal_checkpoints_is_the_same_bits(tmp_path) -> None:
    paths = [write(tmp_path / f"m{i}", model(5)) for i in range(3)]
    average(paths, str(tmp_path / "out"), weights="0.1,0.2,0.7")
    same(tmp_path / "out" / "model.safetensors", model(5))


def test_formats_are_mixed_and_the_first_is_written(tmp_path, three, capsys) -> None:
    models, paths = three
    shard(paths[0], str(tmp_path / "dcp"), mesh="dp_shard=3")
    torch.save(models[1], tmp_path / "one.pt")
    sources = [str(tmp_path / "dcp"), str(tmp_path / "one.pt"), paths[2]]
    assert main(["average", *sources, str(tmp_path / "out"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verified"]
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 3
    gather(str(tmp_path / "out"), str(tmp_path / "hf"))
    same(tmp_path / "hf" / "model.safetensors", oracle(models, [1 / 2, 1 / 3]))
    manifest = json.loads((tmp_path / "out" / "ckpt_manifest.json").read_text())
    made = manifest["source"]["averaged"]
    assert made["weights"] == [1 / 3] * 3
    assert [(of["name"], of["format"]) for of in made["of"]] == [("dcp", "dcp"), ("one.pt", "torch"), ("m2", "hf")]
    average([*reversed(sources)], str(tmp_path / "back"))
    same(tmp_path / "back" / "model.safetensors", oracle(models[::-1], [1 / 2, 1 / 3]))


def test_optimizer_state_of_a_step_is_left_out(tmp_path) -> None:
    for i in range(2):
        state = {"model": model(i), "optimizer": {"state": {0: {"exp_avg": torch.ones(3, 3)}}}}
        torch.save(state, tmp_path / f"s{i}.pt")
    average([str(tmp_path / "s0.pt"), str(tmp_path / "s1.pt")], str(tmp_path / "out"))
    same(tmp_path / "out" / "model.safetensors", oracle([model(0), model(1)], [0.5]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("model.mask"), "1 tensors of the first are missing: model.mask"),
        (lambda m: m.update(more=torch.ones(2)), "1 are not in the first: more"),
        (
            lambda m: m.update({"model.mask": torch.ones(4, dtype=torch.bool)}),
            r"'model.mask' is BOOL \[4\], but BOOL \[3\] in the first",
        ),
        (lambda m: m.update({"model.embed_tokens.weight": torch.ones(64, 48)}), r"is F32 \[64, 48\], but BF16"),
        (
            lambda m: m.update({"model.mask": torch.tensor([True] * 3)}),
            "'model.mask' of BOOL cannot be averaged, and diff",
        ),
    ],
)
def test_checkpoints_that_differ_otherwise_are_refused_by_name(tmp_path, change, message) -> None:
    other = model(1)
    change(other)
    paths = [write(tmp_path / "a", model(0)), write(tmp_path / "b", other)]
    with pytest.raises(UsageError, match=message):
        average(paths, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".ckpt*"))


def test_quantised_weights_are_refused(tmp_path) -> None:
    paths = []
    for i in range(2):
        tensors = {"a.weight": torch.randn(8, 8).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1) * i}
        paths.append(write(tmp_path / f"q{i}", tensors))
    with pytest.raises(UsageError, match=r"quantised weights cannot be averaged: a\.weight"):
        average(paths, str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "0.5,0.5"}, "--weights has 2 numbers for 3"),
        ({"weights": "1,1,1"}, "must sum to 1, got 3"),
        ({"weights": "2,-0.5,-0.5"}, "must be positive"),
        ({"weights": "a,b,c"}, "must be numbers"),
        ({"weights": "nan,0.5,0.5"}, "must be positive"),
        ({"ema": 1.0}, "between 0 and 1"),
        ({"ema": 0.5, "weights": "0.5,0.3,0.2"}, "leave out|sets the weights"),
        ({"dtype_for": ["nothing=f32"]}, "matches no tensor; hint: the nearest names are"),
    ],
)
def test_wrong_options_are_refused(tmp_path, three, options, message) -> None:
    with pytest.raises(UsageError, match=message):
        average(three[1], str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_factors_of_adapters_are_a_warning(tmp_path) -> None:
    names = [f"base_model.model.q_proj.lora_{x}.weight" for x in "AB"]
    paths = [write(tmp_path / f"a{i}", {name: torch.randn(4, 4) for name in names}) for i in range(2)]
    (warning,) = average(paths, str(tmp_path / "out")).warnings
    assert "their product is not the average of the adapters" in warning


def test_one_source_alone_or_twice_is_refused(tmp_path, three) -> None:
    with pytest.raises(UsageError, match="at least two"):
        average(three[1][:1], str(tmp_path / "out"))
    with pytest.raises(UsageError, match="given twice"):
        average([three[1][0], three[1][0] + "/"], str(tmp_path / "out"))
    with pytest.raises(UsageError, match="contain each other"):
        average(three[1], three[1][2] + "/inside")


def test_damage_in_any_source_is_refused_and_nothing_is_written(tmp_path, three) -> None:
    _, paths = three
    shard(paths[1], str(tmp_path / "dcp"), mesh="dp_shard=2")
    gather(str(tmp_path / "dcp"), str(tmp_path / "recorded"))
    for directory, pattern in (("dcp", "__1_0.distcp"), ("recorded", "model.safetensors")):
        (file,) = (tmp_path / directory).glob(pattern)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
        with pytest.raises(UnreadableError, match=r"damaged|not what the manifest recorded"):
            average([paths[0], str(tmp_path / directory)], str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()


def test_dry_run_writes_nothing_and_says_what_is_needed(tmp_path, three, capsys) -> None:
    assert main(["average", *three[1], str(tmp_path / "out"), "-n"]) == 0
    assert "would write 3 files" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert diff(three[1][0], three[1][0]).equal
