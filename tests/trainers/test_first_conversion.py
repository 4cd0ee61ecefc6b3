"""docs/first-conversion.md, walked from the top without network: the output that it shows is what is printed."""

import pytest
from walkthrough import PAGE, settled, walk

pytestmark = pytest.mark.full


def test_first_conversion_prints_what_the_page_shows(tmp_path):
    """PYTHONPATH=tests .venv/bin/python -m walkthrough writes the page."""
    text = PAGE.read_text(encoding="utf-8")
    assert settled(walk(text, tmp_path)) == settled(text)
