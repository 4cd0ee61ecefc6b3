"""Every id of the catalogue: a small model broken in exactly that way, on real ranks, gets it and no other."""

from __future__ import annotations

import pytest
from fsdp2 import breakages, states, threads  # noqa: F401 - add their own
from fsdp2.breakages import BREAKAGES, DISAGREEMENTS, SILENT, THREADS
from fsdp2.ranks import RankLost, run_ranks

from ckpt_tools.fsdp2.catalogue import CATALOGUE
from ckpt_tools.fsdp2.compare_ranks import compare_traces
from ckpt_tools.fsdp2.diagnose import Diagnosis, diagnose
from ckpt_tools.fsdp2.watch import read_traces

NOT_ON_THIS_TORCH: dict[str, str] = {}
"""Diagnosis → why CPU ranks of the tested PyTorch cannot show it. All can."""


def _cases(table):
    """The names of a table; those of the second file are left to the whole run."""
    own = [one[-1] if isinstance(one, tuple) else one.build for one in table.values()]
    return [
        pytest.param(name, marks=() if function.__module__ == breakages.__name__ else pytest.mark.full)
        for name, function in zip(table, own, strict=True)
    ]


@pytest.fixture(scope="module")
def said_by_rank(request, tmp_path_factory):
    wanted = [item for item in request.session.items if "said_by_rank" in getattr(item, "fixturenames", ())]
    names = {item.callspec.params["name"] for item in wanted if not item.get_closest_marker("skip")}
    return run_ranks(2, threads.run_some, names, str(tmp_path_factory.mktemp("states")), timeout=100)


@pytest.mark.parametrize("is_watched", [False, True], ids=["bare", "watched"])
@pytest.mark.parametrize("name", _cases(BREAKAGES))
def test_diagnose_broken_model_names_id_module_and_call(said_by_rank, name, is_watched):
    expected = BREAKAGES[name]
    for rank in (0, 1):
        code, module, call, others, text, fix = said_by_rank[rank][0][name, is_watched]
        assert code == (expected.bare if expected.bare and not is_watched else expected.id), text
        assert expected.call in call, text
        assert set(others) <= {expected.id}
        if code == expected.id:
            assert module.startswith(expected.module), text
            assert expected.fix in fix


@pytest.mark.parametrize("name", _cases(SILENT))
def test_audit_silently_broken_model_finds_that_and_nothing_else(said_by_rank, name):
    code, where, _ = SILENT[name]
    for rank in (0, 1):
        found = said_by_rank[rank][1][name]
        assert {finding.code for finding in found} == {code}
        assert found[0].where == where
        assert all(finding.severity != "info" and finding.hint == CATALOGUE[code].fix for finding in found)


@pytest.mark.full
@pytest.mark.parametrize("name", list(filter(breakages.is_fixable, (*BREAKAGES, *SILENT))))
def test_fix_that_is_named_works_and_nothing_is_said_afterwards(said_by_rank, name):
    for rank in (0, 1):
        assert said_by_rank[rank][2][name] == []


@pytest.mark.full
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_diagnose_ranks_that_disagree_is_told_from_their_traces(tmp_path, name):
    traces = tmp_path / "traces"
    results = run_ranks(
        2, breakages.run_disagreement, name, traces, tmp_path / "meet", timeout=30, check=False, backend=None
    )
    told = [result for result in results if isinstance(result, Diagnosis)]
    # Gloo ends a process that receives more than it expected; the other one, or whoever started them, can still tell.
    assert all(isinstance(result, Diagnosis | RankLost | None) for result in results)
    code = "rank-skip" if name == "rank-skip-steps" else name
    where = DISAGREEMENTS[name][1]
    assert {(each.id, each.module) for each in told} == {(code, where)}
    of_traces = [] if name == "rank-alone" else [(code, where)]  # the models did the same
    assert [(found.code, found.where) for found in compare_traces(read_traces(traces))] == of_traces


def test_diagnose_assertion_of_old_torch_on_bagel_model_is_double_wrap():
    text = "Expects to be in one of (<ShardedState.UNSHARDED: 3>,), not ShardedState.SHARDED"
    for found in run_ranks(2, _diagnose_text_on_bagel, text):
        assert found.id == "double-wrap"
        assert found.module == "layers.0"
        assert "forward → forward_train" in found.cause


def _diagnose_text_on_bagel(rank, world_size, text):
    mesh = breakages.init_device_mesh("cpu", (world_size,))
    model = breakages.sharded_bagel(mesh)
    # What torch 2.5 raises from a C++ callback in backward, without a frame of the model.
    return diagnose(AssertionError(text), model=model, phase="backward")


@pytest.mark.full
def test_diagnose_state_dict_in_forward_with_int_reshard_is_mid_forward():
    for found, text in run_ranks(4, _reshard_to_two):
        assert "Expects to be in one of" in text
        assert (found.id, found.module) == ("mid-forward-reshard", "layers.0")


def _reshard_to_two(rank, world_size):
    class Saving(breakages.Block):
        def forward(self, x):
            x = super().forward(x)
            self.state_dict()
            return x

    mesh = breakages.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    model = breakages.shard(breakages.with_block(Saving)(), mesh, reshard_after_forward=2)
    try:
        breakages.step(model)
    except AssertionError as error:
        return diagnose(error, model=model), str(error)
    return None, "no error"


def test_diagnose_gloo_timeout_without_traces_says_how_to_get_them():
    found = diagnose(RuntimeError("[unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"))
    assert found.id == "rank-skip"
    assert "watch(model, traces=DIR)" in found.cause


def test_diagnose_strange_error_is_unknown_and_keeps_its_text():
    found = diagnose(ValueError("seven\nis not eight"))
    assert (found.id, found.cause) == ("unknown", "ValueError: seven")
    assert found.to_finding().code == "unknown"


def test_diagnose_error_raised_from_a_known_one_is_the_known_one():
    error = ValueError("training failed")
    error.__cause__ = RuntimeError("FSDP state has already been lazily initialized for layers.3\nFSDP requires …")
    found = diagnose(error)
    assert (found.id, found.module) == ("root-not-first", "layers.3")


def test_table_holds_sixty_public_threads_of_which_hardly_any_is_unknown():
    told = {breakage.thread: breakage.id for breakage in BREAKAGES.values()}
    told |= {thread: SILENT[name][0] if name in SILENT else name for name, thread in THREADS.items()}
    told.pop("")
    assert len(told) >= 60
    assert sum(code == "unknown" for code in told.values()) <= 5


def test_catalogue_every_id_has_a_broken_model():
    shown = {breakage.id for breakage in BREAKAGES.values()} | {code for code, _, _ in SILENT.values()}
    shown |= {name for name in DISAGREEMENTS if name in CATALOGUE}
    assert shown | set(NOT_ON_THIS_TORCH) == set(CATALOGUE)
