"""Another family that says the same: the changed weight stays what it was, and the reported error is true."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters.maths import delta_of_arrays as delta, weight_of_arrays as new_weight
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


CONV = (20, 15, 3, 3)
CORES = {"w1_a": normal(3, 20), "w1_b": normal(3, 15), "w2_a": normal(3, 20), "w2_b": normal(3, 15)}
CORES |= {"t1": normal(3, 3, 3, 3), "t2": normal(3, 3, 3, 3)}
TUCKER = {"A": normal(3, 15, 1, 1), "mid": normal(3, 3, 3, 3), "B": normal(20, 3, 1, 1)}
BOTH = {"w1_a": normal(5, 2), "w1_b": normal(2, 6), "w2_a": normal(10, 2), "w2_b": normal(2, 9)}
LORAS = {
    "LoHa": (loha(), (20, 15), 9),
    "DoRA of LoHa, by row": (loha(magnitude=1 + normal(20, 1)), (20, 15), 9),
    "DoRA of LoHa, by column": (loha(magnitude=1 + normal(1, 15)), (20, 15), 9),
    "LoHa, flat, of a convolution": (loha(columns=15 * 9), CONV, 9),
    "LoHa with cores": (module("loha", CORES), CONV, 9),
    "LoKr, w1 full": (module("lokr", {"w1": normal(2, 3), "w2_a": normal(10, 2), "w2_b": normal(2, 5)}), (20, 15), 4),
    "LoKr, w1 tall": (module("lokr", {"w1": normal(4, 2), "w2_a": normal(10, 2), "w2_b": normal(2, 10)}), (40, 20), 4),
    "LoKr, both factored": (module("lokr", BOTH), (50, 54), 4),
    "LoKr, both full, w2 thin": (module("lokr", {"w1": normal(2, 10), "w2": normal(10, 2)}), (20, 20), 4),
    "LoKr, flat, of a convolution": (
        module("lokr", {"w1": normal(2, 3), "w2_a": normal(10, 2), "w2_b": normal(2, 5 * 9)}), CONV, 4,
    ),
    "LoKr with a core": (
        module("lokr", {"w1": normal(2, 3), "w2_a": normal(2, 10), "w2_b": normal(2, 5), "t2": normal(2, 2, 3, 3)}),
        CONV, 4,
    ),
    "LoRA with a core": (module("lora", TUCKER), CONV, 3),
}  # fmt: skip
"""Module → the shape of its weight, and the rank of the LoRA."""


@pytest.mark.parametrize("case", LORAS)
def test_what_has_low_rank_becomes_a_lora(case):
    before, shape, rank = LORAS[case]
    after = as_lora(before, shape if "flat" in case else None)  # else the factors show it
    made = after.module
    assert (made.family, made.rank.value, made.is_dora) == ("lora", rank, before.is_dora)
    assert made.factors.keys() - {"magnitude"} == {"A", "B"}
    assert (made.factors["A"].shape, made.factors["B"].shape[:2]) == ((rank, *shape[1:]), (shape[0], rank))
    assert_same(before, after, shape)


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
