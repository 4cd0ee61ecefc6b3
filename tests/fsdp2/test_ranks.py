"""The harness itself: results by rank, failures with their place, hangs that end."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from fsdp2.ranks import RankError, RankLost, run_ranks


def add_up(rank, world_size, amount):
    total = torch.tensor(float(rank + amount))
    dist.all_reduce(total)
    return rank, world_size, total.item()


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def hang_on_one(rank, world_size):
    if rank == 1:
        time.sleep(600)
    return rank


def test_ranks_that_return_give_their_results_in_order():
    assert run_ranks(2, add_up, 10) == [(0, 2, 21.0), (1, 2, 21.0)]


def test_rank_that_raises_is_named_with_its_place():
    with pytest.raises(RankError, match="rank 1: ValueError: rank one says no") as caught:
        run_ranks(2, fail_on_one)
    assert isinstance(caught.value.error, ValueError)
    assert "in fail_on_one" in caught.value.trace


@pytest.mark.full
def test_rank_that_hangs_is_ended_and_shows_where():
    results = run_ranks(2, hang_on_one, timeout=4, check=False)
    assert isinstance(results[1], RankLost)
    assert "hang_on_one" in results[1].trace
