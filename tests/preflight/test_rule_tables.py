"""Tables of rules: every row is well formed, and holds of some config, whose key it then names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.model_facts import ModelFacts
from ckpt_tools.preflight.rules import CATALOGUE
from ckpt_tools.preflight.rules.option_words import holds, options_of, rows_of
from ckpt_tools.preflight.rules.rule import Subject
from ckpt_tools.preflight.spec import ParallelSpec

FRAMEWORKS = get_args(Framework)
_PART = re.compile(r"(?P<names>.+?)(?P<sign>!=|>=|[=<>%!?])(?P<words>.*)|(?P<bare>.+)")


def config_that_breaks(row: Mapping[str, str]) -> Subject:
    """Return the least config of which all conditions of a row hold."""
    values: dict[str, Any] = {}
    spec: dict[str, Any] = {"framework": row["framework"], "engine": "fsdp2", "axes": {}}
    for condition in row["conditions"].split():
        match = _PART.fullmatch(condition)
        assert match is not None
        name, sign, words = (match["names"] or match["bare"]).split("/")[0], match["sign"] or "", match["words"] or ""
        if name == "@engine":
            spec["engine"] = words.split("|")[0] if sign == "=" else "fsdp1"
        elif name[1:] in ParallelSpec.__slots__ and name[0] == "@":
            word = words.split("|")[0]
            spec[name[1:]] = 7 if sign == "%" else int(word) if word.isdecimal() else word or None
        elif name[0] == "@":
            spec["axes"][name[1:]] = int(words) + (sign == ">")
        elif sign in ("", "?"):
            values.setdefault(name, "epoch" if name.endswith("_strategy") else 7)
        elif sign == "=":
            values[name] = {"true": True, "false": False}.get(words.split("|")[0], words.split("|")[0])
        elif sign in "<>%>=":
            other = words.split("/")[0]
            is_number = re.fullmatch(r"-?[\d.]+", words) is not None
            values |= {} if is_number else {other: values.get(other, 2)}
            base = float(words) if is_number else values[other]
            values[name] = base - 1 if sign == "<" else base + 1
    config = SimpleNamespace(
        framework=row["framework"], values=values, spec=ParallelSpec(**spec), unread=frozenset(),
        unread_fields=frozenset(), hides_options=False, contents={},
    )  # fmt: skip
    return Subject(config=config, facts=ModelFacts(where=""))  # type: ignore[arg-type]


def rows(name: str) -> Iterator[Any]:
    for row in rows_of(name):
        yield pytest.param(row, id=f"{row['framework']}-{row.get('conditions') or row['option']}"[:60])


@pytest.mark.parametrize("row", tuple(rows("pairs.tsv")))
def test_pair_holds_of_some_config_and_names_its_option(row: Mapping[str, str]) -> None:
    assert row["framework"] in FRAMEWORKS
    assert all(row.values())
    case = config_that_breaks(row)
    assert holds(case, row["conditions"]), case.config.values
    found = [one for one in CATALOGUE[row["rule"]].check(case) if one.what.startswith(row["what"])]
    assert found, row
    assert all(one.key and one.fix and "{key}" not in one.fix for one in found)
    assert any(one.key.removeprefix("--") in row["conditions"] for one in found)


def test_words_and_limits_are_well_formed() -> None:
    for row in rows_of("words.tsv"):
        assert row["framework"] in FRAMEWORKS, row
        assert row["case"] in ("exact", "any")
        assert len(row["words"].split()) == len(set(row["words"].split())) > 1
        assert all(row.values())
        assert options_of(row["option"])
    for row in rows_of("limits.tsv"):
        assert row["framework"] in CATALOGUE[row["rule"]].frameworks
        assert row["least"].isdecimal()


def test_rules_of_tables_have_rows() -> None:
    assert {row["rule"] for row in rows_of("pairs.tsv")} == {row["rule"] for row in rows_of("rules.tsv")}
