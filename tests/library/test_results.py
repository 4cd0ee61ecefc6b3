"""What results are in Python: short, safe to show, true or false as the command ends, and the command's document."""

from __future__ import annotations

import copy
import html
import json
import pickle
import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reports import results
from reports.results import FINDINGS, HOSTILE

import ckpt_tools
from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.identity import Identity, StepCount
from ckpt_tools.checkpoint.summarise import summarise
from ckpt_tools.checks.diff import Change
from ckpt_tools.checks.step import join
from ckpt_tools.cli.diff import diff_page
from ckpt_tools.cli.estimate import estimate_page
from ckpt_tools.cli.inspection import build_page
from ckpt_tools.cli.preflight import preflight_page
from ckpt_tools.cli.runs import tending_page
from ckpt_tools.cli.smoke import smoke_page
from ckpt_tools.cli.stats import stats_page
from ckpt_tools.cli.verify import verify_page
from ckpt_tools.cli.views.page import FactList, PageTable
from ckpt_tools.results import CheckedResult, Result
from ckpt_tools.text import escape_message


def _full_identity() -> Identity:
    """An identity with something in every field: more than are shown."""
    given: dict[str, Any] = {each.name: HOSTILE for each in fields(Identity)}
    given |= {each.name: 1 for each in fields(Identity) if "int" in str(each.type)}
    words = {"format": "hf", "resumable": "no", "whole": "part", "quantisation": HOSTILE[0], "names": HOSTILE[1]}
    given |= words | {
        "steps": (StepCount(step=1, files=HOSTILE),),
        "trainer": "verl",
        "dtypes": {"F32": 1},
        "mesh": "m",
    }
    return Identity(**given | {"architecture": HOSTILE[2]})


MADE: dict[str, Result] = {
    "checkpoint": results.model(500),
    "summary": summarise(results.model(500), path=HOSTILE[0]),
    "identity": Identity(format="hf", architecture=HOSTILE[0], evidence=HOSTILE, components=HOSTILE),
    "full identity": _full_identity(),
    "verification": results.verification(),
    "difference": results.difference(),
    "stats": results.stats(),
    "estimate": results.estimate(True, False, None),
    "smoke": results.smoke(findings=FINDINGS, stacks={0: HOSTILE[0]}),
    "preflight": results.preflight(findings=FINDINGS, smoke=results.smoke(), notes=HOSTILE),
    "pruned": results.pruned(),
}


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert all(name == "style" for name, _ in attrs)


@pytest.mark.parametrize("name", MADE)
def test_text_and_table_of_a_result_are_short_and_harmless(name: str) -> None:
    text, table = repr(MADE[name]), MADE[name]._repr_html_()  # type: ignore[operator]
    assert len(text.splitlines()) <= 20
    assert len(text) < 3000
    assert all(line.isprintable() for line in text.split("\n"))
    assert _Tags(table).tags <= {"div", "b", "br", "table", "caption", "tr", "th", "td"}
    assert len(table) < 9000
    assert table.count("<tr>") <= 21


PAGES = {
    "summary": build_page,
    "verification": verify_page,
    "difference": diff_page,
    "stats": stats_page,
    "estimate": estimate_page,
    "smoke": smoke_page,
    "preflight": preflight_page,
    "pruned": tending_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_notebook_shows_the_top_of_the_page(name: str) -> None:
    made: Any = MADE[name]
    page, shown = PAGES[name](made), html.unescape(made._repr_html_())
    for text in (page.verdict, *(escape_message(title)[:160] for title in page.titles)):
        assert text in shown
    worst = [found[0].what for _, found in page.groups]
    told = [escape_message(what)[:100] in shown for what in worst]
    assert told == [number < 3 for number in range(len(told))]
    table = next(part for part in page.parts() if isinstance(part, PageTable | FactList) and part.rows)
    assert all(escape_message(cell)[:100] in shown for row in table.rows[:20] for cell in row)
    assert not any(word in shown for word in ("://", "<style", "class="))


def test_notebook_colors_edges_alone_so_that_any_theme_can_be_read() -> None:
    shown = MADE["verification"]._repr_html_() + MADE["pruned"]._repr_html_()  # type: ignore[operator]
    assert "border-left: .35em solid #d13438" in shown
    assert not re.search(r"(?<!-)(color|background)[\w-]*:", shown)


def test_text_of_a_result_says_what_matters() -> None:
    text = repr(replace(results.verification(), findings=(Finding.error("bad-item", "f", "cut short"),), nbytes=2048))
    assert text.splitlines()[0] == "Verification: NOT ok (level data)"
    assert "  findings  error: bad-item: cut short" in text
    assert "  nbytes    2.00 KiB" in text
    assert "40: part/__0_0.distcp, part/__1_0.distcp, part/__2_0.distcp and 37 more" in text


@pytest.mark.parametrize("name", MADE)
def test_document_of_a_result_is_plain_and_versioned(name: str) -> None:
    document = MADE[name].to_dict()
    assert document["schema_version"] == 1
    assert json.loads(json.dumps(document)).keys() == document.keys()


VERDICTS = [
    (results.verification(), False),
    (results.verification(findings=()), True),
    (results.difference(), False),
    (results.difference(only_in_a=(), only_in_b=(), changed=()), True),
    (results.stats(), False),
    (results.estimate(True, False), True),
    (results.estimate(False, None), False),
    (results.estimate(False, gpu_memory=None), True),
    (results.smoke(), True),
    (results.smoke(findings=FINDINGS), False),
    (results.preflight(), True),
    (results.preflight(findings=FINDINGS), False),
    (results.pruned(), False),
    (replace(results.pruned(), findings=()), True),
]


@pytest.mark.parametrize(("result", "is_good"), VERDICTS)
def test_result_with_a_verdict_is_true_or_false(result: CheckedResult, is_good: bool) -> None:
    assert bool(result) is is_good
    assert result.ok is is_good


def test_results_without_a_verdict_are_plain_objects() -> None:
    kinds = [getattr(ckpt_tools, name) for name in ckpt_tools.__all__]
    found = {kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, Result)}
    plain = {name for name in found if not issubclass(getattr(ckpt_tools, name), CheckedResult)}
    assert plain == {"Checkpoint", "Conversion", "Identity", "Summary"}
    assert all(not hasattr(getattr(ckpt_tools, name), "__bool__") for name in plain)


def test_equal_names_alone_are_not_called_equal() -> None:
    same = results.difference(only_in_a=(), only_in_b=(), changed=(), keys_only=True)
    assert repr(same).splitlines()[0] == "Difference: equal (names, shapes and dtypes)"


def test_what_limits_a_comparison_is_part_of_its_result(world: Path) -> None:
    limited = ckpt_tools.diff(world / "model", world / "model-dp8", include="model.**", atol=0.5)
    assert limited.terms == ("--atol 0.5", "--include model.**")
    assert diff_page(limited).mood == "partly"
    names = replace(limited, keys_only=True)
    joined = join({"unet": names, "vae": names}, identities=())
    assert (joined.keys_only, joined.terms) == (True, limited.terms)


def test_conversion_says_what_became_of_the_destination(world: Path, tmp_path: Path) -> None:
    planned = ckpt_tools.gather(world / "model-dp8", tmp_path / "a", dry_run=True)
    part = ckpt_tools.shard(world / "model", tmp_path / "b", mesh=2, part="0/2")
    done = ckpt_tools.gather(world / "model-dp8", tmp_path / "a")
    heads = [repr(each).splitlines()[0] for each in (planned, part, done)]
    assert heads == [
        "Conversion: dry run, nothing written",
        "Conversion: written, not published yet",
        "Conversion: published",
    ]


@pytest.mark.parametrize("name", MADE)
def test_result_can_be_copied_and_sent_to_another_process(name: str) -> None:
    made: Any = MADE[name]
    assert copy.copy(made) == made
    if name not in ("smoke", "preflight"):  # which hold NaN
        assert pickle.loads(pickle.dumps(made)) == made


def test_document_has_no_number_that_json_lacks() -> None:
    odd = results.difference(changed=(Change(fqn="a", what="x", relative=float("inf")),), only_in_a=())
    assert odd.to_dict()["changed"][0]["relative"] is None
    losses = results.smoke().to_dict()["losses"]
    assert losses == [4.0, 3.5, None, 3.0]
    json.dumps([odd.to_dict(), losses], allow_nan=False)
