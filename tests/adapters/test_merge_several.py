"""`merge_lora` of several adapters, against PEFT's `add_weighted_adapter` and against sums."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from adapters.families import loras, save_dcp
from adapters.peft_world import randomise
from adapters.test_merge import llama, pair, save_model, tensors_of, write_adapter, write_base

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError

LINEAR = ["q_proj", "v_proj", "down_proj"]


def lora(**options):
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": [*LINEAR, "embed_tokens"]} | options)


def several(tmp_path, *given, model=None):
    """Save a base and adapters a, b, …; return the model, and their paths."""
    from peft import get_peft_model

    model = model or llama()
    save_model(model, tmp_path / "base")
    paths = [tmp_path / name for name, _ in zip("abc", given, strict=False)]
    markers = ("lora_", "hada_", "modules_to_save")
    for path, config in zip(paths, given, strict=True):
        with warnings.catch_warnings(action="ignore"):
            own = get_peft_model(copy.deepcopy(model), config)
            randomise(own, lambda name: any(marker in name for marker in markers), ord(path.name))
            own.save_pretrained(path)
    return model, paths


def combined(model, paths, weights, method, **options):
    """Return what PEFT makes of adapters by `add_weighted_adapter`."""
    from peft import PeftModel

    with warnings.catch_warnings(action="ignore"):
        world = PeftModel.from_pretrained(copy.deepcopy(model), paths[0], adapter_name="a")
        for path in paths[1:]:
            world.load_adapter(path, adapter_name=path.name)
        world.add_weighted_adapter([path.name for path in paths], weights, "made", combination_type=method, **options)
        world.set_adapter("made")
        return {name: each.detach() for name, each in world.merge_and_unload().state_dict().items()}


def assert_equal(found, expected, base, tolerance=2e-6):
    assert any(not torch.equal(tensor, base[name]) for name, tensor in found.items())
    for name, tensor in found.items():
        scale = float((expected[name] - base[name]).abs().max())
        assert float((tensor - expected[name]).abs().max()) <= tolerance * max(scale, 1.0), name


METHODS = {
    "sum": ("cat", {}),
    "linear": ("linear", {}),
    "svd": ("svd", {}),
    "svd rank": ("svd", {"svd_rank": 2}),
    "ties": ("ties", {"density": 0.4}),
    "ties by number": ("ties", {"density": 0.7, "majority_sign": "frequency"}),
    "ties_svd": ("ties_svd", {"density": 0.6, "svd_rank": 7}),
    "magnitude_prune": ("magnitude_prune", {"density": 0.3}),
    "magnitude_prune_svd": ("magnitude_prune_svd", {"density": 0.9}),
    "dare_ties": ("dare_ties", {"density": 1.0}),
    "dare_linear_svd": ("dare_linear_svd", {"density": 1.0}),
}


@pytest.mark.parametrize("case", METHODS)
def test_every_method_gives_what_peft_gives(tmp_path, case):
    model, paths = several(
        tmp_path, lora(), lora(lora_alpha=3, target_modules=["q_proj", "k_proj", "embed_tokens"]), lora(r=4)
    )
    method, options = METHODS[case]
    weights = [0.7, -1.3, 0.25]
    theirs = {"majority_sign_method" if name == "majority_sign" else name: value for name, value in options.items()}
    expected = combined(model, paths, weights, method, **theirs)
    combine = "sum" if method == "cat" else method
    api.merge_lora(tmp_path / "base", paths, tmp_path / "out", weights=weights, combine=combine, **options)
    tolerance = 1e-5 if "svd" in method else 2e-6  # torch decomposes in float32, ckpt in float64
    assert_equal(tensors_of(tmp_path / "out"), expected, tensors_of(tmp_path / "base"), tolerance)


def test_svd_of_a_rank_above_what_the_weight_can_have_is_the_sum(tmp_path):
    base = write_base(tmp_path / "base", {"m.x.weight": torch.randn(4, 30)})
    paths = [write_adapter(tmp_path / f"{seed}", loras({"m.x": pair(4, 30, seed, r=6)}), r=6) for seed in (1, 2)]
    api.merge_lora(base, paths, tmp_path / "sum")
    api.merge_lora(base, paths, tmp_path / "svd", combine="svd", svd_rank=8)
    found, expected = (tensors_of(tmp_path / name)["m.x.weight"] for name in ("svd", "sum"))
    assert torch.allclose(found, expected, atol=1e-5)


def test_families_ranks_and_modules_may_differ_in_a_sum(tmp_path):
    """LoHa, LoKr, LoRA of other ranks, rsLoRA and alphas, beside a DoRA of modules of its own: added one by one."""
    from peft import LoHaConfig

    _, paths = several(
        tmp_path,
        lora(target_modules=["q_proj"], use_dora=True),
        lora(r=3, use_rslora=True, target_modules=["v_proj", "down_proj"], modules_to_save=["lm_head"]),
        LoHaConfig(r=2, alpha=5, target_modules=["v_proj", "o_proj"], init_weights=False),
    )
    base = tensors_of(tmp_path / "base")
    alone = []
    for path, weight in zip(paths, (1, 0.5, -2), strict=True):
        api.merge_lora(tmp_path / "base", path, tmp_path / "one", scale=weight, overwrite=True)
        alone.append(tensors_of(tmp_path / "one"))
    expected = {name: tensor + sum(each[name] - tensor for each in alone) for name, tensor in base.items()}
    api.merge_lora(tmp_path / "base", paths, tmp_path / "out", weights="1,0.5,-2")
    assert_equal(tensors_of(tmp_path / "out"), expected, base)


def test_weight_0_leaves_an_adapter_out_whole(tmp_path, capsys):
    _, (first, second) = several(tmp_path, lora(), lora(modules_to_save=["lm_head"]))
    api.merge_lora(tmp_path / "base", first, tmp_path / "one")
    command = ["merge-lora", str(tmp_path / "base"), str(first), str(second), str(tmp_path / "out")]
    assert main([*command, "--weights", "1,0"]) == 0
    assert "left out: its weight is 0" in capsys.readouterr().err
    assert all(map(torch.equal, tensors_of(tmp_path / "out").values(), tensors_of(tmp_path / "one").values()))


def test_weight_0_is_no_scale_of_a_dora_and_no_adapter_at_all_is_an_error(tmp_path):
    _, (first, second) = several(tmp_path, lora(target_modules=LINEAR), lora(target_modules=LINEAR, use_dora=True))
    api.merge_lora(tmp_path / "base", [first, second], tmp_path / "out", weights="2,0")
    with pytest.raises(UsageError, match="cannot be scaled"):
        api.merge_lora(tmp_path / "base", [first, second], tmp_path / "other", weights="1,2")
    with pytest.raises(UsageError, match="no adapter is given"):
        api.merge_lora(tmp_path / "base", [], tmp_path / "other")


def test_a_sharded_base_takes_several_too(tmp_path):
    model, paths = several(tmp_path, lora(target_modules=LINEAR), lora(target_modules=["k_proj", "q_proj"]))
    save_dcp({"model": model.state_dict()}, tmp_path / "dcp")
    for base, out in (("base", "expected"), ("dcp", "sharded")):
        api.merge_lora(tmp_path / base, paths, tmp_path / out, weights=[1, -2])
    api.gather(tmp_path / "sharded", tmp_path / "out", allow_foreign_names=True)
    found, expected = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_what_has_no_sum_is_refused(tmp_path):
    _, paths = several(
        tmp_path,
        lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        lora(target_modules=["q_proj"], use_dora=True),
        lora(target_modules=["v_proj"], modules_to_save=["lm_head"]),
    )
    for chosen, what in ((paths[:2], "DoRA"), ((paths[0], paths[2]), "it replaces the weight")):
        with pytest.raises(UsageError, match=what) as caught:
            api.merge_lora(tmp_path / "base", chosen, tmp_path / "out")
        assert "one after the other" in caught.value.hint
    with pytest.raises(UsageError, match="is dora"):
        api.merge_lora(tmp_path / "base", paths[:2], tmp_path / "out", combine="linear")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"combine": "ties"}, "needs a --density"),
        ({"combine": "dare_ties", "density": 1.5}, "got 1.5"),
        ({"combine": "mean"}, "must be one of"),
        ({"combine": "linear", "density": 0.5}, "does not use --density"),
        ({"density": 0.5}, "does not use"),
        ({"weights": "1"}, "1 numbers for 2"),
        ({"weights": "1,x"}, "must be numbers"),
        ({"weights": [0, 0]}, "adds nothing"),
        ({"weights": "1,nan"}, "is not a number"),
        ({"scale": 2.0}, "applies to a single adapter"),
        ({"combine": "linear"}, "needs one rank"),
    ],
)
def test_arguments_that_cannot_be_meant(tmp_path, options, what):
    _, paths = several(tmp_path, lora(), lora(r=2))
    with pytest.raises(UsageError, match=what):
        api.merge_lora(tmp_path / "base", paths, tmp_path / "out", **options)


@pytest.mark.full
def test_dare_is_random_by_its_seed_and_right_on_average(tmp_path):
    """A kept element is divided by the density: over many masks the mean is the plain product's."""
    model, paths = several(tmp_path, lora(target_modules=["q_proj"]), lora(target_modules=["q_proj"]))
    name = "model.layers.0.self_attn.q_proj.weight"

    def merged(seed, method="dare_linear_svd", **more):
        api.merge_lora(
            *(tmp_path / "base", paths, tmp_path / "out"),
            **{"combine": method, "density": 0.5, "seed": seed, "overwrite": True, **more},
        )
        return tensors_of(tmp_path / "out")[name]

    base = tensors_of(tmp_path / "base")[name]
    exact = combined(model, paths, [1.0, 1.0], "cat")[name] - base
    found = torch.stack([merged(seed, svd_rank=32) - base for seed in range(12)])
    assert torch.equal(found[3], merged(3, svd_rank=32) - base)
    assert not torch.equal(found[3], found[4])
    kept = float((found.abs() > 1e-6).float().mean())
    assert abs(kept - 0.75) < 0.02  # of two adapters at least one is kept
    assert float((found.mean(0) - exact).norm() / exact.norm()) < 1.5 / 12**0.5
    assert not torch.equal(merged(3, "dare_linear"), merged(4, "dare_linear"))


def test_kohyas_names_and_their_order_are_combined_with_peft(tmp_path):
    """The second adapter's file has B before A, other names, and an alpha as a tensor."""
    from safetensors.torch import load_file, save_file

    _, paths = several(tmp_path, lora(target_modules=LINEAR), lora(target_modules=LINEAR))
    api.merge_lora(tmp_path / "base", paths, tmp_path / "expected", combine="svd", svd_rank=3)
    flat = {}
    for name, tensor in load_file(paths[1] / "adapter_model.safetensors").items():
        module, _, role = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        stem = f"lora_unet_{module.replace('.', '_')}"
        flat |= {f"{stem}.lora_{'down' if role == 'A' else 'up'}.weight": tensor, f"{stem}.alpha": torch.tensor(6.0)}
    save_file(dict(sorted(flat.items(), reverse=True)), tmp_path / "kohya.safetensors")
    given = [paths[0], tmp_path / "kohya.safetensors"]
    api.merge_lora(tmp_path / "base", given, tmp_path / "out", combine="svd", svd_rank=3)
    assert all(map(torch.equal, tensors_of(tmp_path / "out").values(), tensors_of(tmp_path / "expected").values()))
