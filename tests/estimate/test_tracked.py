"""What is predicted without data, against what real ranks take."""

from __future__ import annotations

import pytest
from estimate.steps import case_of, notes, predict, sizes, train
from fsdp2.ranks import run_ranks

from ckpt_tools.estimate import formula

pytestmark = pytest.mark.full

pytest.importorskip("transformers")
pytest.importorskip("peft")

JOBS = {
    "no_shard": {"strategy": "no_shard", "mesh": "dp_replicate=2"},
    "shard_grad_op": {"strategy": "shard_grad_op", "mesh": "dp_shard=2"},
    "full_shard": {"strategy": "full_shard", "mesh": "dp_shard=2"},
    "hybrid_shard": {"strategy": "hybrid_shard", "mesh": "dp_replicate=2,dp_shard=1"},
    "f32": {"strategy": "full_shard", "mesh": "dp_shard=2", "param_dtype": "f32"},
    "tp": {"strategy": "full_shard", "mesh": "dp_shard=1,tp=2"},
    "lora": {"strategy": "full_shard", "mesh": "dp_shard=2", "lora": 8},
    "offload": {"strategy": "full_shard", "mesh": "dp_shard=2", "offload": True},
}
JOBS |= {
    f"{name} + checkpointing": JOBS[name] | {"activation_checkpointing": True}
    for name in ("shard_grad_op", "full_shard", "lora")
}


@pytest.fixture(scope="module")
def predicted():
    (found,) = run_ranks(1, predict, list(JOBS.values()), backend=None, timeout=240)
    return dict(zip(JOBS, found, strict=True))


@pytest.fixture(scope="module")
def real():
    ranks = run_ranks(2, train, list(JOBS.values()), timeout=240)
    return dict(zip(JOBS, (max(of_ranks) for of_ranks in zip(*ranks, strict=True)), strict=True))


@pytest.mark.zoo
@pytest.mark.parametrize("name", JOBS)
def test_tracked_peak_against_real_ranks_is_within_ten_percent(predicted, real, name):
    memory = predicted[name]
    assert not isinstance(memory, str), memory
    # The promise is 10 %, and seen is 0.1 %. But offload counts copies that a CPU does not make, and when the buffers
    # of tensor parallelism are freed depends on when the other rank answers.
    assert memory.peak == pytest.approx(real[name], rel=0.10 if name.startswith(("offload", "tp")) else 0.02)


@pytest.fixture(scope="module")
def figures():
    (found,) = run_ranks(1, sizes, backend=None, timeout=240)
    return found


@pytest.mark.parametrize("name", JOBS)
def test_formula_against_tracked_is_a_second_opinion(predicted, figures, name):
    # Such a small model is the hard case: what the formula leaves out is large beside what it counts.
    found = formula.estimate(figures, case_of(JOBS[name]))
    assert found.peak == pytest.approx(predicted[name].peak, rel=0.15)
    for part in ("params", "grads", "optimizer"):
        assert getattr(found, part) == pytest.approx(getattr(predicted[name], part), rel=0.01), part


@pytest.mark.parametrize("name", JOBS)
def test_peak_is_the_sum_of_its_parts(predicted, name):
    memory = predicted[name]
    assert sum(memory.at_peak.values()) == memory.peak
    assert all(size >= 0 for size in memory.at_peak.values())
    held = 0 if "offload" in name else memory.params + memory.optimizer
    assert held < memory.peak <= held + memory.grads + memory.activations + memory.gathered + memory.at_peak["step"]


@pytest.mark.parametrize("name", JOBS)
def test_timeline_walks_the_blocks_there_and_back_and_holds_the_peak(predicted, name):
    memory = predicted[name]
    assert max(sum(moment.held.values()) for moment in memory.moments) == memory.peak
    walked = {phase: [m.block for m in memory.moments if m.phase == phase] for phase in ("forward", "backward", "step")}
    blocks = [block for block in walked["forward"] if block]
    assert len(blocks) == len(set(blocks)) > 1
    assert walked == {"forward": ["", *blocks, ""], "backward": ["", *reversed(blocks)], "step": [""]}
    # What a block keeps for its backward piles up until backward takes it away.
    held = [m.held["activations"] for m in memory.moments if m.phase == "forward" and m.block]
    assert held == sorted(held)


def test_offload_keeps_in_host_memory_what_the_device_does_not_hold(predicted):
    plain, offloaded = predicted["full_shard"], predicted["offload"]
    assert offloaded.host == plain.params + plain.grads + plain.optimizer
    assert plain.host == 0
    assert {part: offloaded.at_peak[part] for part in ("params", "grads", "optimizer", "step")} == dict.fromkeys(
        ("params", "grads", "optimizer", "step"), 0
    )


def test_formula_for_qlora_against_real_ranks_is_within_ten_percent(figures):
    pytest.importorskip("bitsandbytes")
    job = {"strategy": "full_shard", "mesh": "dp_shard=2", "lora": 8, "quantize": "nf4"}
    real = max(peaks[0] for peaks in run_ranks(2, train, [job], timeout=240))
    found = formula.estimate(figures, case_of(job))
    assert found.peak == pytest.approx(real, rel=0.10)


def test_more_tokens_than_positions_are_noted():
    (found,) = run_ranks(1, notes, 1024, backend=None, timeout=60)
    assert found == ("the config has 512 positions, fewer than the 1024 tokens of a sample",)
    assert run_ranks(1, notes, 512, backend=None, timeout=60) == [()]
