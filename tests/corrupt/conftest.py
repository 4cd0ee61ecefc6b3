"""What every damaged checkpoint must go through."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import staging_left

from ckpt_tools.cli import main


@pytest.fixture
def refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Assert that `verify` names the damage and that no conversion takes the checkpoint or leaves anything.

    The first argument is the checkpoint. `finding` is the code that `verify` (exit 3) reports, None when the
    checkpoint cannot even be opened (exit 4). `conversions` run on it too; they must exit with `exit_code`.
    Returns what was said, for tests that look at the words.
    """

    def check(
        path: Path,
        *,
        finding: str | None,
        exit_code: int = 4,
        conversions: tuple[str, ...] = ("gather", "reshard"),
        level: str = "data",
    ) -> str:
        before = sorted(tmp_path.iterdir())
        code = main(["verify", str(path), "--json", "--level", level])
        out, err = capsys.readouterr()
        said = out + err
        assert "Traceback" not in said
        if finding is None:
            assert code == 4, said
            document = json.loads(err)
            assert out == ""
            assert document["exit_code"] == 4
            assert document["error"]["code"] in ("unreadable", "limit")
            assert document["error"]["what"]
        else:
            assert code == 3, said
            document = json.loads(out)
            assert document["ok"] is False
            assert finding in {f["code"] for f in document["findings"] if f["severity"] == "error"}, said
            assert all(f["where"] and f["what"] for f in document["findings"])
        for verb in conversions:
            options = [] if verb == "gather" else ["--mesh", "dp_shard=3"]
            code = main([verb, str(path), str(tmp_path / "out"), *options, "--json"])
            out, err = capsys.readouterr()
            assert code == exit_code, (verb, out, err)
            assert out == ""
            assert "Traceback" not in err
            assert json.loads(err)["exit_code"] == exit_code
            assert sorted(tmp_path.iterdir()) == before, f"{verb} left something"
            assert staging_left(tmp_path) == []
            said += err
        return said

    return check
