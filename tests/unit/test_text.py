"""`escape_name` and `display_width`: nothing from a file drives the terminal."""

import pytest
from hypothesis import given, settings, strategies as st
from samples import examples

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import UnreadableError
from ckpt_tools.text import display_width, escape_message, escape_name, first_few, natural_key, natural_order


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.layers.0.mlp.weight", "model.layers.0.mlp.weight"),
        ("", ""),
        ("a b", "a b"),
        ("wörter.权重.🔥", "wörter.权重.🔥"),
        ("[bold]not markup[/bold]", "[bold]not markup[/bold]"),
        ("back\\slash", "back\\slash"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("nul\x00", "nul\\x00"),
        ("bell\x07 tab\t cr\r lf\n", "bell\\x07 tab\\x09 cr\\x0d lf\\x0a"),
        ("del\x7f csi\x9b nel\x85", "del\\x7f csi\\x9b nel\\x85"),
        ("nbsp\xa0 shy\xad", "nbsp\\xa0 shy\\xad"),
        ("\u202eevil\u202c", "\\u202eevil\\u202c"),
        ("\u2066iso\u2069", "\\u2066iso\\u2069"),
        ("a\u200bb\u200db\ufeff\u2060", "a\\u200bb\\u200db\\ufeff\\u2060"),
        ("line\u2028para\u2029", "line\\u2028para\\u2029"),
        ("lone\ud800", "lone\\ud800"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("filler\u3164\u115f\ufe0f", "filler\\u3164\\u115f\\ufe0f"),
    ],
)
def test_escape_name_known_text_shows_literal(text: str, shown: str) -> None:
    assert escape_name(text) == shown


@settings(deadline=None, max_examples=examples(200))
@given(st.text(st.characters(), max_size=30))
def test_escape_name_any_text_is_printable_and_encodable(text: str) -> None:
    shown = escape_name(text)
    assert shown.isprintable()
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert escape_name(shown) == shown


@pytest.mark.parametrize(("text", "columns"), [("abc", 3), ("权重", 4), ("wö", 2), ("e\u0301", 1), ("", 0)])
def test_display_width_known_text_counts_columns(text: str, columns: int) -> None:
    assert display_width(text) == columns


def test_message_that_quotes_names_is_safe_bounded_and_keeps_its_end():
    long = "x" * 100_000
    said = escape_message(f"tensor {long!r} of '\x1b[2J\u202e' is not here")
    assert said.endswith(r"of '\x1b[2J\u202e' is not here")
    assert len(said) < 1200
    assert escape_message(said) == said
    assert len(escape_message("\x1b " * 100_000)) <= 8192


@pytest.mark.parametrize(("count", "expected"), [(0, ""), (1, "t0"), (3, "t0, t1, t2"), (5, "t0, t1, t2 and 2 more")])
def test_first_few_names_and_how_many_more(count: int, expected: str):
    assert first_few([f"t{i}" for i in range(count)]) == expected


def test_errors_and_findings_make_names_safe_themselves():
    error = UnreadableError("tensor '\x1b[2J'", where="a\nb", hint="\u202e")
    finding = Finding.warning("code", "a\nb", "tensor '\x1b[2J'", "\u202e")
    for shown in (error, finding):
        assert (shown.what, shown.where, shown.hint) == (r"tensor '\x1b[2J'", r"a\x0ab", r"\u202e")
    assert str(error) == r"tensor '\x1b[2J'; at: a\x0ab; hint: \u202e"


def test_numbers_in_names_count_and_the_rest_keeps_its_order() -> None:
    names = [
        "lm_head",
        "layers.10.up",
        "layers.10.down",
        "layers.9.up",
        "embed",
        "layers.9.down",
        "layers.9.experts.11",
    ]
    ordered = [
        "lm_head",
        "layers.9.up",
        "layers.9.down",
        "layers.9.experts.11",
        "layers.10.up",
        "layers.10.down",
        "embed",
    ]
    assert natural_order(names) == ordered
    assert sorted(["step-100", "step-9", "step-10"], key=natural_key) == ["step-9", "step-10", "step-100"]
    assert natural_order([]) == []
    huge = ["9" * 40, "8" * 40]
    assert natural_order(huge) == huge[::-1]
