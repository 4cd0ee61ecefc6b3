"""The notebook runs as it stands, cell after cell, and shows what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs" / "notebooks"


def test_cells_of_the_notebook_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = json.loads((NOTEBOOKS / "first-look.ipynb").read_text(encoding="utf-8"))
    here: dict[str, object] = {}
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            exec("".join(cell["source"]), here)
    assert not here["difference"]
    assert {name for name, moved in here["updates"].items() if moved} == {  # type: ignore[attr-defined]
        f"model.layers.{layer}.attn.weight" for layer in range(8)
    }
    for name, verdict in (
        ("summary", "16 tensors, 640 KiB, from headers alone"),
        ("verification", "ok at level data"),
        ("difference", "8 differ, 8 equal"),
        ("stats", "ok: 16 tensors"),
    ):
        assert verdict in here[name]._repr_html_()  # type: ignore[attr-defined]
    assert here["shown"] is not None
