"""`extract-lora` and `resize-lora`, held against torch.linalg, PEFT, LyCORIS and ckpt's own merge."""

from __future__ import annotations

import json
import math

import pytest
import torch
import toys
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.adapters.low_rank import RankRule, nearest, norm_of
from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, DestinationExistsError, UsageError

PROJECTIONS = {"q": (64, 64), "k": (32, 64), "up": (160, 64), "down": (64, 160)}


def matrix_of(seed, shape, decay=None):
    """A random matrix; with a decay its singular values fall as a power."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(shape, generator=generator)
    if decay is None:
        return matrix
    sizes = torch.arange(1, 1 + min(48, *shape)).float() ** -decay
    left = torch.linalg.qr(torch.randn(shape[0], len(sizes), generator=generator))[0]
    right = torch.linalg.qr(torch.randn(shape[1], len(sizes), generator=generator))[0]
    return left * sizes @ right.T + 1e-3 * matrix / math.sqrt(matrix.numel())


def optimum(matrix, rank):
    return float(torch.linalg.svdvals(matrix.double())[rank:].norm())


def assert_near_optimum(matrix, rank, method=None):
    norm = norm_of(matrix)
    up, down, found = nearest(matrix, RankRule(rank), norm)
    assert (up.shape[1], down.shape[0]) == (rank, rank)
    assert method in (None, found)
    error = float((matrix.double() - up.double() @ down.double()).norm())
    assert error <= 1.001 * optimum(matrix, rank) + 1e-6 * norm


@pytest.mark.parametrize("seed", range(40))
def test_a_random_layer_loses_no_more_than_the_best_truncation(seed):
    shape = [(48, 96), (300, 120), (320, 400), (640, 320), (96, 700)][seed % 5]
    assert_near_optimum(matrix_of(seed, shape, [None, 0.3, 1.0, 2.0][seed % 4]), [1, 4, 8, 16][seed // 10])


@pytest.mark.full
@pytest.mark.parametrize("shape", [(1536, 1536), (256, 1536), (8960, 1536), (1536, 8960), (2048, 5632), (320, 2880)])
def test_a_layer_of_a_real_shape_loses_no_more_than_the_best_truncation(shape):
    assert_near_optimum(matrix_of(0, shape), 8, "randomised svd" if min(shape) > 256 else "svd")
    assert_near_optimum(matrix_of(1, shape, 0.5), 16)


def save_model(path, tensors, **config):
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    known = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False, **config}
    (path / "config.json").write_text(json.dumps(known))
    return path


def base_tensors(dtype=torch.float32):
    found = {"model.embed_tokens.weight": matrix_of(90, (50, 64)), "model.norm.weight": torch.ones(64)}
    for layer in range(2):
        for number, (name, shape) in enumerate(PROJECTIONS.items()):
            found[f"model.layers.{layer}.{name}_proj.weight"] = 0.05 * matrix_of(10 * layer + number, shape)
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def projections(tensors):
    return [name for name in tensors if "_proj" in name]


@pytest.fixture
def pair(tmp_path):
    """A base, and what a full fine-tuning made of it: also of an embedding and a norm."""
    base = base_tensors()
    tuned = {name: tensor.clone() for name, tensor in base.items()}
    for number, name in enumerate(projections(base)):
        tuned[name] += 0.1 * matrix_of(100 + number, base[name].shape, 0.7)
    tuned["model.embed_tokens.weight"][3] += 0.5
    tuned["model.norm.weight"] += 0.01
    return save_model(tmp_path / "base", base), save_model(tmp_path / "tuned", tuned)


def model_of(path):
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_the_loss_is_what_a_merge_of_the_result_lacks(pair, tmp_path, dtype):
    result = api.extract_lora(*pair, tmp_path / "lora", rank=4, dtype=dtype)
    assert result.ok
    api.merge_lora(pair[0], tmp_path / "lora", tmp_path / "merged")
    base, tuned, merged = map(model_of, (*pair, tmp_path / "merged"))
    total = 0.0
    for module in result.modules:
        name = f"{module.path}.weight"
        change, rest = (tuned[name] - base[name]).double(), (tuned[name] - merged[name]).double()
        assert module.norm == pytest.approx(float(change.norm()), rel=1e-5)
        assert module.error == pytest.approx(float(rest.norm()), rel=1e-4)
        assert module.loss == pytest.approx(module.error / module.norm)
        if dtype == "f32":
            assert module.error <= 1.001 * optimum(change, 4)
    assert {f"{module.path}.weight" for module in result.modules} == set(projections(base))
    total = math.sqrt(sum(float((tuned[n] - merged[n]).double().square().sum()) for n in tuned))
    whole = math.sqrt(sum(float((tuned[n] - base[n]).double().square().sum()) for n in tuned))
    assert result.loss == pytest.approx(total / whole, rel=1e-4)


def test_what_a_lora_cannot_hold_is_named_and_with_strict_refused(pair, tmp_path, capsys):
    result = api.extract_lora(*pair, tmp_path / "lora")
    assert {(each.fqn, each.why) for each in result.left_out} == {
        ("model.embed_tokens.weight", "embedding"),
        ("model.norm.weight", "norm or vector"),
    }
    norms = {each.fqn: each.norm for each in result.left_out}
    assert norms["model.embed_tokens.weight"] == pytest.approx(4.0, rel=1e-4)
    assert [(each.code, each.severity) for each in result.findings] == [("left-out", "warning")]
    assert main(["extract-lora", *map(str, pair), str(tmp_path / "strict"), "--strict"]) == 3
    assert not (tmp_path / "strict").exists()
    assert "nothing was written" in capsys.readouterr().out


def test_with_full_nothing_is_lost_but_ranks(pair, tmp_path):
    result = api.extract_lora(*pair, tmp_path / "lora", rank=64, full=True, strict=True)
    api.merge_lora(pair[0], tmp_path / "lora", tmp_path / "merged")
    tuned, merged = model_of(pair[1]), model_of(tmp_path / "merged")
    for name, tensor in tuned.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)
    assert result.loss < 1e-5
    assert not result.left_out


def test_a_merged_lora_is_found_again(pair, tmp_path):
    known = api.extract_lora(*pair, tmp_path / "known", rank=8, exclude=["**embed**", "**norm**"])
    assert known.ok
    api.merge_lora(pair[0], tmp_path / "known", tmp_path / "merged")
    again = api.extract_lora(pair[0], tmp_path / "merged", tmp_path / "again", rank=8, strict=True)
    assert again.loss < 1e-5
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("known", "again"))
    for name in (name for name in one if "lora_A" in name):
        other = name.replace("lora_A", "lora_B")
        torch.testing.assert_close(two[other] @ two[name], one[other] @ one[name], rtol=0, atol=2e-6)


def test_equal_models_and_other_shapes_are_refused(pair, tmp_path, capsys):
    assert main(["extract-lora", str(pair[0]), str(pair[0]), str(tmp_path / "x")]) == 3
    assert "the two models are equal" in capsys.readouterr().err
    other = base_tensors() | {"model.layers.0.q_proj.weight": torch.zeros(64, 65)}
    with pytest.raises(UsageError, match=r"q_proj.weight is \[64, 64\] in BASE and \[64, 65\] in TUNED"):
        api.extract_lora(pair[0], save_model(tmp_path / "other", other), tmp_path / "x")
    with pytest.raises(DestinationExistsError):
        api.extract_lora(*pair, pair[0])
    assert not (tmp_path / "x").exists()


def test_a_base_that_names_the_tuned_model_as_its_base_is_told(pair, tmp_path):
    config = json.loads((pair[1] / "config.json").read_text())
    (pair[1] / "config.json").write_text(json.dumps({**config, "_name_or_path": str(pair[0])}))
    right = api.extract_lora(*pair, tmp_path / "right", dry_run=True)
    swapped = api.extract_lora(*pair[::-1], tmp_path / "swapped", dry_run=True)
    assert [each.code for each in right.findings] == ["left-out"]
    assert [each.code for each in swapped.findings] == ["swapped", "left-out"]
    assert not api.extract_lora(*pair[::-1], tmp_path / "swapped", include=["**_proj.weight"], strict=True)
    assert not (tmp_path / "swapped").exists()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_difference_of_what_is_no_number(pair, tmp_path, bad):
    tuned = model_of(pair[1])
    tuned["model.layers.1.up_proj.weight"][5, 5] = bad
    path = save_model(tmp_path / "broken", tuned)
    with pytest.raises(CkptError, match="NaN or infinity"):
        api.extract_lora(pair[0], path, tmp_path / "x")


def test_a_sharded_checkpoint_of_either_side_gives_the_same(pair, tmp_path):
    api.shard(pair[1], tmp_path / "dcp", mesh="dp_shard=2")
    for name, tuned in (("one", pair[1]), ("two", tmp_path / "dcp")):
        api.extract_lora(pair[0], tuned, tmp_path / name, rank=3)
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*fan_in_fan_out")
def test_peft_answers_as_the_merged_model(tmp_path):
    from peft import PeftModel

    ids = torch.arange(12).reshape(2, 6)
    for kind in ("llama", "gpt2"):
        model = toys.build(kind)
        base, tuned, lora = (tmp_path / f"{name}-{kind}" for name in ("base", "tuned", "lora"))
        model.save_pretrained(base)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2 and not any(w in name for w in ("embed", "wte", "wpe", "lm_head")):
                    parameter.data += 0.05 * torch.randn(parameter.shape[0], 3) @ torch.randn(3, parameter.shape[1])
            expected = model(ids).logits
        model.save_pretrained(tuned)
        result = api.extract_lora(base, tuned, lora, rank=3, strict=True)
        assert result.loss < 1e-5
        loaded = PeftModel.from_pretrained(type(model).from_pretrained(base), lora).eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_no_more_is_lost_than_by_lycoris(pair, tmp_path):
    from lycoris.utils import extract_linear

    result = api.extract_lora(*pair, tmp_path / "lora", rank=4)
    base, tuned = map(model_of, pair)
    for module in result.modules:
        change = tuned[f"{module.path}.weight"] - base[f"{module.path}.weight"]
        (down, up, _), kind = extract_linear(change, "fixed", 4, "cpu")
        assert kind == "low rank"
        theirs = float((change - up @ down).norm())
        assert module.error <= theirs * (1 + 1e-4)


def test_a_convolution_of_a_single_file_becomes_locon(tmp_path):
    root = "model.diffusion_model.input_blocks.1.0.in_layers.2"
    base = {f"{root}.weight": matrix_of(1, (32, 16 * 9)).reshape(32, 16, 3, 3), f"{root}.bias": torch.zeros(32)}
    tuned = {f"{root}.weight": base[f"{root}.weight"] + matrix_of(2, (32, 144)).reshape(32, 16, 3, 3)}
    tuned[f"{root}.bias"] = base[f"{root}.bias"] + 1
    for name, tensors in (("base", base), ("tuned", tuned)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    paths = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    result = api.extract_lora(*paths, tmp_path / "lora", rank=5, to="kohya", architecture="sd1", full=True)
    (file,) = (tmp_path / "lora").glob("*.safetensors")
    found = load_file(file)
    up, down = (next(t for n, t in found.items() if n.endswith(f"lora_{end}.weight")) for end in ("up", "down"))
    assert (up.shape, down.shape) == ((32, 5, 1, 1), (5, 16, 3, 3))
    change = (tuned[f"{root}.weight"] - base[f"{root}.weight"]).reshape(32, -1)
    error = float((change - up.reshape(32, 5) @ down.reshape(5, -1)).norm())
    assert result.modules[0].error == pytest.approx(error, rel=1e-4)
    assert error <= 1.001 * optimum(change, 5)
    assert any(n.endswith("diff_b") and torch.equal(t, torch.ones(32)) for n, t in found.items())


LEFT_OUT = {
    "lm_head.weight": "tied to the embedding",
    "model.layers.0.mlp.gate.weight": "router",
    "model.layers.0.mlp.experts.1.up_proj.weight": "experts",
    "model.layers.1.mlp.experts.gate_up_proj": "no module's weight",
    "model.layers.0.mixer.conv1d.weight": "depthwise convolution",
    "model.layers.0.mixer.A_log": "no module's weight",
    "model.layers.0.mixer.step": "not floating-point",
    "transformer.wpe.weight": "embedding",
    "model.layers.0.up_proj.bias": "bias",
}


def test_every_change_that_gets_no_factors_is_left_out_by_name(tmp_path):
    kept = {"model.layers.0.up_proj.weight": torch.zeros(8, 8), "model.layers.0.gate_proj.weight": torch.zeros(8, 8)}
    shapes = {name: (6, 1, 4) if "conv1d" in name else (2, 4, 4) if "gate_up" in name else (4, 4) for name in LEFT_OUT}
    base = kept | {name: torch.zeros(shape) for name, shape in shapes.items()}
    base["model.layers.0.mixer.step"] = torch.tensor(3)
    tuned = {name: tensor + 1 for name, tensor in base.items()} | {"value_head.weight": torch.ones(1, 8)}
    paths = [save_model(tmp_path / n, t, tie_word_embeddings=True) for n, t in (("base", base), ("tuned", tuned))]
    for path in paths:
        (path / "config.json").write_text('{"tie_word_embeddings": true}')
    result = api.extract_lora(*paths, tmp_path / "lora", rank=1)
    assert {f"{module.path}.weight" for module in result.modules} == kept.keys()
    assert {each.fqn: each.why for each in result.left_out} == LEFT_OUT | {"value_head.weight": "only in TUNED"}
    with pytest.raises(UsageError, match="no linear layer or convolution differs"):
        api.extract_lora(*paths, tmp_path / "x", exclude=["**_proj.weight"])


def test_of_a_single_file_only_the_denoiser_gets_factors(tmp_path):
    names = [f"model.diffusion_model.double_blocks.{i}.img_attn.qkv.weight" for i in range(2)]
    base = {name: matrix_of(1, (48, 16)) for name in names} | {"vae.decoder.conv.weight": torch.zeros(4, 4, 3, 3)}
    for name, change in (("base", 0), ("tuned", 1)):
        save_file({fqn: tensor + change for fqn, tensor in base.items()}, tmp_path / f"{name}.safetensors")
    paths = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    for to in ("comfyui", "kohya", "diffusers"):
        result = api.extract_lora(*paths, tmp_path / to, rank=1, to=to, architecture="flux1", full=True)
        assert [each.why for each in result.left_out] == ["beside the denoiser"]
        assert len(result.modules) == 2
    assert api.check_lora(tmp_path / "comfyui", loaders=["comfyui"]).ok


# Ranks by a threshold, and `resize-lora`


def test_ranks_by_thresholds_are_those_of_the_singular_values():
    sizes = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    norm = float(sizes.norm())
    cases = {
        ("energy", 0.5): 1, ("energy", 0.51): 2, ("energy", 0.75): 2, ("energy", 1.0): 5,
        ("fro", 8 / norm): 1, ("fro", 0.9): 2, ("fro", 1.0): 5,
        ("ratio", 1.0): 1, ("ratio", 2.0): 2, ("ratio", 3.9): 2, ("ratio", 100.0): 5,
    }  # fmt: skip
    assert {key: RankRule(99, *key).choose(sizes, norm) for key in cases} == cases
    assert RankRule(3, "energy", 1.0).choose(sizes, norm) == 3


def test_by_a_share_of_the_norm_every_module_keeps_that_share(pair, tmp_path):
    result = api.extract_lora(*pair, tmp_path / "lora", rank_by="fro", threshold=0.9)
    base, tuned = map(model_of, pair)
    for module in result.modules:
        name = f"{module.path}.weight"
        sizes = torch.linalg.svdvals((tuned[name] - base[name]).double())
        shares = sizes.square().cumsum(0).sqrt() / sizes.norm()
        assert shares[module.rank - 1] >= 0.9 - 1e-6
        assert module.rank == 1 or shares[module.rank - 2] < 0.9 + 1e-6
    assert len({module.rank for module in result.modules}) > 1
    assert api.check_lora(tmp_path / "lora", base=pair[0]).ok


def peft_lora(path, *, rslora=False, dora=False, dtype=torch.float32):
    path.mkdir()
    tensors = {}
    for number, (name, (out, inputs)) in enumerate(PROJECTIONS.items()):
        root = f"base_model.model.model.layers.0.{name}_proj"
        tensors[f"{root}.lora_A.weight"] = matrix_of(number, (16, inputs)).to(dtype)
        tensors[f"{root}.lora_B.weight"] = matrix_of(50 + number, (out, 16)).to(dtype)
        if dora:
            tensors[f"{root}.lora_magnitude_vector"] = torch.rand(out)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 24, "use_rslora": rslora, "use_dora": dora}
    config |= {
        "target_modules": [f"{name}_proj" for name in PROJECTIONS],
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.1,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path, tensors


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}, {"dtype": torch.bfloat16}])
def test_a_resized_lora_is_the_truncated_product_at_the_same_scale(tmp_path, kind):
    path, before = peft_lora(tmp_path / "lora", **kind)
    (path / "README.md").write_text("x")
    result = api.resize_lora(path, tmp_path / "small", rank=5)
    assert "not copied: README.md" in result.conversion.notes
    after = load_file(tmp_path / "small" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "small" / "adapter_config.json").read_text())
    assert after.keys() == before.keys()
    assert (config["r"], config["rank_pattern"], config["lora_dropout"]) == (5, {}, 0.1)
    scales = [
        24 / (4 if kind.get("rslora") else 16),
        config["lora_alpha"] / (math.sqrt(5) if kind.get("rslora") else 5),
    ]
    assert scales[0] == pytest.approx(scales[1])
    losses = {module.path: module for module in result.modules}
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        if not name.endswith("lora_B.weight"):
            continue
        other = name.replace("lora_B", "lora_A")
        old, new = (each[name].double() @ each[other].double() for each in (before, after))
        found = losses[name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")]
        assert found.error == pytest.approx(scales[0] * float((old - new).norm()), rel=1e-6)
        assert (found.rank_before, found.rank) == (16, 5)
        assert found.norm == pytest.approx(scales[0] * float(old.norm()), rel=1e-6)
        assert float((old - new).norm()) <= optimum(old, 5) * (1.001 if tensor.dtype == torch.bfloat16 else 1 + 1e-6)
        magnitude = name.replace("lora_B.weight", "lora_magnitude_vector")
        assert magnitude not in before or torch.equal(after[magnitude], before[magnitude])


def test_ranks_that_differ_have_patterns_that_peft_reads(tmp_path):
    path, _ = peft_lora(tmp_path / "lora")
    result = api.resize_lora(path, tmp_path / "small", rank_by="energy", threshold=0.8, rank=15)
    assert len({module.rank for module in result.modules}) > 1
    read = api.check_lora(tmp_path / "small")
    assert set(read.ranks) == {module.rank for module in result.modules}
    assert not [each for each in read.findings if each.severity == "error"]


@pytest.mark.parametrize("alpha_dtype", [torch.float32, torch.bfloat16])
def test_a_kohya_file_keeps_names_and_scale_and_says_its_new_rank(tmp_path, alpha_dtype):
    tensors = {}
    for number, (name, (out, inputs)) in enumerate(PROJECTIONS.items()):
        root = f"lora_unet_single_blocks_{number}_{name}"
        tensors[f"{root}.lora_down.weight"] = matrix_of(number, (16, inputs))
        tensors[f"{root}.lora_up.weight"] = matrix_of(50 + number, (out, 16))
        tensors[f"{root}.alpha"] = torch.tensor(7.03125, dtype=alpha_dtype)
    header = {"ss_network_dim": "16", "ss_network_alpha": "7.03125", "ss_tag": "cat", "sshs_model_hash": "old"}
    save_file(tensors, tmp_path / "style.safetensors", header)
    api.resize_lora(tmp_path / "style.safetensors", tmp_path / "small", rank=6)
    with safe_open(tmp_path / "small" / "style.safetensors", "pt") as file:
        found = file.metadata()
        after = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert after.keys() == tensors.keys()
    assert all(float(t) / 6 == pytest.approx(7.03125 / 16, rel=1e-6) for n, t in after.items() if n.endswith(".alpha"))
    assert (found["ss_network_dim"], found["ss_network_alpha"], found["ss_tag"]) == ("6", "2.63671875", "cat")
    assert found["sshs_model_hash"] not in ("old", "")


def test_an_alpha_in_a_file_beside_the_adapter_is_not_lost_without_a_word(tmp_path):
    tensors = {f"lora_unet_a.lora_{n}.weight": matrix_of(1, s) for n, s in (("down", (8, 20)), ("up", (20, 8)))}
    (tmp_path / "run").mkdir()
    save_file(tensors, tmp_path / "run" / "x.safetensors")
    (tmp_path / "run" / "lycoris_config.json").write_text('{"linear_alpha": 4}')
    with pytest.raises(CkptError, match=r"the scale of 1 module .* nothing is published"):
        api.resize_lora(tmp_path / "run", tmp_path / "small", rank=2)
    assert not (tmp_path / "small").exists()


def test_diffusers_header_says_the_new_ranks(tmp_path):
    root, other = "transformer.blocks.0.attn.to_q", "transformer.blocks.1.attn.to_q"
    tensors = {
        f"{p}.lora_{a}.weight": matrix_of(3, s) for p in (root, other) for a, s in (("A", (8, 20)), ("B", (20, 8)))
    }
    header = {"transformer.r": 8, "transformer.lora_alpha": 16, "transformer.lora_dropout": 0.5}
    save_file(tensors, tmp_path / "x.safetensors", {"lora_adapter_metadata": json.dumps(header)})
    api.resize_lora(tmp_path / "x.safetensors", tmp_path / "small", rank=2)
    with safe_open(tmp_path / "small" / "x.safetensors", "pt") as file:
        found = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (found["transformer.r"], found["transformer.lora_alpha"], found["transformer.lora_dropout"]) == (2, 4, 0.5)


def test_what_cannot_be_resized_is_refused(tmp_path, pair):
    path, _ = peft_lora(tmp_path / "lora")
    for rank in (16, 17):
        with pytest.raises(UsageError, match="not below the rank of any module: the highest is 16"):
            api.resize_lora(path, tmp_path / "x", rank=rank)
    save_file({f"lora_unet_a.hada_w{i}_{j}": torch.rand(4, 4) for i in "12" for j in "ab"}, tmp_path / "l.safetensors")
    with pytest.raises(UsageError, match="does not support LoHa"):
        api.resize_lora(tmp_path / "l.safetensors", tmp_path / "x", rank=2, alpha=1)
    for options in ({"rank_by": "fro"}, {"threshold": 0.5, "rank": 2}, {"rank_by": "fro", "threshold": 1.5}, {}):
        with pytest.raises(UsageError):
            api.resize_lora(path, tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


def test_an_export_does_not_pass_a_low_svd_rank_over(tmp_path):
    path, _ = peft_lora(tmp_path / "lora")
    with pytest.raises(UsageError, match="--svd-rank 4 is below the rank of 4 modules"):
        api.export_lora(path, tmp_path / "x", svd_rank=4)
    assert api.export_lora(path, tmp_path / "y", svd_rank=16).ok


def test_commands_print_losses_documents_and_pages(pair, tmp_path, capsys):
    page = tmp_path / "loss.html"
    assert main(["extract-lora", *map(str, pair), str(tmp_path / "lora"), "--rank", "4", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"the change {pair[1]} − {pair[0]}\n")
    assert "left out (norm 4): model.embed_tokens.weight: embedding" in out
    assert "model.layers.0.q_proj" in page.read_text()
    assert main(["resize-lora", str(tmp_path / "lora"), str(tmp_path / "x"), "--rank", "2", "-n", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["modules"][0].keys() == {"path", "rank", "rank_before", "norm", "error", "loss", "method"}
    assert document["loss"] > 0
    assert not (tmp_path / "x").exists()
