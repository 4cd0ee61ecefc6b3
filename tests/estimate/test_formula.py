"""The formula, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.estimate import Case, formula
from ckpt_tools.estimate.case import CONTEXT_BYTES, FRAGMENTATION, NCCL_BYTES, WORKSPACE_BYTES, margin_of
from ckpt_tools.estimate.model_sizes import Block, Figures, figures_from_counts, figures_from_shapes

# Two blocks of 1000 parameters, 900 of them in matrices (30 × 20 and 10 × 30), and a root of 500.
BLOCK = Block(count=2, params=1000, matrices=900, outputs=40, matrix_sides=90, hidden=20, widest=600)
FIGURES = Figures(params=2500, blocks=(BLOCK,), hidden=20, vocab=5)
CASE = Case(mesh=parse_mesh("dp_shard=4"), seq_len=10, batch_size=3)


def test_formula_full_shard_by_hand():
    found = formula.estimate(FIGURES, CASE)
    assert (found.params, found.grads, found.optimizer) == (2500, 2500, 5000)
    # 30 tokens × 2 bytes × (2·40 + 2·20) values × 2 blocks; the loss: 30 × 5 × 12
    assert found.at_peak["activations"] == 30 * 2 * 120 * 2
    # the root and two blocks in bf16; gradients of a block in bf16 and f32, of the output (100) in bf16
    assert found.at_peak["gathered"] == 2 * (500 + 2000) + 1000 * 6 + 100 * 2
    assert found.peak == 2500 + 5000 + 14400 + 11200


def test_formula_checkpointing_keeps_the_inputs_and_one_block():
    found = formula.estimate(FIGURES, replace(CASE, activation_checkpointing=True))
    one, inputs = 30 * 2 * 120, 30 * 2 * 20
    # The last moment wins: gradients of all but one block and the root are there by then.
    assert found.at_peak["activations"] in (one + inputs, one + 2 * inputs)
    assert found.peak < formula.estimate(FIGURES, CASE).peak


ADAPTERS = 2 * 4 * 90
HYBRID = {"strategy": "hybrid_shard", "mesh": parse_mesh("dp_replicate=2,dp_shard=2")}


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({"strategy": "no_shard", "mesh": parse_mesh("dp_replicate=4")}, (10000, 10000, 20000)),
        (HYBRID, (5000, 5000, 10000)),  # cut over dp_shard alone
        ({"lora": 4}, ((2500 * 2 + ADAPTERS * 4) / 4, ADAPTERS * 4 / 4, 2 * ADAPTERS * 4 / 4)),
        ({"master_dtype": "bf16", "state_dtype": "f32"}, (1250, 1250, 5000)),
        ({"optimizer": "sgd"}, (2500, 2500, 0)),
        ({"optimizer": "sgd-momentum"}, (2500, 2500, 2500)),
    ],
)
def test_formula_parameters_gradients_and_state_are_those_of_the_case(changes, held):
    found = formula.estimate(FIGURES, replace(CASE, **changes))
    assert (found.params, found.grads, found.optimizer) == held


def test_formula_qlora_packs_the_matrices_and_copies_their_scales():
    found = formula.estimate(FIGURES, replace(CASE, lora=4, quantize="nf4"))
    quantised = 2 * 900
    packed = (quantised * 0.5 + (2500 - quantised) * 2 + ADAPTERS * 4) / 4
    assert found.params == round(packed + quantised * (1 / 64 + 4 / 16384))


def test_formula_offload_leaves_activations_and_what_passes():
    found = formula.estimate(FIGURES, replace(CASE, offload=True))
    plain = formula.estimate(FIGURES, CASE)
    assert found.host == plain.params + plain.grads + plain.optimizer
    # 1000 parameters in f32 come, their gradients in f32 go, a quarter of each.
    assert found.peak == plain.at_peak["activations"] + plain.at_peak["gathered"] + 1000 * 8 / 4


@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard", "hybrid_shard"])
def test_formula_peak_is_the_sum_of_its_parts(strategy):
    mesh = {"no_shard": "dp_replicate=4", "hybrid_shard": "dp_replicate=2,dp_shard=2"}.get(strategy, "dp_shard=4")
    found = formula.estimate(FIGURES, replace(CASE, strategy=strategy, mesh=parse_mesh(mesh)))
    assert sum(found.at_peak.values()) == found.peak


def test_figures_from_counts_are_those_of_llama():
    found = figures_from_counts(params=6738415616, layers=32, hidden=4096, vocab=32000)
    (block,) = found.blocks
    assert found.root == 2 * 32000 * 4096 + 4096
    assert block.params == 202383360
    assert block.matrices == 4 * 4096**2 + 3 * 4096 * 11008
    assert block.outputs == 5 * 4096 + 2 * 11008
    assert block.widest == 4096 * 11008


def test_figures_that_make_no_model_are_refused():
    with pytest.raises(UsageError, match="too few"):
        figures_from_counts(params=1000, layers=32, hidden=4096, vocab=None)
    with pytest.raises(UsageError, match="no repeated blocks"):
        figures_from_shapes({"a.weight": (3, 4), "layers.0.weight": (3, 4)})


def test_figures_from_shapes_find_blocks_and_output():
    shapes = {"embed.weight": (5, 20), "lm_head.weight": (5, 20), "norm.weight": (300,)}
    for number in range(2):
        shapes |= {
            f"layers.{number}.up.weight": (30, 20),
            f"layers.{number}.down.weight": (10, 30),
            f"layers.{number}.experts.0.bias": (100,),
        }
    found, notes = figures_from_shapes(shapes)
    assert found == replace(FIGURES, blocks=(replace(BLOCK, hidden=30),), hidden=30)
    assert notes == ()


def test_figures_from_shapes_say_when_blocks_are_no_matrices():
    _, notes = figures_from_shapes({f"down.{i}.conv.weight": (8, 8, 3, 3) for i in range(3)})
    assert len(notes) == 1
    assert "not matrices" in notes[0]


def test_margin_has_a_communicator_for_every_axis_with_ranks():
    found = margin_of(1000, parse_mesh("dp_replicate=2,dp_shard=4,tp=1"))
    assert found.nccl == 2 * NCCL_BYTES
    assert found.total == CONTEXT_BYTES + WORKSPACE_BYTES + 2 * NCCL_BYTES + round(FRAGMENTATION * 1000)
    assert margin_of(1000, parse_mesh("dp_shard=1")).nccl == 0
