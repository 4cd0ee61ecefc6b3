"""The maths of every family against PEFT's own merge and LyCORIS' own forward."""

from __future__ import annotations

import itertools

import pytest
import torch
from adapters.maths import apply, cayley, change_of, delta, new_weight, rotate_inputs_by_butterfly
from adapters.peft_world import Zoo, adapt, modules_of, randomise, settings_of
from torch import nn

from ckpt_tools.adapters.adapter import AdapterModule, Sourced
from ckpt_tools.adapters.families.changes import butterfly_order
from ckpt_tools.adapters.families.family import PLAIN, Setting
from ckpt_tools.errors import UnreadableError, UsageError

TOLERANCE = 1e-6
"""Of float32 sums in another order; weights are of the order of 1."""
LINEAR = ["linear", "square"]
ALL = [*LINEAR, "embed", "conv", "point", "line"]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and float((found - expected).abs().max()) <= TOLERANCE


def config_of(kind, **options):
    import peft

    return getattr(peft, f"{kind}Config")(**options)


def check(config, family, *, alpha, rank, model=None, setting=None, use_rslora=False):
    torch.manual_seed(1)
    model = model or Zoo()
    peft_model, merged = adapt(model, config)
    modules = modules_of(peft_model, family, alpha=alpha, rank=rank, use_rslora=use_rslora)
    assert modules
    setting = setting or Setting(convention="peft")
    weights = model.state_dict()
    for module in modules:
        name = f"{module.path}.weight"
        assert not torch.equal(weights[name], merged[name])  # the oracle changes it
        assert close(new_weight(module, weights[name], setting), merged[name]), module.path
        if "B_bias" in module.factors:
            bias = weights[f"{module.path}.bias"]
            change = change_of(module, tuple(bias.shape), setting, "bias")
            assert close(apply(change, bias.view(-1, 1)).flatten(), merged[f"{module.path}.bias"])
        check_by_rows(module, weights[name], setting)
    return modules


def check_by_rows(module, weight, setting):
    """Piece by piece gives what the whole gives."""
    change = change_of(module, tuple(weight.shape), setting)
    whole = new_weight(module, weight, setting)
    if not change.is_rowwise:
        return
    rows = weight.reshape(change.rows, change.columns)
    pieces = [apply(change, part, 3 * i) for i, part in enumerate(rows.split(3))]
    assert close(torch.cat(pieces).view(weight.shape), whole)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
def test_lora_of_every_kind_of_module_merges_as_in_peft(use_rslora, use_dora):
    config = config_of("Lora", r=4, lora_alpha=6, target_modules=ALL, use_rslora=use_rslora, use_dora=use_dora)
    modules = check(config, "lora", alpha=6, rank=4, use_rslora=use_rslora)
    assert len(modules) == len(ALL)
    assert all(module.is_dora == use_dora for module in modules)


def test_dora_of_a_square_convolution_takes_the_axis_of_its_convention():
    model = nn.Sequential(nn.Conv2d(6, 6, 3))
    config = config_of("Lora", r=2, lora_alpha=2, target_modules=["0"], use_dora=True)
    (module,) = check(config, "lora", alpha=2, rank=2, model=model)
    weight = model[0].weight.detach()
    with pytest.raises(UsageError, match="fits both inputs and outputs"):
        new_weight(module, weight)
    columns = new_weight(module, weight, Setting(convention="kohya"))
    assert not close(columns, new_weight(module, weight, Setting(convention="peft")))


def test_lora_bias_merges_as_in_peft():
    config = config_of("Lora", r=4, lora_alpha=3, target_modules=["linear"], lora_bias=True)
    (module,) = check(config, "lora", alpha=3, rank=4)
    assert "B_bias" in module.factors


@pytest.mark.parametrize("use_dora", [False, True])
def test_lora_of_a_transposed_weight_merges_as_in_peft(use_dora):
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(8, 8))
    config = config_of("Lora", r=2, lora_alpha=3, target_modules=["0"], fan_in_fan_out=True, use_dora=use_dora)
    check(config, "lora", alpha=3, rank=2, model=model, setting=Setting(transposed=True, convention="peft"))


@pytest.mark.parametrize("effective", [False, True])
def test_loha_merges_as_in_peft(effective):
    targets = [*LINEAR, "conv", "point", "line"]
    config = config_of("LoHa", r=3, alpha=5, target_modules=targets, use_effective_conv2d=effective, init_weights=False)
    modules = check(config, "loha", alpha=5, rank=3)
    assert any("t1" in module.factors for module in modules) == effective


@pytest.mark.parametrize(("both", "rank"), list(itertools.product([False, True], [1, 16])))
@pytest.mark.parametrize("effective", [False, True])
def test_lokr_with_full_and_factored_halves_merges_as_in_peft(both, rank, effective):
    # PEFT cannot merge a Conv1d with a core: torch.kron stumbles over the strides that einsum gives it.
    line = [] if effective and rank == 1 else ["line"]
    targets = [*LINEAR, "conv", "point", *line]
    options = {"decompose_both": both, "use_effective_conv2d": effective, "init_weights": False}
    config = config_of("LoKr", r=rank, alpha=5, target_modules=targets, **options)
    modules = check(config, "lokr", alpha=5, rank=rank)
    square = next(module for module in modules if module.path == "square")
    assert ("w2" in square.factors) == (rank == 16)
    assert ("w1" in square.factors) == (rank == 16 or not both)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cayley_neumann": True},
        {"use_cayley_neumann": True, "num_cayley_neumann_terms": 3},
        {"use_cayley_neumann": True, "num_cayley_neumann_terms": 1},
        {"use_cayley_neumann": False},
        {"use_cayley_neumann": False, "block_share": True},
        {"use_cayley_neumann": False, "coft": True, "eps": 1e-2},
    ],
    ids=str,
)
def test_oft_merges_as_in_peft(options):
    terms = options.get("num_cayley_neumann_terms")
    config = config_of("OFT", r=0, oft_block_size=4, target_modules=[*LINEAR, "embed", "conv"], **options)
    setting = Setting(settings=settings_of({"coft": False} | options), convention="peft")
    if terms == 1:  # the identity: nothing changes, so there is nothing to compare with
        peft_model, merged = adapt(Zoo(), config)
        (module, *_) = modules_of(peft_model, "oft", alpha=None, rank=None)
        weight = merged[f"{module.path}.weight"]
        assert close(new_weight(module, weight, setting), weight)
        return
    check(config, "oft", alpha=None, rank=None, setting=setting)


def test_boft_merges_as_in_peft():
    config = config_of("BOFT", boft_block_size=4, target_modules=[*LINEAR, "conv"], init_weights=False)
    check(config, "boft", alpha=None, rank=None)


@pytest.mark.parametrize(("num_factors", "num_blocks", "size"), [(2, 8, 4), (3, 8, 4), (2, 4, 2), (4, 8, 2)])
def test_boft_with_several_factors_rotates_as_peft_would(num_factors, num_blocks, size):
    """PEFT uses several factors only with its CUDA kernel; its permutations can be asked for without."""
    from peft.tuners.boft.layer import BOFTLayer

    dim = num_blocks * size
    stored = torch.randn(num_factors, num_blocks, size, size)
    layer = BOFTLayer.__new__(BOFTLayer)
    matrix = torch.eye(dim)
    for i in range(num_factors):
        order = layer.block_butterfly_perm(dim, num_blocks // 2**i, size // 2, num_factors - 1)
        assert order.tolist() == butterfly_order(dim, num_blocks >> i, size // 2).tolist()
        permutation = layer.perm2mat(order)
        blocks = torch.block_diag(*cayley(0.5 * (stored[i] - stored[i].transpose(1, 2))))
        matrix = permutation @ blocks @ permutation.T @ matrix
    weight = torch.randn(5, dim)
    assert close(rotate_inputs_by_butterfly(weight, stored), weight @ matrix.T)


# LyCORIS


def lycoris_module(kind, base, **options):
    import lycoris.modules as kinds

    classes = {
        "locon": kinds.locon.LoConModule, "loha": kinds.loha.LohaModule, "lokr": kinds.lokr.LokrModule,
        "diag-oft": kinds.diag_oft.DiagOFTModule, "boft": kinds.boft.ButterflyOFTModule,
    }  # fmt: skip
    module = classes[kind]("x", base, **options)
    randomise(module, lambda _: True, seed=3)
    return module


LYCORIS_ROLES = {"lora_down.weight": "A", "lora_up.weight": "B", "lora_mid.weight": "mid", "dora_scale": "magnitude"}
LYCORIS_ROLES |= {"oft_blocks": "blocks", "rescale": "rescale"}


def module_of(lycoris, family):
    state = lycoris.state_dict()
    alpha = float(state.pop("alpha"))
    factors = {
        LYCORIS_ROLES.get(name) or name.removeprefix("hada_").removeprefix("lokr_"): tensor.detach()
        for name, tensor in state.items()
    }
    return AdapterModule(path="x", family=family, factors=factors, alpha=Sourced(alpha, "alpha tensor"))


def check_forward(lycoris, base, family):
    """Hold the adapted layer's output against what LyCORIS computes."""
    module = module_of(lycoris, family)
    weight = new_weight(module, base.weight.detach(), Setting(convention="kohya"))
    check_by_rows(module, base.weight.detach(), Setting(convention="kohya"))
    torch.manual_seed(5)
    shape = (3, base.in_features) if isinstance(base, nn.Linear) else (2, base.in_channels, 7, 7)
    x = torch.randn(shape)
    with torch.no_grad():
        expected = lycoris.eval()(x)
        assert not torch.allclose(expected, base(x))
        base.weight.copy_(weight)
        found = base(x)
    # The forward adds two products, so it differs by the rounding of their sum.
    assert float((found - expected).abs().max()) <= 2e-6 * max(1.0, float(expected.abs().max()))


BASES = {
    "linear": lambda: nn.Linear(12, 16),
    "conv": lambda: nn.Conv2d(6, 16, 3, padding=1),
    "point": lambda: nn.Conv2d(6, 16, 1),
}
CASES = [
    ("locon", "lora", {}),
    ("locon", "lora", {"use_tucker": True}),
    ("locon", "lora", {"weight_decompose": True}),
    ("locon", "lora", {"weight_decompose": True, "wd_on_out": False}),
    ("locon", "lora", {"rs_lora": True}),
    ("loha", "loha", {}),
    ("loha", "loha", {"use_tucker": True}),
    ("loha", "loha", {"weight_decompose": True}),
    ("loha", "loha", {"weight_decompose": True, "wd_on_out": False}),
    ("lokr", "lokr", {"lora_dim": 1}),
    ("lokr", "lokr", {"lora_dim": 1, "use_tucker": True}),
    ("lokr", "lokr", {"lora_dim": 1, "decompose_both": True}),
    ("lokr", "lokr", {"lora_dim": 64}),
    ("lokr", "lokr", {"full_matrix": True, "lora_dim": 4}),
    ("lokr", "lokr", {"lora_dim": 1, "weight_decompose": True}),
    ("diag-oft", "oft", {}),
    ("diag-oft", "oft", {"rescaled": True}),
    ("diag-oft", "oft", {"constraint": 0.01}),
    ("boft", "boft", {}),
    ("boft", "boft", {"rescaled": True, "constraint": 0.01}),
]


@pytest.mark.full
@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lycoris_families_give_what_its_forward_gives(kind, case):
    algorithm, family, options = case
    torch.manual_seed(2)
    base = BASES[kind]()
    lycoris = lycoris_module(algorithm, base, alpha=2, **({"lora_dim": 4} | options))
    check_forward(lycoris, base, family)


def test_full_difference_and_bias_are_added():
    weight, bias = torch.randn(4, 6), torch.randn(4)
    factors = {"diff": torch.randn(4, 6), "diff_b": torch.randn(4)}
    module = AdapterModule(path="x", family="full", factors=factors)
    assert torch.equal(new_weight(module, weight, Setting(scale=0.5)), weight + 0.5 * factors["diff"])
    change = change_of(module, (4,), role="bias")
    assert torch.equal(apply(change, bias.view(-1, 1)).flatten(), bias + factors["diff_b"])


# Stacks of experts


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacked_experts_merge_as_peft_merges_target_parameters(is_transposed):
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_transposed = is_transposed
            shape = (3, 5, 8) if is_transposed else (3, 8, 5)
            self.up = nn.Parameter(torch.randn(shape))

        def forward(self, x):
            return x

    model = nn.ModuleDict({"experts": Stack()})
    config = config_of("Lora", r=2, lora_alpha=3, target_modules=[], target_parameters=["experts.up"])
    peft_model, merged = adapt(model, config)
    (module,) = modules_of(peft_model, "lora", alpha=3, rank=2)
    weight = model["experts"].up.detach()
    setting = Setting(num_experts=3, transposed=is_transposed, convention="peft")
    assert not torch.equal(weight, merged["experts.up"])
    assert close(new_weight(module, weight, setting), merged["experts.up"])
    assert change_of(module, tuple(weight.shape), setting).is_rowwise
    check_by_rows(module, weight, setting)


# What cannot be


PAIR = {"A": torch.ones(2, 4), "B": torch.ones(3, 2)}
KRON = {"w1": torch.ones(2, 2), "w2": torch.ones(3, 3)}
HALF, OF_PEFT = Setting(scale=0.5), Setting(convention="peft")
REFUSED = {
    "no alpha": ("lora", PAIR, None, PLAIN, (3, 4), "alpha of x is not known"),
    "no rank of PEFT's LoKr of two full factors": ("lokr", KRON, 1, OF_PEFT, (6, 6), "the rank of x is not known"),
    "no series": ("oft", {"R": torch.randn(4, 6)}, None, PLAIN, (8, 16), "use_cayley_neumann is not known"),
    "half a DoRA": ("lora", PAIR | {"magnitude": torch.ones(3)}, 1, HALF, (3, 4), "cannot be scaled"),
    "half a rotation": ("oft", {"blocks": torch.zeros(1, 3, 3)}, 1, HALF, (3, 4), "cannot be scaled"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_or_no_sum_is_refused_not_guessed(case):
    family, factors, alpha, setting, shape, what = REFUSED[case]
    alpha = None if alpha is None else Sourced(float(alpha), "--alpha")
    module = AdapterModule(path="x", family=family, factors=factors, alpha=alpha)
    with pytest.raises(UsageError, match=what):
        new_weight(module, torch.randn(shape), setting)
    if family == "lokr":  # LyCORIS scales none
        assert torch.equal(delta(module, shape, Setting(convention="kohya")), torch.ones(shape))


@pytest.mark.parametrize(
    "factors",
    [
        {"A": torch.ones(2, 4), "B": torch.ones(3, 3)},
        {"A": torch.ones(2, 4)},
        {"A": torch.ones(2, 5), "B": torch.ones(3, 2)},
        {"A": torch.ones(2), "B": torch.ones(3, 2)},
        {"A": torch.ones(2, 4), "B": torch.ones(3, 2), "magnitude": torch.ones(4)},
    ],
    ids=lambda f: str({name: list(t.shape) for name, t in f.items()}),
)
def test_factors_that_do_not_fit_are_refused(factors):
    module = AdapterModule(path="x", family="lora", factors=factors, alpha=Sourced(1.0, "--alpha"))
    with pytest.raises(UnreadableError):
        new_weight(module, torch.randn(3, 4))
