"""Writes docs/reference/ from the code. With --check, says whether it differs."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import api_pages
import cli_pages
import findings_page
import formats_page
import fsdp2_pages
import schemas
import tables_pages

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "cli.md": cli_pages.render,
    "api.md": api_pages.render,
    "findings.md": findings_page.render,
    "formats.md": formats_page.render,
    "fsdp2.md": fsdp2_pages.render,
    "diagnoses.md": tables_pages.render_diagnoses,
    "preflight-rules.md": tables_pages.render_rules,
    **schemas.PAGES,
}


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    if arguments not in ([], ["--check"]):
        print("usage: bin/docs [--check]", file=sys.stderr)
        return 2
    stale = []
    for name, render in PAGES.items():
        path = ROOT / "docs" / "reference" / name
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = render()
        if new == old:
            continue
        stale.append(name)
        if arguments:
            lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "from the code")
            sys.stdout.writelines(lines)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8")
            print(f"wrote docs/reference/{name}")
    if stale and arguments:
        print(f"docs/reference: {', '.join(stale)} is not what the code says; run bin/docs and commit")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
