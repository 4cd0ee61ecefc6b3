"""What docs/guides/smoke.md shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "smoke.md").read_text(encoding="utf-8")


@pytest.fixture
def port(tmp_path):
    """The guide's model, as a file; `port(change)` writes it after a change."""

    def write(name, change=lambda text: text):
        text = re.search(r"```python port\.py\n(.*?)```", GUIDE, re.DOTALL)[1]
        (tmp_path / f"{name}.py").write_text(change(text))
        return tmp_path

    return write


def test_guide_shows_the_finding_of_its_port(farm, port):
    report = farm.smoke(factory="port_as_shown:Port", path=port("port_as_shown"))
    [finding] = report.findings
    shown = f"{finding.severity}: {finding.code}: {finding.what}\n   at: {finding.where}\n hint: {finding.hint}\n"
    assert shown in GUIDE


def test_guide_is_right_that_the_port_passes_without_the_registration(farm, port):
    def without(text):
        return text.replace('    fsdp_forward_methods = {"Block": ["forward_train"]}\n', "")

    report = farm.smoke(factory="port_mended:Port", steps=1, path=port("port_mended", without))
    assert report.ok
