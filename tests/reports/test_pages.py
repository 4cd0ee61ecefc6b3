"""Pages without a browser: what stands in them, what they may say, and where they are written."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings, strategies as st
from reports import results
from reports.results import FINDINGS, HOSTILE, whole
from samples import examples, shard_model, write_model

from ckpt_tools.checkpoint.entries import ByteSpan, Checkpoint, Chunk, Finding
from ckpt_tools.checkpoint.layout import Box, Mesh
from ckpt_tools.checkpoint.summarise import summarise
from ckpt_tools.checks.diff import Change
from ckpt_tools.checks.stats import Stats, TensorStats
from ckpt_tools.checks.verify import Extent, Unchecked
from ckpt_tools.cli import main
from ckpt_tools.cli.diff import diff_page
from ckpt_tools.cli.estimate import estimate_page
from ckpt_tools.cli.inspection import build_page
from ckpt_tools.cli.output import report_to
from ckpt_tools.cli.preflight import preflight_page
from ckpt_tools.cli.runs import _print as print_tended, tending_page
from ckpt_tools.cli.smoke import smoke_page
from ckpt_tools.cli.stats import stats_page
from ckpt_tools.cli.verify import verify_page
from ckpt_tools.cli.views.layouts import LayoutData, encode_runs
from ckpt_tools.cli.views.page import MAX_FINDINGS, MAX_POINTS, Bars, Depth, PageTable, by_layer, heats
from ckpt_tools.cli.views.write import MARK, build_html
from ckpt_tools.estimate import Estimate
from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.report import Proposal
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.text import escape_message
from ckpt_tools.transfer.statistics import Moments
from ckpt_tools.transfer.value_counts import Counts

_LOADING = {"src", "srcset", "action", "background", "data", "poster", "formaction"}


class _Reader(HTMLParser):
    """What a browser makes of a page: tags, attributes, texts, what scripts hold."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.policy = ""
        self.scripts: list[str] = []
        self._in = ""
        self.feed(content.decode())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name == "href"]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self._in = tag
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self._in == "script" and self.scripts:
            self.scripts[-1] += data
        self.text += data

    def handle_endtag(self, tag):
        self._in = ""


@pytest.fixture(scope="module")
def read() -> dict[str, _Reader]:
    return {name: _Reader(build_html(page)) for name, page in results.pages().items()}


@pytest.mark.parametrize("name", list(results.pages()))
def test_pages_keep_hostile_names_as_text_and_load_nothing(read, name):
    page = read[name]
    assert not page.tags & {"img", "svg", "b", "link", "iframe", "object", "base", "form"} - {"svg"}
    assert "svg" not in page.tags
    assert not {each for each in page.attributes if each.startswith("on")} | (page.attributes & _LOADING)
    assert all(re.fullmatch(r"#(finding|place|depth)-[\d-]+", link) for link in page.links)
    assert not re.search("[\0\r\u202e\u2028\u2029\ud800]", page.text)
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert page.policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )
    assert len(page.scripts) == (1 if name in ("verify", "estimate", "lines", "unfinished", "failed") else 2)


@pytest.mark.parametrize("name", ["verify", "stats", "smoke", "preflight", "lines"])
def test_pages_say_every_finding_with_where_and_fix(read, name):
    for finding in results.FINDINGS:
        assert all(part in read[name].text for part in (finding.code, finding.where, finding.what, finding.hint))


def test_text_and_page_name_every_rule_that_keeps_a_checkpoint(capsys):
    pruned = results.pruned()
    print_tended(pruned, OutputOptions())
    lines = capsys.readouterr().out.splitlines()
    parts = [part for section in tending_page(pruned, "watch").sections for part in section.parts]
    rows = {row[0]: row[5] for row in next(part for part in parts if isinstance(part, PageTable)).rows}
    kept = [each for each in pruned.checkpoints if len(each.kept_by) > 1]
    assert kept
    for each in kept:
        assert all(rows[each.name].count(rule) == 1 for rule in each.kept_by)
        assert any(escape_message(each.name) in line and rows[each.name] in line for line in lines)


def test_data_holds_names_as_they_may_be_shown(read):
    def texts(data):
        if isinstance(data, str):
            yield data
        for each in data if isinstance(data, list) else data.values() if isinstance(data, dict) else ():
            yield from texts(each)

    found = list(texts(json.loads(read["inspect"].scripts[0])))
    assert {"nul\\x00byte", "\\ud800 alone"} <= set(found)
    assert all(text.isprintable() and len(text) < 2000 for text in found)


def test_same_input_gives_the_same_bytes():
    first, second = ([build_html(page) for page in results.pages().values()] for _ in range(2))
    assert first == second


def test_shell_is_small_and_names_no_host():
    content = build_html(results.pages()["unfinished"]).decode()
    assert len(content) < 60_000
    assert "://" not in content


@settings(max_examples=examples(30))
@given(st.lists(st.integers(-3, 3) | st.integers()))
def test_runs_expand_to_the_numbers(numbers):
    runs = encode_runs(numbers)
    expanded = [
        runs[i] + k * runs[i + 1] for i in range(0, len(runs), 3) for k in range(runs[i + 2])
    ]  # as report.js does
    assert expanded == numbers


def test_many_ranks_and_tensors_stay_little_data():
    page = build_page(results.sharded("dp_shard=256,tp=4", results.model(num_layers=150)))
    assert len(build_html(page)) < 60_000 + 120 * 600  # 611 tensors on 1024 ranks, 600,000 chunks


def _pattern(*chunks: tuple[int | None, tuple[int, int], tuple[int, int]]) -> dict:
    stored = tuple(
        Chunk(
            box=Box(offsets, sizes),
            span=ByteSpan(file="x.bin" if rank is None else f"__{rank}_0.distcp", offset=0, nbytes=4),
        )
        for rank, offsets, sizes in chunks
    )
    tensor = replace(whole("w", 4, 4), chunks=stored)
    layout = LayoutData(summarise(Checkpoint(root="r", format="dcp", tensors=(tensor,))), "stored")
    assert layout.add(tensor) == 0
    return layout.to_json()["patterns"][0]


def test_patterns_show_holes_copies_and_files_without_ranks():
    top, low, left = ((0, 0), (2, 4)), ((2, 0), (2, 4)), ((2, 0), (2, 2))
    assert _pattern((0, *top), (1, *low))["ranks"] == encode_runs([0, 1])
    assert _pattern((0, *top), (7, *left), (9, (2, 2), (1, 2)))["boxes"][2] == (9, [2, 2], [1, 2])
    assert _pattern((0, *top), (1, *low), (5, *low))["copies"] == {1: [5]}
    assert _pattern((0, (0, 0), (1, 4)), (4, (3, 0), (1, 4)))["ranks"] == encode_runs([0, -1, 4])
    assert "boxes" in _pattern((0, (0, 0), (9, 4)))  # outside of the tensor
    assert _pattern((None, *top), (1, *low))["ranks"] == encode_runs([-2, 1])
    halves = [(0, (0, 0), (2, 2)), (1, (0, 2), (2, 2)), (2, (2, 0), (2, 2))]
    assert _pattern(*halves)["ranks"] == encode_runs([0, 1, 2, -1])


def test_tree_holds_every_byte_and_a_tensor_with_the_name_of_a_module():
    names = ("a.b", "a.b.c", "a.b.c.d", "x..y", ".", "", *(f"deep.{'m.' * 40}{i}" for i in range(2)), *HOSTILE)
    summary = summarise(Checkpoint(root="r", format="hf", tensors=tuple(whole(name, 2, 3) for name in names)))

    def leaves(node) -> int:
        return sum(map(leaves, node[2])) if isinstance(node[2], list) else 1

    tree = build_page(summary).data["tree"]
    assert (tree[1], tree[3], leaves(tree)) == (24 * len(names), len(names), len(names))


def test_green_is_only_what_left_nothing_unchecked():
    clean = results.verification(findings=())
    warning = Finding.warning("odd", "x", "y")
    assert verify_page(clean, "x").mood == "good"
    assert verify_page(replace(clean, unchecked=(Unchecked(what="blobs"),)), "x").mood == "partly"
    assert verify_page(replace(clean, level="structure"), "x").mood == "partly"
    assert verify_page(replace(clean, findings=(warning,)), "x").mood == "partly"
    assert verify_page(results.verification(), "x").mood == "bad"
    equal = results.difference(only_in_a=(), only_in_b=(), changed=(), notes=())
    assert diff_page(equal).mood == "good"
    assert diff_page(replace(equal, keys_only=True)).mood == "partly"
    assert diff_page(replace(equal, terms=("--include x",))).mood == "partly"
    assert diff_page(replace(equal, notes=("n",))).mood == "partly"
    assert diff_page(results.difference()).mood is None
    assert [estimate_page(results.estimate(fits)).mood for fits in (True, False, None)] == ["partly", "bad", "unknown"]
    assert estimate_page(results.estimate(None, gpu_memory=None)).mood is None
    assert smoke_page(results.smoke()).mood == "good"
    assert smoke_page(results.smoke(notes=("half of it",))).mood == "partly"
    assert smoke_page(results.smoke(findings=results.FINDINGS)).mood == "bad"


def test_preflight_goes_only_as_far_as_it_was_checked():
    checks = results.preflight().checks
    unread = replace(checks[0], ok=None), *checks[1:]
    skipped = *checks[:-1], replace(checks[-1], ok=None)
    found = {
        "GO. ok:": results.preflight(),
        "GO (not checked: smoke). ok:": results.preflight(checks=skipped),
        "GO (not checked: listed below). ok": results.preflight(not_checked=("the schedule",)),
        "NOT CHECKED. NOT CHECKED: the config: odd": results.preflight(checks=unread, not_checked=("the config: odd",)),
        "NO-GO. NOT ok: 11 errors": results.preflight(findings=results.FINDINGS),
    }
    pages = {words: preflight_page(report) for words, report in found.items()}
    assert [page.verdict.startswith(words) for words, page in pages.items()] == [True] * 5
    assert [page.mood for page in pages.values()] == ["good", "partly", "partly", "unknown", "bad"]


def test_verify_page_shows_where_and_counts_what_it_leaves_out():
    many = tuple(Finding.error("bad-item", "f", f"number {i}") for i in range(MAX_FINDINGS + 7))
    page = _Reader(build_html(verify_page(results.verification(findings=many), "x")))
    assert "7 more findings are not on this page" in page.text
    where = next(s for s in verify_page(results.verification(), "x").sections if s.title == "Tensors with errors: 1")
    assert [(name, [c and c.text for c in cells]) for name, cells in where.parts[0].rows] == [("model.layers.3", ["1"])]


def test_smoke_page_draws_what_has_no_error_apart():
    page = smoke_page(results.smoke(grad_errors={"model.layers.0.up": 0.0, "model.layers.1.up": 1e-7, "head": 0.0}))
    chart, table = next(s for s in page.sections if s.title.startswith("Gradients")).parts
    assert chart.to_json({})["rows"] == [[0, 0, 0.0], [0, 1, 1e-7]]  # the script marks 0 in its own lane
    assert [row[0] for row in table.rows] == ["model.layers.1.up", "model.layers.0.up", "head"]


def test_estimate_page_draws_a_step_below_the_device_line():
    def columns(page):
        found = [s for s in page.sections if s.title == "One training step"]
        return [part for part in found[0].parts if isinstance(part, Bars)] if found else []

    page = estimate_page(results.estimate(True, False))
    assert [part.groups for part in columns(page)] == [[("forward", 6), ("backward", 6), ("step", 1)]]
    assert columns(page)[0].limit == 80 * 10**9
    first = results.case(True)
    all_of = first.per_rank.moments
    kept = (*all_of[:2], *all_of[4:8], *all_of[-1:])  # without 2 and 3
    cut = replace(first, formula=replace(first.per_rank, moments=kept))
    bars = columns(estimate_page(replace(results.estimate(True), cases=(cut,))))[0]
    assert [bar.total for bar in bars.bars if not sum(bar.parts)] == ["2 blocks alike, not drawn"]
    assert "⋯" in bars.caption
    assert columns(estimate_page(results.estimate(True, gpu_memory=10**13)))[0].limit is None
    assert len(columns(estimate_page(results.estimate(*[True] * 6)))) == 1


def test_verify_page_shows_whose_files_are_damaged_on_the_mesh():
    def drawn(**changes):
        page = verify_page(results.verification(**changes), "x")
        return next((s for s in page.sections if "with errors" in s.title and "Tensors" not in s.title), None)

    section = drawn()
    ranks, table = section.parts
    assert section.title == "Ranks with errors: 1 of 40"
    assert [(name, [cell and cell.text for cell in cells]) for name, cells in ranks.rows] == [
        ("0–15", [""] * 16),
        ("16–31", [""] * 16),
        ("32–47", ["", "", "", "", "", "1", "", "", *[None] * 8]),
    ]
    assert {row[1:] for row in table.rows} == {("37", "1", "bad-item 1"), ("", "1", "damaged-data 1")}
    on_mesh = drawn(mesh=Mesh((("dp_shard", 20), ("tp", 2)))).parts[0]
    assert (on_mesh.columns, on_mesh.rows[-2][0]) == (["tp 0", "tp 1"], "36–37")
    many = tuple(f"__{rank}_0.distcp" for rank in range(1000))
    lost = tuple(replace(finding, file=many[999]) for finding in FINDINGS)
    assert [name for name, _ in drawn(findings=lost, files=many).parts[0].rows] == ["992–1007"]
    hub = tuple(replace(finding, file="model-1.safetensors") for finding in FINDINGS)
    assert drawn(findings=hub, files=("model-1.safetensors", "model-2.safetensors")).title == "Files with errors: 1"
    assert drawn(findings=FINDINGS) is None


def test_verify_page_of_a_real_step_with_lost_and_damaged_files(tmp_path, capsys):
    run, page = shard_model(tmp_path), tmp_path / "page.html"
    files = sorted(run.glob("__*.distcp"))
    files[0].unlink()
    content = bytearray(files[1].read_bytes())
    content[len(content) // 2] ^= 1
    files[1].write_bytes(content)
    code, out, _ = _html(capsys, "verify", run, "--json", "--html", page)
    text = _Reader(page.read_bytes()).text
    assert code == 3
    found = {finding["file"] for finding in json.loads(out)["findings"] if finding["severity"] == "error"}
    assert {files[0].name, files[1].name} <= found
    assert f"Ranks with errors: 2 of {len(files)}" in text


# What leads: the worst finding, marks in pictures, what is drawn over depth


def _depths(page: _Reader) -> list[dict]:
    return json.loads(page.scripts[0])["depths"] if len(page.scripts) > 1 else []


@pytest.mark.parametrize("name", list(results.pages()))
def test_every_link_leads_to_a_place_of_the_page(read, name):
    page = read[name]
    assert len(set(page.ids)) == len(page.ids)
    pins = {f"depth-{i}-{pin[2]}" for i, depth in enumerate(_depths(page)) for pin in depth["pins"]}
    assert {link[1:] for link in page.links} <= {*page.ids, *pins}
    assert {f"finding-{pin.split('-')[2]}" for pin in pins} <= set(page.ids)


def test_the_worst_finding_stands_above_everything_but_the_verdict(read):
    for name in ("verify", "stats", "smoke", "preflight", "watch"):
        text = read[name].text
        worst = text.index(escape_message(FINDINGS[0].what))
        assert worst < text.index("more finding")
    info, error = Finding.info("odd", "x", "only told"), Finding.error("bad", "y", "what is wrong")
    text = _Reader(build_html(preflight_page(results.preflight(findings=(info, error))))).text
    assert text.index("what is wrong") < text.index("1 more finding") < text.index("only told")
    apart = preflight_page(results.preflight(findings=(info,), smoke=results.smoke(findings=(error,))))
    assert [found for _, found in apart.groups] == [[error], [info]]  # whatever section comes first


def test_findings_are_marked_where_they_are_and_lead_back(read):
    verify = read["verify"]
    assert "in the picture: ranks 32–47, +5" in verify.text
    assert "in the picture: layer model.layers.3, mlp.up.weight" in verify.text
    odd = Finding.warning("rms-outlier", "model.safetensors", "tensor 'layers.1.up': its rms is odd")
    named = Finding.error("bad", HOSTILE[0], "also here")
    page = _Reader(build_html(stats_page(replace(results.stats(), findings=(odd, named)), "x")))
    assert _depths(page)[0]["pins"] == [[0, 1, 2, odd.what]]
    assert "in the picture: layer 1, up" in page.text


_NAMES = st.sampled_from([*(f"layers.{i}.{k}" for i in range(3) for k in ("w", "experts.1.w", "")), "x.9", *HOSTILE])


@settings(max_examples=examples(40))
@given(st.dictionaries(_NAMES, st.floats() | st.sampled_from(["equal", "not read"]), max_size=12))
def test_chart_tells_what_has_no_number_from_small_numbers_and_from_what_is_absent(found):
    chart = Depth("c", {"m": found})
    drawn = chart.to_json({})
    places = {(drawn["kinds"][kind], layer): value for kind, layer, value in drawn["rows"]}
    assert places.keys() == set(chart.places().values())  # what is absent has no row
    for fqn, place in chart.places().items():
        value = found[fqn]
        if isinstance(value, str):
            assert places[place] == value
        elif not math.isfinite(value):
            assert places[place] == "NaN or Inf"
        else:
            assert places[place] == pytest.approx(value, rel=1e-2)
    json.dumps(drawn, allow_nan=False)


def _one(fqn: str, **changes) -> TensorStats:
    moments = Moments(num_elems=4, min=-1.0, max=2.0, mean=0.5, std=1.0, histogram=())
    given = {"moments": moments, "counts": Counts(num_elems=4)} | changes
    return TensorStats(fqn=fqn, dtype="F32", shape=(4,), **given)


@pytest.mark.parametrize(
    "names", [(), ("embed",), ("layers.0.w",), tuple(f"l.{i}.{k}" for i in range(1000) for k in "abcdefghi")]
)
def test_stats_pages_of_no_one_and_a_thousand_layers(names):
    page = stats_page(Stats(tensors=tuple(map(_one, names)), findings=()), "x")
    charts = [part for part in page.parts() if isinstance(part, Depth)]
    assert len(charts) == any("." in name for name in names)
    assert len(build_html(page)) < 120_000 + 60 * len(names)


def test_chart_of_too_many_tensors_keeps_layers_with_findings_and_says_what_it_leaves_out():
    numbers = {f"l.{i}.experts.{e}.w": 1.0 for i in range(300) for e in range(256)}
    odd = Finding.warning("odd", "l.7.experts.3.w", "odd")
    drawn = Depth("c", {"m": numbers}, [odd]).to_json({odd: 1})
    layers = {row[1] for row in drawn["rows"]}
    assert 7 in layers
    assert len(drawn["rows"]) < 1.1 * MAX_POINTS
    assert drawn["left_out"] == [300 - len(layers), 0]


def test_nan_alone_is_no_number_and_unread_is_not_clean():
    nan = _one("layers.0.w", counts=Counts(num_elems=4, num_nan=4))
    drawn = next(p for p in stats_page(Stats(tensors=(nan,), findings=()), "x").parts() if isinstance(p, Depth))
    assert {row[2] for row in drawn.to_json({})["rows"]} == {"NaN or Inf"}
    unread = Extent(file="part/__3_0.distcp", nbytes=9, why="only headers were read")
    page = verify_page(results.verification(findings=(), not_read=(unread,)), "x")
    cells = [cell for _, row in page.sections[0].parts[0].rows for cell in row if cell is not None]
    assert [cell.text for cell in cells if cell.is_unread] == ["not read"]
    assert (page.mood, page.verdict) == ("partly", "ok at level data; not read: 1 file")
    assert 'class="unread"' in build_html(page).decode()


def test_equal_absent_and_unread_tensors_of_a_diff_are_not_alike():
    given = results.difference(same=("l.0.norm", "l.3.norm"))
    for keys_only, word in ((False, "equal"), (True, "not read")):
        page = diff_page(replace(given, keys_only=keys_only))
        rows = next(part for part in page.parts() if isinstance(part, Depth)).to_json({})["rows"]
        assert [row[1] for row in rows if row[2] == word] == [0, 3]


def test_layers_that_are_alike_are_one_row_and_outliers_are_marked():
    numbers = {f"model.layers.{i}.{kind}": 2 for i in range(36) for kind in ("up", "down")}
    (table,) = by_layer(numbers, caption="c", legend="")
    assert [(name, [cell.text for cell in row]) for name, row in table.rows] == [("model.layers.0-35 × 36", ["2", "2"])]
    (table,) = by_layer(numbers | {"model.layers.9.up": 900}, caption="c", legend="")
    assert [name for name, _ in table.rows] == ["model.layers.0-8 × 9", "model.layers.9", "model.layers.10-35 × 26"]
    assert [row[0].text for _, row in table.rows] == ["2", "▲ 900", "2"]
    assert table.rows[0][1][0].heat == table.rows[1][1][0].heat == 1.0  # the outlier leaves the others their color


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 10**6)), st.integers(0, 10**7))
def test_heat_grows_with_the_number_and_stays_in_bounds(numbers, number):
    heat_of = heats(numbers)
    assert 0 <= heat_of(number)[0] <= heat_of(number + 1)[0] <= 1
    assert not any(heat_of(each)[1] for each in sorted(numbers)[: -(-3 * len(numbers) // 4)])


def test_estimate_recommends_one_and_says_why():
    def fitting(**fits: bool) -> Estimate:
        cases = [
            replace(
                results.case(good), case=Case(strategy=name.removesuffix("_ac"), activation_checkpointing="_ac" in name)
            )
            for name, good in fits.items()
        ]
        return Estimate(model="m", params=7, cases=tuple(cases), gpu_memory=80 * 10**9)

    held = "on dp_shard=8: peak 60.0 GiB and margin 1.00 GiB of 80 GB (74.5 GiB)"
    least = "the least recomputation that fits"
    assert fitting(full_shard=True).recommendation == f"full_shard {held}; --strategy all compares the others"
    some = fitting(no_shard=False, full_shard_ac=True, full_shard=True, shard_grad_op_ac=True)
    assert some.recommendation == f"full_shard {held}; {least}"
    some = fitting(full_shard_ac=True, shard_grad_op_ac=True, full_shard=False)
    some_ac = f"shard_grad_op with activation checkpointing {held}"
    assert some.recommendation == f"{some_ac}; {least}, then the least gathering of parameters"
    assert fitting(full_shard=True, no_shard=False).recommendation == f"full_shard {held}; the only one that fits"
    assert estimate_page(some).verdict == f"Recommended: {some.recommendation}"
    assert estimate_page(some).sections[0].parts[0].bars[0].name.startswith("recommended: shard_grad_op")
    alone = estimate_page(fitting(full_shard=True))
    assert alone.verdict.startswith("Tried: full_shard on dp_shard=8")
    assert alone.sections[0].parts[0].bars[0].name == "tried: full_shard on dp_shard=8"
    none = fitting(full_shard=False)
    assert none.recommendation is None
    change = Proposal(what="--lora", estimate=results.case(True))
    none = replace(none, proposals=(change,))
    assert estimate_page(none).verdict == f"does NOT fit in 80 GB (74.5 GiB); with --lora it would: full_shard {held}"
    assert estimate_page(none).sections[0].title == "What would fit"


def test_counts_have_separators_and_numbers_few_powers_of_ten():
    changed = tuple(Change(fqn=f"l.{i}.up", what="differs", relative=1234.5) for i in range(12345))
    page = diff_page(results.difference(changed=changed, num_equal=23456))
    assert page.verdict.startswith("12,345 differ, 23,456 equal")
    assert next(part for part in page.parts() if isinstance(part, PageTable)).rows[0][1] == "1,230"


def test_inspect_page_leads_with_missing_files():
    stored = Checkpoint(root="r", format="dcp", tensors=(whole("w", 4, 4, file="__5_0.distcp"),), files={})
    page = build_page(summarise(stored, path="x"))
    text = _Reader(build_html(page)).text
    assert page.mood == "unknown"
    assert text.index("NOT read: 1 of 1 files missing") < text.index("the file is missing") < text.index("Modules")
    assert page.data["missing"] == [(0, 5)]


# On the command line


def _html(capsys, *argv: object) -> tuple[int, str, str]:
    code = main([str(each) for each in argv])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_commands_write_reports_beside_what_they_print(tmp_path, capsys):
    run, page = shard_model(tmp_path), tmp_path / "page.html"
    model = tmp_path / "model"
    size = ("--params", "7B", "--layers", "32", "--hidden", "4096", "--world-size", "8")
    calls = (
        ("inspect", run),
        ("inspect", model, "--mesh", "dp_shard=3"),
        ("verify", run),
        ("diff", model, run),
        ("stats", model, "--against", run),
        ("estimate", *size, "--gpu-memory", "80GB"),
    )
    for argv in calls:
        plain = _html(capsys, *argv)
        code, out, err = _html(capsys, *argv, "--html", page)
        assert (code, out) == plain[:2]
        assert f"report: {page}" in err
        assert page.read_bytes().startswith(MARK.encode())
        assert f"ckpt {argv[0]}" in _Reader(page.read_bytes()).text
    code, out, err = _html(capsys, "verify", run, "--json", "--html", page)
    assert (code, err) == (0, "")
    assert json.loads(out)["ok"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".ckpt")]


def test_overlay_page_has_the_stored_layout_too(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert _html(capsys, "inspect", shard_model(tmp_path), "--mesh", "dp_shard=3", "--html", page)[0] == 0
    text = _Reader(page.read_bytes()).text
    assert "Mesh (stored)" in text
    assert "Mesh (planned layout, nothing written)" in text


def test_report_replaces_nothing_but_reports(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()
    code, _, err = _html(capsys, "inspect", model, "--html", model / "model.safetensors")
    assert (code, (model / "model.safetensors").read_bytes() == weights) == (5, True)
    assert "--html only replaces reports" in err
    assert _html(capsys, "inspect", model, "--html", model)[0] == 5
    assert _html(capsys, "inspect", model, "--html", tmp_path / "no" / "page.html")[0] == 1


def test_failed_run_leaves_no_earlier_verdict(tmp_path, capsys):
    run, page = shard_model(tmp_path), tmp_path / "page.html"
    assert _html(capsys, "verify", run, "--html", page)[0] == 0
    (run / ".metadata").write_bytes(b"no pickle")
    code, _, err = _html(capsys, "verify", run, "--html", page)
    text = _Reader(page.read_bytes()).text
    assert code == 4
    assert "The command failed: there is no result." in text
    assert escape_message(err.splitlines()[0].removeprefix("error: ")) in text


def test_report_tells_of_this_run_from_its_first_moment(tmp_path, monkeypatch):
    page, output = tmp_path / "page.html", OutputOptions(quiet=True)
    with report_to(page, "verify", "x", output) as report:
        assert "Not finished" in page.read_text()  # what kill -9 leaves
        report(lambda: results.pages()["stats"])
    done = page.read_bytes()
    with pytest.raises(OSError, match="gone"), report_to(page, "verify", "x", output) as report:  # noqa: PT012
        report(lambda: results.pages()["stats"])
        raise OSError("stdout is gone")
    assert page.read_bytes() == done
    with pytest.raises(KeyboardInterrupt), report_to(page, "verify", "x", output):
        raise KeyboardInterrupt
    assert "there is no result" in page.read_text()
    monkeypatch.setenv("RANK", "1")
    with report_to(page, "smoke", "x", output) as report:
        report(lambda: pytest.fail("made for nobody"))
