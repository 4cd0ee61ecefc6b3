"""What smoke runs are made of, without ranks: where a loss is, what is one finding, what is drawn."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import UnclearLossError, UsageError
from ckpt_tools.models.recipe import find_loss, loss_of
from ckpt_tools.models.replace_parameters import adopt_computed
from ckpt_tools.preflight.smoke import rng
from ckpt_tools.preflight.smoke.report import causes, group_findings, of_ranks

LOSS = torch.tensor(2.0, requires_grad=True)
LOGITS = torch.ones(2, 3, requires_grad=True)
METRIC = torch.tensor(0.5)


@pytest.mark.parametrize(
    ("output", "where"),
    [
        (LOSS, ""),
        (LOSS.reshape(1), ""),
        (LOGITS, None),
        ((LOGITS, LOSS), "1"),
        ([LOSS, None], "0"),
        ((LOGITS, LOSS, METRIC), "1"),
        ({"logits": LOGITS, "nll": LOSS, "accuracy": METRIC}, "nll"),
        ({"loss": LOSS, "aux": LOSS}, "loss"),
        (SimpleNamespace(loss=LOSS, aux=LOSS), "loss"),
        ((LOGITS, LOGITS), None),
        ((LOGITS, torch.tensor(3)), None),  # a count is no loss
        ({"loss": None, "logits": LOGITS}, None),
    ],
)
def test_loss_is_found_where_it_is_certain(output, where):
    assert find_loss(output) == where
    if where is not None:
        assert loss_of(output, where) == 2


@pytest.mark.parametrize("output", [(LOSS, LOSS), (LOGITS, METRIC), {"a": LOSS, "b": LOSS}, (LOGITS, LOSS.reshape(1))])
def test_scalars_that_nothing_tells_apart_are_asked_about(output):
    with pytest.raises(UnclearLossError, match="forward returns scalars at"):
        find_loss(output)


def test_loss_that_is_named_is_taken_or_refused():
    output = {"losses": {"total": LOSS, "parts": (LOSS, METRIC)}, "logits": LOGITS}
    assert find_loss(output, "losses.total") == "losses.total"
    assert find_loss(output, "losses.parts.-2") == "losses.parts.-2"
    for wrong in ("loss", "losses", "losses.parts.1", "losses.parts.7"):
        with pytest.raises(UnclearLossError, match="cannot be the loss"):
            find_loss(output, wrong)
    with pytest.raises(UsageError, match="returned no loss at '1'"):
        loss_of((LOGITS, None), "1")


def error(code, where="", what="wrong"):
    return Finding.error(code, where, what)


def test_findings_about_many_layers_are_folded_and_counted():
    names = [f"layers.{n}.{part}.weight" for n in range(20) for part in ("up", "down")] + ["head.weight", "norm.0.bias"]
    folded = group_findings(error("missing-tensor", name) for name in names)
    assert [finding.where for finding in folded] == [
        "layers.0.up.weight",
        "layers.0.down.weight",
        "head.weight",
        "norm.0.bias",
    ]
    assert folded[0].what == "wrong; and 19 more at layers.*.up.weight"
    assert folded[2].what == "wrong"
    many = group_findings(error("wrong-shard", f"{letter}.weight") for letter in "abcdefgh")
    assert [finding.where for finding in many] == ["a.weight", "b.weight", "c.weight", "d.weight", "e.weight", "…"]
    assert many[-1].what == "3 more like these: f.weight, g.weight, h.weight"
    two = [error("x", "layers.0.w"), error("x", "layers.1.w")]
    assert group_findings(two) == two


def test_what_ranks_say_alike_is_said_once():
    first = [error("wrong-shard", "layers.0.w", "3 of 4"), error("wrong-shard", "layers.0.w", "3 of 4")]
    second = [error("wrong-shard", "layers.1.w", "1 of 4"), error("wrong-shard", "head.w")]
    assert of_ranks([first, second]) == [first[0], second[1]]


@pytest.mark.parametrize(
    ("told", "lost", "left"),
    [
        ("rank-died rank-skip rank-lost hang", True, "rank-died"),
        ("rank-died rank-skip rank-lost", False, "rank-skip"),  # gloo aborts ranks that have parted
        ("hang rank-skip rank-skip", False, "rank-skip"),
        ("rank-died rank-lost custom-method", False, "custom-method"),
        ("rank-died rank-lost custom-method", True, "rank-died custom-method"),
        ("rank-died rank-lost", False, "rank-died"),
        ("rank-lost", False, "rank-lost"),
        ("hang", False, "hang"),
        ("wrong-loss wrong-gradient", False, "wrong-loss wrong-gradient"),
    ],
)
def test_one_cause_is_one_finding(told, lost, left):
    found = causes([error(code, str(at)) for at, code in enumerate(told.split())], has_lost_rank=lost)
    assert [finding.code for finding in found] == left.split()


def test_warnings_do_not_hide_what_ranks_that_were_lost_say():
    warning = Finding.warning("meta-attribute", "x", "y")
    assert causes([warning, error("rank-lost")], has_lost_rank=False) == [warning, error("rank-lost")]


def drawn():
    import numpy

    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_draws_depend_on_the_batch_and_the_step_alone():
    found = {}
    for index, step in ((0, 0), (1, 0), (0, 1)):
        rng.seed(index, step)
        before = rng.state()
        assert rng.state() == before
        found[index, step] = drawn()
        assert rng.state() != before
    rng.seed(1, 0)
    assert drawn() == found[1, 0]
    assert len({value for values in found.values() for value in values}) == 9


def test_buffers_go_back_to_what_they_were():
    model = nn.BatchNorm1d(2)
    model.register_buffer("seen", torch.zeros(1))
    kept, running = rng.take_buffers(model), model.running_mean
    model(torch.randn(4, 2))
    model.seen = torch.zeros(3)  # another shape
    assert not torch.equal(running, kept["running_mean"])
    rng.put_buffers(model, kept)
    assert model.running_mean is running
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())


class Table:
    def __init__(self):
        self.values = torch.arange(3)


class Computes(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("angles", torch.rand(3), persistent=False)
        self.register_buffer("kept", torch.ones(3))
        self.plain, self.several, self.table = torch.arange(3.0), [torch.ones(2), 1], Table()


def test_what_init_computes_is_taken_from_a_build_off_meta():
    with torch.device("meta"):
        model, other = Computes(), Computes()
    names = adopt_computed(model, Computes)
    assert names == ("angles", "plain", "several", "table")
    adopt_computed(other, Computes)
    assert torch.equal(model.angles, other.angles)  # equal on all ranks
    assert torch.equal(model.table.values, torch.arange(3))
    assert model.weight.is_meta
    assert model.kept.is_meta  # a checkpoint has it
    assert "angles" not in model.state_dict()
    assert not Computes().weight.is_meta
