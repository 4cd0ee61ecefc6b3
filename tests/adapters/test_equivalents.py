"""Another family that says the same: the changed weight stays what it was, and the reported error is true."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters.maths import delta_of_arrays as delta, scale_of, weight_of_arrays as new_weight
from arrays import to_array

from ckpt_tools.adapters.adapter import AdapterModule, Sourced
from ckpt_tools.adapters.ecosystems.place_modules import Fitting
from ckpt_tools.adapters.families.equivalents import Equivalent, as_lora, by_svd, error_between
from ckpt_tools.adapters.families.family import Setting
from ckpt_tools.errors import UsageError

ROUNDING = 2e-6
"""Relative, of float32 products in another order."""


def normal(*shape):
    return to_array(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.3)


def module(family, factors, alpha=3.0, **options):
    return AdapterModule(
        path="blocks.0.to_q", family=family, factors=factors, alpha=Sourced(alpha, "alpha tensor"), **options
    )


def loha(r=3, out=20, columns=15, **more):
    return module(
        "loha",
        {"w1_a": normal(out, r), "w1_b": normal(r, columns), "w2_a": normal(out, r), "w2_b": normal(r, columns + 0)}
        | more,
    )


def assert_same(before, after, shape, setting=None):
    setting = setting or Setting(convention="kohya")
    weight = normal(*shape)
    old, new = new_weight(before, weight, setting), new_weight(after.module, weight, setting)
    assert not np.array_equal(old, weight)
    assert float(np.abs(old - new).max()) <= ROUNDING
    if "magnitude" not in before.factors:
        change = delta(before, shape)
        true = float(np.abs(change - delta(after.module, shape)).max() / np.abs(change).max())
        assert after.error == pytest.approx(true, abs=1e-9)
        assert after.error <= ROUNDING


def test_loha_becomes_lora_of_squared_rank():
    before = loha()
    after = as_lora(before)
    assert (after.module.family, after.module.rank.value) == ("lora", 9)
    assert scale_of(after.module) == pytest.approx(scale_of(before))
    assert_same(before, after, (20, 15))


def test_flat_loha_of_a_convolution_takes_the_kernel_of_the_weight():
    before = loha(columns=5 * 9)
    after = as_lora(before, (20, 5, 3, 3))
    assert tuple(after.module.factors["A"].shape) == (9, 5, 3, 3)
    assert tuple(after.module.factors["B"].shape) == (20, 9, 1, 1)
    assert_same(before, after, (20, 5, 3, 3))


def test_loha_with_cores_becomes_lora():
    factors = {"w1_a": normal(3, 20), "w1_b": normal(3, 5), "w2_a": normal(3, 20), "w2_b": normal(3, 5)}
    before = module("loha", factors | {"t1": normal(3, 3, 3, 3), "t2": normal(3, 3, 3, 3)})
    assert_same(before, as_lora(before), (20, 5, 3, 3))


LOKRS = {
    "w1 full, w2 factored": ({"w1": normal(2, 3), "w2_a": normal(10, 2), "w2_b": normal(2, 5)}, 4),
    "w1 tall": ({"w1": normal(4, 2), "w2_a": normal(10, 2), "w2_b": normal(2, 10)}, 4),
    "both factored": ({"w1_a": normal(5, 2), "w1_b": normal(2, 6), "w2_a": normal(10, 2), "w2_b": normal(2, 9)}, 4),
    "both full, w2 thin": ({"w1": normal(2, 10), "w2": normal(10, 2)}, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", LOKRS)
def test_lokr_with_a_factored_half_becomes_lora(name):
    factors, rank = LOKRS[name]
    before = module("lokr", factors)
    shape = (
        factors.get("w1", factors.get("w1_a")).shape[0] * factors.get("w2", factors.get("w2_a")).shape[0],
        factors.get("w1", factors.get("w1_b")).shape[1] * factors.get("w2", factors.get("w2_b")).shape[1],
    )
    after = as_lora(before)
    if rank is not None:
        assert after.module.rank.value == rank
    assert after.module.rank.value <= min(shape)
    assert_same(before, after, shape)


@pytest.mark.parametrize("flat", [False, True])
def test_lokr_of_a_convolution_becomes_lora(flat):
    w2 = {"w2_a": normal(10, 2), "w2_b": normal(2, 5 * 9)}
    if not flat:
        w2 = {"w2_a": normal(2, 10), "w2_b": normal(2, 5), "t2": normal(2, 2, 3, 3)}
    before = module("lokr", {"w1": normal(2, 3)} | w2)
    assert_same(before, as_lora(before, (20, 15, 3, 3)), (20, 15, 3, 3))


def test_tucker_core_goes_into_a():
    before = module("lora", {"A": normal(3, 5, 1, 1), "mid": normal(3, 3, 3, 3), "B": normal(20, 3, 1, 1)})
    after = as_lora(before)
    assert set(after.module.factors) == {"A", "B"}
    assert_same(before, after, (20, 5, 3, 3))


@pytest.mark.parametrize("by_column", [False, True])
def test_magnitude_stays_with_the_new_family(by_column):
    magnitude = (1, 15) if by_column else (20, 1)
    before = loha(magnitude=1 + normal(*magnitude))
    after = as_lora(before)
    assert after.module.is_dora
    assert_same(before, after, (20, 15))


def test_rslora_becomes_a_larger_alpha():
    before = module("lora", {"A": normal(4, 15), "B": normal(20, 4)}, alpha=6.0, use_rslora=True)
    after = Fitting().with_plain_alpha(before)
    assert (after.alpha.value, after.use_rslora) == (12.0, False)
    assert_same(before, Equivalent(module=after, error=0.0, how=""), (20, 15))


def test_svd_reports_its_error_and_is_exact_with_enough_rank():
    before = module("full", {"diff": normal(20, 15)})
    with pytest.raises(UsageError, match="full difference"):
        as_lora(before)
    rough, exact = as_lora(before, svd_rank=4), as_lora(before, svd_rank=15)
    change = delta(before, (20, 15))
    true = float(np.abs(change - delta(rough.module, (20, 15))).max() / np.abs(change).max())
    assert rough.error == pytest.approx(true, rel=1e-3)
    assert rough.error > 0.05
    assert exact.error <= 5e-6
    assert by_svd(before, 4).module.rank.value == 4


def test_lokr_that_would_be_as_large_as_the_weight_needs_svd():
    before = module("lokr", {"w1": normal(4, 4), "w2": normal(5, 5)}, alpha=1.0)
    with pytest.raises(UsageError, match="as large as the weight"):
        as_lora(before)
    assert as_lora(before, svd_rank=20).error <= 5e-6


@pytest.mark.parametrize("family", ["oft", "boft", "saved"])
def test_what_is_no_sum_is_refused_with_the_reason(family):
    with pytest.raises(UsageError, match="depends on the base"):
        as_lora(module(family, {"blocks": normal(2, 3, 3)}))
    with pytest.raises(UsageError, match="depends on the base"):
        by_svd(module(family, {"blocks": normal(2, 3, 3)}), 2)


def test_error_of_something_else_is_large():
    one = module("lora", {"A": normal(3, 15), "B": normal(20, 3)})
    other = module("lora", {"A": normal(3, 15), "B": -normal(20, 3)})
    assert error_between(one, other) == pytest.approx(2.0)


def test_error_that_is_no_number_is_infinite_and_products_too_large_are_refused():
    huge = {name: factor * 1e30 for name, factor in loha().factors.items()}
    before = module("loha", huge)
    with pytest.raises(UsageError, match="too large for 32 bits"):
        as_lora(before)
    one = module("lora", {"A": np.full((1, 4), 1e30, np.float32), "B": np.full((4, 1), 1e30, np.float32)})
    assert error_between(one, one) == float("inf")
