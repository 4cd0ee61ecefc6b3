"""The house is what its pages say: every room has a row, and uses what the row says."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = spec_from_file_location("house_of_ckpt", ROOT / "bin" / "lib" / "house.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE: Any = module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
MOST, House = _MODULE.MOST, _MODULE.House

PAGE = (ROOT / "docs" / "dev" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def house() -> Any:
    return House()


@pytest.mark.full
def test_architecture_has_a_row_for_every_room_with_what_it_uses(house: Any) -> None:
    rows = re.findall(r"^\| `(\w+)/` \| .* \| ([^|]*) \|$", PAGE, re.MULTILINE)
    stated = {room: set(uses.split(", ")) - {"none"} for room, uses in rows}
    assert stated == house.rooms


def test_drawings_have_every_room_in_the_order_of_the_contract(house: Any) -> None:
    order = [room for row in house.layers() for room in sorted(row) if room in house.rooms]
    assert set(order) == house.rooms.keys()
    for one, used in house.rooms.items():
        assert all(order.index(two) > order.index(one) for two in used), one
    drawing = PAGE[PAGE.index("```text", PAGE.index("## Rooms")) :].split("```")[1]
    assert [word for word in re.findall(r"\w+", drawing) if word in house.rooms and word != "checkpoint"] == [
        room for room in order if room != "checkpoint"
    ]
    first = (ROOT / "docs" / "dev" / "start-here.md").read_text(encoding="utf-8")
    assert all(room in first for room in house.rooms)
    assert len(first.split()) < 450


def test_house_does_not_drift(house: Any) -> None:
    held = ("rooms", "arrows", "words that the glossary replaced", "files of more than 650 lines")
    assert {what: n for what, n in house.count().items() if what in held and n > MOST[what]} == {}


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "dev" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\((\d{4}-[\w-]+\.md)\)", index) == sorted(path.name for path in folder.glob("[0-9]*.md"))


def test_modules_that_pages_once_named_are_found() -> None:
    from ckpt_tools import checkpoint
    from ckpt_tools.checkpoint.layout import parse_mesh as now
    from ckpt_tools.description.layout import parse_mesh
    from ckpt_tools.formats import inert_pickle

    assert parse_mesh is now
    assert inert_pickle.__name__ == "ckpt_tools.checkpoint.formats.inert_pickle"
    assert checkpoint.__name__ == "ckpt_tools.checkpoint"


def test_names_that_were_public_go_on_working() -> None:
    import ckpt_tools

    assert ckpt_tools.Tended is ckpt_tools.PruneResult
