"""How LoKr divides a dim, against PEFT's own function."""

from __future__ import annotations

import pytest

from ckpt_tools.adapters.families.lokr import factorization as ours


@pytest.mark.parametrize("factor", [-1, 1, 2, 3, 4, 6, 8, 16, 64])
def test_factorization_divides_every_size_as_peft_does(factor: int) -> None:
    from peft.tuners.lokr.layer import factorization  # five seconds, which collecting tests should not take

    for size in (*range(1, 400), 768, 1000, 1021, 2048, 3072, 11008):
        assert ours(size, factor) == factorization(size, factor), size
