"""`escape_name` and `display_width`: nothing from a file drives the terminal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.text import display_width, escape_name


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


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(), max_size=30))
def test_escape_name_any_text_is_printable_and_encodable(text: str) -> None:
    shown = escape_name(text)
    assert shown.isprintable()
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert escape_name(shown) == shown


@pytest.mark.parametrize(("text", "columns"), [("abc", 3), ("权重", 4), ("wö", 2), ("e\u0301", 1), ("", 0)])
def test_display_width_known_text_counts_columns(text: str, columns: int) -> None:
    assert display_width(text) == columns
