"""What stays is a function of what is known; the names of trainers; the record."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from ckpt_tools.runs.assess import Entry, build_record, parse_record
from ckpt_tools.runs.folder import metric_in_name, parse_name
from ckpt_tools.runs.retention import Rules, RunCheckpoint, plan_retention

STATES = ("verified", "bad", "complete", "incomplete", "changing")
candidates = st.lists(
    st.builds(
        RunCheckpoint,
        name=st.text("abcdefgh", min_size=6, max_size=6),
        series=st.sampled_from(["step-*", "epoch_*"]),
        step=st.none() | st.integers(0, 12),
        state=st.sampled_from(STATES),
        metric=st.none() | st.floats(0, 1) | st.just(float("nan")),
        pinned=st.sampled_from(["", "", "in use"]),
        order=st.integers(0, 3),
    ),
    max_size=10,
    unique_by=lambda each: each.name,
)
counts = st.none() | st.integers(1, 4)


@settings(max_examples=60, deadline=None)
@given(candidates, counts, counts, counts, st.booleans())
def test_plan_keeps_the_last_verified_one_and_all_that_is_not_verified(found, last, every, best, greater):
    rules = Rules(last=last, every=every, best=best, greater_is_better=greater)
    decisions = plan_retention(found, rules)
    assert [each.name for each in decisions] == [each.name for each in found]
    for series in {each.series for each in found}:
        ours = [each for each in decisions if each.series == series]
        good = [e.step for e in ours if e.state == "verified" and e.step is not None]
        for each in ours:
            one = each
            if each.stays:
                continue
            assert one.state == "verified"
            assert not one.pinned
            assert one.step < max(good)
            assert every is None or one.step % every
            assert last is None or sum(step >= one.step for step in good) > last
    if last is every is best is None:
        assert all(each.stays for each in decisions)


def come_true(one, found, rules):
    """Let happen what a checkpoint goes with or when; return the plan's inputs then."""
    more, found = [], [*found]
    for said in one.goes_when.split(", "):
        if with_last := re.fullmatch(r"with --keep-last (\d+)( alone)?", said):
            rules = Rules(last=int(with_last[1]))
        elif said.startswith("with --unverified"):
            rules = replace(rules, unverified=(one.name,))
        elif named := re.fullmatch(r"when ([a-h]{6}) is verified", said):
            found = [replace(e, state="verified", order=9) if e.name == named[1] else e for e in found]
        elif said not in ("when this ends", "when it is verified", "and superseded"):
            count = re.fullmatch(r"when (?:(\d+) later ones are|a .*) verified|when a step after \d+ is verified", said)
            more = [
                replace(one, name=f"n{n}", step=90 + n, state="verified", order=9) for n in range(int(count[1] or 1))
            ]
    return [*found, *more], rules


@settings(max_examples=300, deadline=None)
@given(candidates, counts, counts, counts)
def test_what_a_checkpoint_goes_with_or_when_is_true(found, last, every, best):
    rules = Rules(last=last, every=every, best=best)
    for one in plan_retention(found, rules):
        assert bool(one.goes_when) == (one.stays and (one.step is not None or bool(one.pinned)))
        if one.stays and one.step is not None and not one.pinned and one.state not in ("complete", "changing"):
            then = plan_retention(*come_true(one, found, rules))
            assert not next(each.stays for each in then if each.name == one.name), one


def names_that_stay(rules, *rows):
    found = [RunCheckpoint(name=f"step-{row[0]}", series="step-*", step=row[0], state=row[1], **row[2]) for row in rows]
    return [each.step for each in plan_retention(found, rules) if each.stays]


def test_rules_add_up():
    rows = [(step, "verified", {"metric": loss}) for step, loss in ((1, 0.1), (2, 0.5), (3, 0.2), (4, 0.4), (5, 0.9))]
    assert names_that_stay(Rules(last=1), *rows) == [5]
    assert names_that_stay(Rules(last=2, every=3), *rows) == [3, 4, 5]
    assert names_that_stay(Rules(best=2), *rows) == [1, 3, 5]
    assert names_that_stay(Rules(best=1, greater_is_better=True), *rows) == [5]
    assert names_that_stay(Rules(best=2, greater_is_better=True), *rows) == [2, 5]


def test_last_counts_what_is_verified_and_a_bad_one_goes_only_by_its_name():
    rows = [(1, "verified", {}), (2, "bad", {}), (3, "verified", {}), (4, "incomplete", {})]
    assert names_that_stay(Rules(last=1), *rows) == [2, 3, 4]
    later = [(1, "verified", {}), (2, "verified", {}), (3, "bad", {}), (4, "verified", {})]
    assert names_that_stay(Rules(last=2), *later) == [2, 3, 4]
    assert names_that_stay(Rules(unverified=("step-2", "step-4")), *rows) == [1, 3, 4]


@pytest.mark.parametrize(
    ("name", "is_directory", "series", "step"),
    [
        ("checkpoint-500", True, "checkpoint-*", 500),
        ("checkpoint_7", True, "checkpoint_*", 7),
        ("step-1000", True, "step-*", 1000),
        ("epoch_3", True, "epoch_*", 3),
        ("global_step_40", True, "global_step_*", 40),
        ("global_step40", True, "global_step*", 40),
        ("iter_0000500", True, "iter_*", 500),
        ("epoch=1-step=20-val_loss=0.25.ckpt", False, "epoch=*-step=*-val_loss=*.ckpt", 20),
        ("epoch=03.ckpt", True, "epoch=*.ckpt", 3),
        ("last.ckpt", False, "last.ckpt", None),
        ("flux_000000500.safetensors", False, "flux_*.safetensors", 500),
        ("wan_000000500_high_noise.safetensors", False, "wan_*.safetensors", 500),
        ("full_000000500", True, "full_*", 500),
    ],
)
def test_names_of_trainers_tell_the_step(name, is_directory, series, step):
    place = parse_name(name, is_directory=is_directory)
    assert (place.series, place.step) == (series, step)


@pytest.mark.parametrize(
    "name",
    ["checkpoint-", "checkpoint-5.bak", "Checkpoint-5", "checkpoint-٣", "step-1e3", "tmp-checkpoint-5", "samples",
     ".checkpoint-5", "checkpoint-5 ", "flux_00000500.safetensors", ".x.ckpt", "checkpoint-" + "9" * 40],
)  # fmt: skip
def test_other_names_are_not_known(name):
    assert parse_name(name, is_directory=True) is None


def test_file_is_no_directory_of_a_step():
    assert parse_name("checkpoint-500", is_directory=False) is None
    assert parse_name("flux_000000500.safetensors", is_directory=True) is None


def test_metric_is_read_of_a_name():
    assert metric_in_name("epoch=1-step=20-val_loss=0.25.ckpt", "val_loss") == 0.25
    assert metric_in_name("epoch=1-step=20-val/loss=-2e-05-v1.ckpt", "val/loss") == -2e-05
    assert metric_in_name("epoch=1-step=20.ckpt", "val_loss") is None


def test_record_comes_back():
    entries = {"step-1": Entry(stamp="a", ok=False, level="data", order=3, codes=("x",), sent=("hub",))}
    assert parse_record(build_record(entries)) == entries


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[]", b"null", b'{"version": 2, "checkpoints": {}}', b'{"version": 1, "checkpoints": []}',
     b'{"version": 1, "checkpoints": {"step-1": null, "step-2": {"stamp": 1}}}', b"\xff", b"[" * 100_000],
)  # fmt: skip
def test_damaged_record_means_that_nothing_is_verified(content):
    assert parse_record(content) == {}


def test_record_of_another_version_counts_for_nothing():
    content = build_record({"step-1": Entry(stamp="a", ok=True, level="data", order=1)})
    assert content.count(b'"version": 2') == 1
    assert parse_record(content.replace(b'"version": 2', b'"version": 3')) == {}


def test_damaged_entry_counts_for_nothing():
    entry = Entry(stamp="a", ok=True, level="data", order=1)
    document = json.loads(build_record({"step-1": entry, "step-2": entry}))
    document["checkpoints"]["step-1"]["ok"] = "yes"
    assert parse_record(json.dumps(document).encode()) == {"step-2": entry}
