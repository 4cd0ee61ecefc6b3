"""What parallelism leaves on a rank: few layers tell as much as all, stages, and what is cut along tp."""

from __future__ import annotations

from dataclasses import replace

import pytest
from estimate.steps import BATCH, CONFIG, TOKENS, case_of, sandbox
from fsdp2.ranks import run_ranks

from ckpt_tools import api
from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.estimate import EstimateOptions
from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.formula import stages_of
from ckpt_tools.estimate.model_sizes import GPUS, gpu_bytes
from ckpt_tools.estimate.options import cases_of
from ckpt_tools.estimate.track import slim

DENSE = CONFIG | {"num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 4}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
WORDY = DENSE | {"num_hidden_layers": 2, "vocab_size": 40000}
TITAN = {"sequence_parallel": True, "loss_parallel": True}
JOBS = {
    "selective, cp, fused loss": (
        DENSE,
        {"strategy": "full_shard", "mesh": "dp_shard=4,cp=2", "selective_checkpointing": True, "fused_loss": True},
    ),
    "qlora": (DENSE, {"strategy": "full_shard", "mesh": "dp_shard=2", "lora": 8, "quantize": "nf4"}),
    "tp, pp": (
        DENSE | {"num_hidden_layers": 10},
        {"strategy": "shard_grad_op", "mesh": "dp_shard=2,tp=2,pp=2", "activation_checkpointing": True} | TITAN,
    ),
    "experts": (MOE, {"strategy": "full_shard", "mesh": "dp_shard=4,tp=2", "expert_parallel": 4} | TITAN),
}


def track_both(rank, world_size):
    """Return what few layers say, and what all of them say."""
    from ckpt_tools.estimate import track
    from ckpt_tools.estimate.track import Slim
    from ckpt_tools.models.hf_recipe import HfRecipe
    from ckpt_tools.sandbox.audit import in_sandbox

    recipes = {name: HfRecipe(config, "config") for name, (config, _) in JOBS.items()}
    wordy = HfRecipe(WORDY, "config")
    short, found = track.slim, []

    def whole(kinds):
        everything = tuple(range(len(kinds)))
        return Slim(everything, everything, 0)

    with in_sandbox(sandbox()):
        for name, (_, job) in JOBS.items():
            pair = []
            for track.slim in (short, whole):
                pair.append(track.track(recipes[name], case_of(job)))
            found.append(pair)
        cut = track.track(wordy, case_of({"strategy": "full_shard", "mesh": "dp_shard=1,tp=4"} | TITAN))
    return dict(zip(JOBS, found, strict=True)), cut


@pytest.fixture(scope="module")
def tracked():
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    (found,) = run_ranks(1, track_both, backend=None, timeout=580)
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", JOBS)
def test_few_layers_tell_what_all_take(tracked, name):
    few, all_of_them = tracked[0][name]
    assert not isinstance(few, str), few
    assert replace(few, moments=()) == replace(all_of_them, moments=())
    whole = {(moment.phase, moment.block): moment.held for moment in all_of_them.moments}
    assert {key: whole[key] for key in ((one.phase, one.block) for one in few.moments)} == {
        (one.phase, one.block): one.held for one in few.moments
    }


@pytest.mark.full
def test_loss_parallel_cuts_the_logits_of_a_wordy_model(tracked):
    # Shapes that DTensor computes for its own ends are of whole logits; nobody has these.
    logits = BATCH * TOKENS * WORDY["vocab_size"] * 4
    assert 0.5 * logits < tracked[1].activations < 1.1 * logits  # some four f32 copies, each a quarter


@pytest.mark.parametrize(
    ("kinds", "base", "left_out"),
    [
        ("A" * 32, (0, 1, 30, 31), 28),
        ("D" * 3 + "M" * 58, (0, 1, 2, 3, 4, 59, 60), 54),
        ("LLLG" * 8, (0, 1, 2, 3, 28, 29, 30, 31), 6),
        ("A" * 8, tuple(range(8)), 0),
        ("ABCDEFGH", tuple(range(8)), 0),
        ("", (), 0),
    ],
)
def test_slim_keeps_every_kind_and_its_neighbours(kinds, base, left_out):
    found = slim(kinds)
    assert (found.base, found.left_out) == (base, left_out)
    period = len(found.longer) - len(found.base)
    assert len(found.base) + left_out * period == len(kinds)
    assert set(found.base) <= set(found.longer) or not left_out


def case(mesh="pp=4", **fields):
    return Case(mesh=parse_mesh(mesh), **({"batch_size": 8} | fields))


def test_stages_have_all_layers_and_embedding_and_output_weigh_one_each():
    first, second, last = stages_of(126, case("pp=8"))
    assert [(stage.first, stage.count) for stage in (first, second, last)] == [(0, 15), (15, 16), (111, 15)]
    assert (first.has_embedding, first.has_output) == (True, False)
    assert (last.has_embedding, last.has_output) == (False, True)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UsageError, match="more stages than the model layers"):
        stages_of(3, case())


@pytest.mark.parametrize(
    ("schedule", "batch", "in_flight"),
    [
        ("gpipe", 8, [8, 8, 8]),
        ("1f1b", 8, [4, 3, 1]),
        ("1f1b", 2, [2, 2, 1]),
        ("interleaved-1f1b", 8, [5.5, 4.5, 2.5]),
        ("interleaved-zero-bubble", 8, [4, 3.5, 2.5]),
        ("zbv", 8, [4, 4, 4]),
    ],
)
def test_micro_batches_in_flight_follow_the_schedule(schedule, batch, in_flight):
    stages = stages_of(16, case(schedule=schedule, batch_size=batch))
    assert [stage.in_flight for stage in stages] == in_flight


def test_case_with_cp_and_ep_has_their_ranks_under_fsdp():
    found = case("dp_shard=2,cp=4,tp=2,pp=3", seq_len=8190, micro_batches=4)
    assert str(found.live_mesh) == "dp_shard=8,tp=2"
    assert (found.num_shards, found.tokens_per_sample, found.samples) == (8, 2048, 2)
    assert str(case("cp=8").live_mesh) == "dp_shard=8"
    assert str(case("dp_replicate=2,cp=2", strategy="no_shard").live_mesh) == "dp_replicate=4"


def test_pipeline_keeps_parameters_by_default():
    (found,) = cases_of(EstimateOptions(params=7 * 10**9, layers=32, hidden=4096, mesh="dp_shard=2,pp=2"))
    assert found.strategy == "shard_grad_op"


def test_what_is_assumed_is_said():
    found = api.estimate(params=7 * 10**9, layers=32, hidden=4096, mesh="dp_shard=2,cp=2", compile=True, fp8=True)
    assert [any(word in note for note in found.notes) for word in ("torch.compile", "float8", "context")] == [True] * 3


def test_devices_by_name_have_less_than_they_are_sold_with():
    for name, size in GPUS.items():
        sold = name.rpartition("-")[2].removesuffix("GB")
        if sold.isdigit():
            assert 0.94 * int(sold) < size / 2**30 < int(sold)
    assert gpu_bytes("h100-80gb") == GPUS["H100-80GB"]
    assert gpu_bytes("H100") is None, "two sizes are sold"
