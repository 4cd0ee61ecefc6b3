"""The audit of healthy models says nothing; what it reads and compares, case by case."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from fsdp2 import breakages, healthy, models
from fsdp2.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ckpt_tools.errors import CkptError, UnreadableError, UsageError
from ckpt_tools.fsdp2.audit import audit, find_double_wraps
from ckpt_tools.fsdp2.compare_ranks import RankRecord, Trace, compare_ranks, compare_records, compare_traces
from ckpt_tools.fsdp2.diagnose import diagnose
from ckpt_tools.fsdp2.internals import LOGGER, snapshot
from ckpt_tools.fsdp2.watch import last_watch, read_traces, watch


@pytest.fixture(scope="module")
def said_of_healthy(tmp_path_factory):
    path = tmp_path_factory.mktemp("healthy")
    for kind in healthy.KINDS:
        models.build(kind, "cpu").save_pretrained(path / kind)
    return {ranks: run_ranks(ranks, healthy.run_healthy, path, timeout=120) for ranks in (4, 2)}


@pytest.mark.full
@pytest.mark.parametrize("build", [*healthy.PLAIN, *healthy.TRANSFORMERS], ids=lambda build: build.__name__)
def test_audit_healthy_model_in_every_phase_finds_nothing(said_of_healthy, build):
    for said in said_of_healthy[4 if build in healthy.PLAIN else 2]:
        phases = said[build.__name__]
        assert len(phases) >= 13
        assert {phase: found for phase, found in phases.items() if found} == {}


def test_audit_unknown_phase_is_refused():
    with pytest.raises(UsageError, match="unknown phase 'training'"):
        audit(nn.Linear(2, 2), phase="training")


def test_audit_model_without_fsdp_has_nothing_to_say():
    for phase in ("built", "sharded", "loaded", "forward", "backward", "stepped"):
        assert audit(nn.Linear(2, 2), phase=phase) == []
    assert compare_ranks(nn.Linear(2, 2)) == []


def _states(rank, world_size):
    model = breakages.shard(breakages.Net(), init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",)))
    before = snapshot(model)
    loss = model(breakages.tokens()).sum()
    forward = snapshot(model)
    loss.backward()
    return before, forward, snapshot(model)


@pytest.mark.full
def test_snapshot_phases_of_full_shard_are_those_of_pytorch():
    before, forward, backward = run_ranks(2, _states)[0]
    assert [state.modules for state in before] == [("",), ("layers.0",), ("layers.1",)]
    assert before[1].parameters[:2] == ("layers.0.up.weight", "layers.0.up.bias")
    assert {state.is_root for state in before} == {None}
    assert [state.sharding for state in forward] == ["UNSHARDED", "SHARDED", "SHARDED"]
    assert [state.is_root for state in forward] == [True, False, False]
    assert {(state.sharding, state.training) for state in backward} == {("SHARDED", "IDLE")}
    assert before[0].mesh == (("dp_shard", 2),)


def _differing_plan(rank, world_size):
    import dataclasses

    from ckpt_tools.checkpoint.layout import Mesh, Shard
    from ckpt_tools.fsdp2.mesh import build_device_mesh
    from ckpt_tools.fsdp2.wrap import shard_model

    net = breakages.Net()
    plan = shard_model(net, build_device_mesh(Mesh(axes=(("dp_shard", world_size),))))
    other = dataclasses.replace(plan, placements=plan.placements | {"head.weight": {"dp_shard": Shard(1)}})
    return audit(net, phase="sharded", plan=plan), audit(net, phase="sharded", plan=other)


def test_audit_placement_that_is_not_the_plans_is_found():
    same, other = run_ranks(2, _differing_plan)[0]
    assert same == []
    assert [(found.code, found.where) for found in other] == [("load-placement", "head.weight")]
    assert "planned Shard(1), got Shard(0)" in other[0].what


class Reaching(nn.Module):
    def forward(self, x):
        return self.choose(x)

    def choose(self, x):
        return [self.train_one(row) for row in x]

    def train_one(self, x):
        return x

    def apart(self, x):
        return x


def _double_wraps(rank, world_size):
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for names in (("train_one",), ("apart",), ("forward",), ("choose", "train_one")):
        module = fully_shard(Reaching(), mesh=mesh)
        for name in names:
            register_fsdp_forward_method(module, name)
        found.append(find_double_wraps(module))
    return found


def test_double_wraps_are_found_through_other_methods_and_comprehensions():
    through, apart, itself, both = run_ranks(1, _double_wraps)[0]
    assert through == (("forward", "choose", "train_one"),)
    assert apart == ()
    assert itself == (("__call__", "forward"),)
    assert both == (("forward", "choose"), ("forward", "choose", "train_one"))


def _record(**fields):
    empty = {"structure": (), "parameters": (), "replicas": {}, "buffers": {}, "with_grad": ()}
    return RankRecord(**empty | fields)


@pytest.mark.parametrize(
    ("code", "field", "one", "other", "where"),
    [
        ("rank-structure", "structure", ("a on dp=2", "b on dp=2"), ("a on dp=2",), "b"),
        ("rank-structure", "structure", ("a on dp=2",), ("a on dp=4",), "a"),
        ("param-order", "parameters", ("a (2,)", "b (2,)"), ("b (2,)", "a (2,)"), "a"),
        ("param-order", "parameters", ("a (2,)",), ("a (2,)", "b (2,)"), "b"),
        ("rank-init", "replicas", {"a": "1", "b": "2"}, {"a": "1", "b": "3"}, "b"),
        ("garbage-buffer", "buffers", {"a": "1"}, {"a": "2"}, "a"),
        ("rank-unused", "with_grad", ("a", "b"), ("a",), "b"),
    ],
)
def test_compare_records_that_differ_name_rank_and_place(code, field, one, other, where):
    records = [_record(**{field: one}), _record(**{field: one}), _record(**{field: other})]
    found = compare_records(records)
    assert [(each.code, each.where) for each in found] == [(code, where)]
    assert "2" in found[0].what


def test_compare_records_of_equal_ranks_and_parts_that_only_one_has_are_silent():
    record = _record(structure=("a on dp=2",), parameters=("a (2,)",), replicas={"a": "1"}, with_grad=("a",))
    assert compare_records([record] * 3) == []
    assert compare_records([_record(replicas={"w at dp=0": "1"}), _record(replicas={"w at dp=1": "2"})]) == []


def test_gradients_that_ranks_lack_are_one_finding_with_the_names():
    held = (("x", *(f"layers.{i}.a" for i in range(9))), ("x", "b"), ("x", "b"))
    (found,) = compare_records([_record(with_grad=each) for each in held])
    assert found.where == "layers.0.a"
    assert found.what == "no gradient, but on others, on rank 1, 2: layers.*.a; rank 0: b"


def test_compare_records_of_many_differences_are_summed_up():
    many = {f"w{index}": "1" for index in range(100)}
    found = compare_records([_record(replicas=many), _record(replicas=dict.fromkeys(many, "2"))])
    assert len(found) == 9
    assert found[-1].what == "different weights for 92 more names"


def _trace(rank, *events, structure=("a on dp=2",)):
    return Trace(rank=rank, structure=structure, events=events)


def test_compare_traces_names_the_first_event_that_differs_or_is_missing():
    found = compare_traces([_trace(1, "pre_forward a", "pre_forward c"), _trace(0, "pre_forward a", "pre_forward b")])
    assert [(each.code, each.where) for each in found] == [("rank-skip", "b")]
    assert "after 'pre_forward a' (event 1) rank 0 does 'pre_forward b' and rank 1 'pre_forward c'" in found[0].what
    short, long = _trace(0, "pre_forward a"), _trace(1, "pre_forward a", "pre_forward b")
    assert compare_traces([short, short]) == []
    assert compare_traces([]) == []
    assert "rank 0 does 'nothing more'" in compare_traces([short, long])[0].what


def test_read_traces_cut_line_is_left_out(tmp_path):
    (tmp_path / "rank-1.trace").write_text('{"rank": 1, "structure": ["a"]}\npre_forward a\npost_for')
    assert read_traces(tmp_path) == (Trace(rank=1, structure=("a",), events=("pre_forward a",)),)


@pytest.mark.parametrize("text", ["", "[1]\n", "nonsense\n", '{"rank": "x", "structure": []}\n'])
def test_read_traces_something_else_is_unreadable(tmp_path, text):
    (tmp_path / "rank-0.trace").write_text(text)
    with pytest.raises(UnreadableError, match="not the trace of a rank"):
        read_traces(tmp_path)


def test_watch_leaves_no_trace_of_itself_behind():
    logger = logging.getLogger(LOGGER)
    before = logger.level, list(logger.filters)
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError), watch(model):
        model(torch.ones(2, 2) if not logger.isEnabledFor(logging.DEBUG) else torch.ones(3, 3))
    assert (logger.level, list(logger.filters)) == before
    assert not model._state_dict_pre_hooks
    assert not torch.overrides._get_current_function_mode_stack()


def test_watch_keeps_no_model_alive():
    model = nn.Linear(2, 2)
    with watch(model) as seen:
        model(torch.ones(2))
    assert last_watch(model) is seen
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert last_watch(None) is None


def _without_private_state(rank, world_size):
    model = breakages.shard(breakages.Net(), init_device_mesh("cpu", (world_size,)))
    del model.layers[1]._get_fsdp_state()._fsdp_param_groups
    try:
        snapshot(model)
    except CkptError as error:
        return str(error)
    return ""


def test_snapshot_torch_that_looks_different_inside_is_named():
    text = run_ranks(1, _without_private_state)[0]
    assert "FSDP2 in this PyTorch release has different internals" in text
    assert f"torch {torch.__version__}" in text


def _fail_otherwise(rank, world_size):
    model = breakages.shard(breakages.Net(), init_device_mesh("cpu", (world_size,)))
    with watch(model):
        try:
            model(torch.ones(2, 4))  # not indices
        except RuntimeError as error:
            return diagnose(error, model=model)
    return None


def test_diagnose_ordinary_mistake_in_fsdp_model_is_unknown():
    found = run_ranks(2, _fail_otherwise)[0]
    assert found.id == "unknown"
    assert "indices" in found.cause
    assert "h = self.emb(ids)" in found.call
