"""Every page in a real browser: no console error, nothing hostile runs, drill-downs by click and key, accessibility."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from reports import results

from ckpt_tools.checkpoint.entries import Checkpoint
from ckpt_tools.checks.diff import Change
from ckpt_tools.cli.views.page import Depth, PageSection
from ckpt_tools.cli.views.write import build_html

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="apt-get install chromium chromium-driver"),
]
_FLAGS = (
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync",
)  # fmt: skip
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
NAMES = list(results.pages())


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("chromium")
    for flag in (*_FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()
    shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("pages")
    written = {name: directory / f"{name}.html" for name in NAMES}
    for name, page in results.pages().items():
        written[name].write_bytes(build_html(page))
    return written


def _open(browser, file: Path, *, width: int = 1400, scheme: str = "light") -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(file.as_uri())


def _find(browser, selector: str, number: int = 0):
    return browser.find_elements("css selector", selector)[number]


def _press(browser, *keys: str) -> None:
    for key in keys:
        browser.switch_to.active_element.send_keys(key)


@pytest.mark.parametrize("name", NAMES)
def test_page_is_quiet_fits_a_phone_and_runs_nothing_hostile(browser, files, name):
    for width in (1400, 400):
        _open(browser, files[name], width=width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        for button in browser.find_elements("css selector", "summary, .level summary"):
            browser.execute_script("arguments[0].click()", button)
        assert browser.execute_script("return window.hit") is None
        assert not browser.execute_script("return document.querySelectorAll('img, iframe, link').length")
    assert browser.get_log("browser") == []
    if name in ("verify", "stats", "smoke", "preflight"):
        text = browser.execute_script("return document.body.textContent")
        for finding in results.FINDINGS:
            assert all(part in text for part in (finding.code, finding.where, finding.what, finding.hint))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("smoke", "estimate")])  # parts of preflight
def test_page_is_accessible(browser, files, name):
    carrier = importlib.util.find_spec("axe_playwright_python")  # found, never imported: playwright is not installed
    if carrier is None or carrier.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    axe = Path(os.path.dirname(carrier.origin), "axe.min.js").read_text()
    for width, scheme in ((1400, "light"), (400, "dark"))[name not in ("inspect", "verify") :]:
        _open(browser, files[name], width=width, scheme=scheme)
        if name == "inspect":
            _drill(browser)
        browser.execute_script(axe)
        script = "const done = arguments[1]; axe.run({runOnly: arguments[0]}).then(done, e => done(String(e)))"
        found = browser.execute_async_script(script, _RULES)
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []
        # An axe-core that cannot read the style sheet's colours judges no contrast, and finds nothing wrong.
        assert "color-contrast" in {each["id"] for each in found["passes"]}


def _drill(browser) -> str:
    """Open tiles until a tensor is shown; return its heading."""
    for _ in range(8):
        if browser.find_elements("css selector", ".tensor h3"):
            break
        _find(browser, ".tile").send_keys("\n")
    return _find(browser, ".tensor h3").text


def test_modules_open_by_key_and_by_click(browser, files):
    _open(browser, files["inspect"])
    assert _drill(browser).startswith("model.")
    assert browser.switch_to.active_element.tag_name == "h3"
    sides = browser.find_elements("css selector", ".side > div")
    assert [side.text.split(":")[0] for side in sides] == ["stored", "planned"]
    _find(browser, ".tile").send_keys("\ue00c")  # Escape
    assert not browser.find_elements("css selector", ".tensor")
    _find(browser, ".trail button").click()
    assert _find(browser, "nav.trail").text.startswith("everything\n")
    _find(browser, ".level summary").click()
    rows = browser.find_elements("css selector", ".level th button")
    next(row for row in rows if row.text == "hostile").click()
    assert browser.find_elements("css selector", "nav.trail button")
    assert len(browser.find_elements("css selector", ".level th button")) == len(results.HOSTILE)
    for place in range(4):
        _find(browser, ".level th button", place).click()
        assert browser.find_elements("css selector", ".tensor h3")  # a module of one tensor shows that
        if len(browser.find_elements("css selector", ".level th button")) == 1:
            _find(browser, "nav.trail button", -1).click()
    assert browser.execute_script("return window.hit") is None
    assert browser.get_log("browser") == []


def test_maps_zoom_by_header_and_by_key_and_tell_what_they_hold(browser, files):
    _open(browser, files["inspect"], width=500)
    mesh = _find(browser, "[data-draws=mesh]", 1)  # 2 × 64 ranks, planned
    before = len(mesh.find_elements("css selector", "td[tabindex]"))
    assert before < 128
    mesh.find_elements("css selector", "thead button")[0].send_keys("\n")
    active = browser.switch_to.active_element
    assert active.tag_name == "td"
    assert "ranks 0 to 3" in active.get_attribute("aria-label")
    mesh.find_elements("css selector", "thead button")[0].send_keys("\n")
    first = browser.switch_to.active_element.get_attribute("aria-label")
    assert "rank 0," in first
    assert mesh.find_element("css selector", ".readout").text == first
    _press(browser, "\ue014", "\ue015")  # right, down
    there = browser.switch_to.active_element.get_attribute("aria-label")
    assert "rank 65," in there
    assert mesh.find_element("css selector", ".readout").text == there
    mesh.find_elements("css selector", ".trail button")[0].click()
    assert len(mesh.find_elements("css selector", "td[tabindex]")) == before


def test_a_thousand_ranks_stay_responsive(browser, tmp_path):
    file = tmp_path / "big.html"
    file.write_bytes(build_html(results.build_page(results.sharded("dp_shard=256,tp=4", results.model(200)))))
    _open(browser, file)  # the browser waits ten seconds for each step
    _drill(browser)


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_verdict_and_worst_finding_are_seen_without_scrolling(browser, files, width):
    for name in ("verify", "stats", "preflight", "watch", "diff"):
        _open(browser, files[name], width=width)
        browser.execute_script("document.querySelector('h1').textContent = 'a usual name'")  # not 10,000 characters
        for selector in (".verdict", ".worst .what"):
            box = browser.execute_script("return arguments[0].getBoundingClientRect().bottom", _find(browser, selector))
            assert box < 900, (name, selector)


def test_finding_and_its_mark_lead_to_each_other(browser, files, tmp_path):
    changed = [Change(fqn=f"l.{i}.up", what="differs", relative=5.0 if i == 3 else 0.01) for i in range(8)]
    page = results.diff_page(results.difference(changed=tuple(changed)))
    (tmp_path / "diff.html").write_bytes(build_html(page))
    for file, marks in ((files["verify"], "a.pin"), (tmp_path / "diff.html", ".depth a")):
        _open(browser, file, width=800)
        mark = _find(browser, marks)
        finding = mark.get_dom_attribute("href")[1:]
        browser.execute_script("arguments[0].focus()", mark)
        script = "return arguments[0].closest('figure').querySelector('.readout').textContent"
        assert browser.execute_script(script, mark) == mark.get_dom_attribute("data-tip")
        browser.execute_script("document.querySelectorAll('details').forEach(each => { each.open = false; })")
        _press(browser, "\n")
        assert browser.switch_to.active_element.get_attribute("id") == finding
        assert _find(browser, f"#{finding} .what").is_displayed()
        _find(browser, f"#{finding} .back a").send_keys("\n")
        assert browser.switch_to.active_element.get_attribute("id") == mark.get_attribute("id")


def test_chart_goes_by_key_from_layer_to_layer_and_shows_kinds_on_request(browser, files):
    _open(browser, files["diff"])

    def lines() -> int:
        return len(browser.find_elements("css selector", ".depth path.line"))

    def told() -> str:
        return _find(browser, ".depth .readout").text

    before = lines()
    browser.execute_script("document.querySelector('.depth .plot').focus()")
    _press(browser, "\ue014")  # right
    assert told() == "layer 1, up: 0.1"
    _press(browser, "\ue010", "\ue015")  # End, down
    assert told() == "layer 4, down: 0.0001"
    _press(browser, "\ue011", "\ue014", "\ue014", "\ue015")  # Home, right twice, down
    assert told().startswith("layer 2, experts.*.up: 0.5")
    kind = _find(browser, ".depth [aria-label=Lines] button")
    kind.send_keys(" ")
    assert (kind.get_attribute("aria-pressed"), lines()) == ("false", before - 1)
    _find(browser, ".depth [aria-label=Lines] button", -1).send_keys("\n")
    assert lines() == before
    _open(browser, files["stats"])
    measure = _find(browser, ".depth [aria-label=Measures] button", 1)
    assert "unchanged" in _find(browser, ".depth").text
    measure.send_keys("\n")
    assert measure.get_attribute("aria-pressed") == "true"
    assert "unchanged" not in _find(browser, ".depth").text


def test_chart_marks_each_reason_for_no_number_in_its_own_way(browser, tmp_path):
    numbers = {f"l.{i}.w": value for i, value in enumerate((1.0, 0.0, float("nan"), "equal", "not read", 2.0))}
    page = results.Page("diff", "x", [PageSection("c", [Depth("c", {"": numbers})])])
    (tmp_path / "page.html").write_bytes(build_html(page))
    _open(browser, tmp_path / "page.html", width=400)
    glyphs = [each.text for each in browser.find_elements("css selector", ".depth .glyph")]
    assert sorted(glyphs) == sorted(["0", "✕", "○", "▨"])
    heights = {each.location["y"] for each in browser.find_elements("css selector", ".depth .glyph")}
    assert len(heights) == 4
    for word in ("exactly 0", "NaN or Inf", "equal", "not read"):
        assert word in _find(browser, ".depth").text
    assert browser.get_log("browser") == []


def test_charts_of_one_nan_many_layers_and_kinds_draw(browser, tmp_path):
    many = {f"l.{i}.{k}": 10.0 ** (i % 7 - 3) for i in range(1000) for k in map("k{}".format, range(60))}
    for number, numbers in enumerate(({"l.0.w": 3.0}, {"l.0.w": float("nan")}, {"l.5.w": -1.0, "l.9.w": 1.0}, many)):
        file = tmp_path / f"{number}.html"
        file.write_bytes(build_html(results.Page("diff", "x", [PageSection("c", [Depth("c", {"": numbers})])])))
        _open(browser, file, width=400)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
        assert "NaN" not in browser.execute_script("return document.querySelector('.depth .plot').innerHTML")
        assert browser.get_log("browser") == []


def test_repeated_layers_are_one_tile_and_open_on_request(browser, files, tmp_path):
    _open(browser, files["plain"])
    tiles = browser.find_elements("css selector", ".tile b")
    assert "0–3 × 4" in [tile.text for tile in tiles]
    experts = [results.whole(f"layers.{i}.experts.{e}.up", 8, 8) for i in (0, 10, 9) for e in range(12)]
    stored = Checkpoint(root="m", format="hf", tensors=tuple(experts), files={"model.safetensors": 9000})
    (tmp_path / "experts.html").write_bytes(build_html(results.build_page(results.summarise(stored, path="m"))))
    _open(browser, tmp_path / "experts.html")
    assert {"0–10.experts × 3", "0–11 × 12"} <= {each.text for each in browser.find_elements("css selector", ".tile b")}
    _open(browser, files["plain"])
    browser.execute_script(
        "[...document.querySelectorAll('.tile')].find(each => each.title.startsWith('0–3 × 4')).click()"
    )
    _find(browser, ".level summary").click()
    assert [each.text for each in browser.find_elements("css selector", ".level th button")] == ["0", "1", "2", "3"]
    _drill(browser)
    assert _find(browser, ".tensor h3").text.startswith("model.layers.0.")  # no name of the group in it


def test_pages_lose_nothing_in_print(browser, files):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    metrics = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for name in NAMES:
        browser.get(files[name].as_uri())
        for each in browser.find_elements("css selector", ".scroll, .plot"):
            assert each.value_of_css_property("overflow-x") == "visible"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
