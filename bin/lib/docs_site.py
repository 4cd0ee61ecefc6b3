"""Builds the documentation site from docs/ and mkdocs.yml, and checks what was built.

Runs in an environment of its own (bin/docs.lock). Nothing on the site asks another machine for anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
_NAMED_BLOCK = re.compile(r"^(```\w+) (?!title=)\S+$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)[^)]*\)")
_ACRONYM = re.compile(r"^\| ([A-Z]{3,}) \| (.*) \|$", re.MULTILINE)
MARK = ".built-by-bin-docs"
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
_SECTION = re.compile(r"^(?=## ckpt [a-z])", re.MULTILINE)
_LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href"}
"""What a browser fetches by itself, and the attribute that says from where."""


def prepare(docs: Path) -> None:
    """Change a copy of docs/ to what a site takes.

    Names of tested blocks go, links to folders and to the rest of the repository become text, acronyms get tooltips,
    pages for developers are left out of the search.
    """
    tips = "".join(f"*[{word}]: {what}\n" for word, what in _ACRONYM.findall((docs / "glossary.md").read_text("utf-8")))
    for page in docs.rglob("*.md"):
        text = _NAMED_BLOCK.sub(r"\1", page.read_text("utf-8"))
        head = _UNSEARCHED if page.is_relative_to(docs / "dev") else ""
        page.write_text(f"{head}{_without_outward_links(text, page, docs)}\n{tips}", encoding="utf-8")


def split_commands(work: Path) -> None:
    """Give every command of reference/cli.md a page of its own, in the menu as well."""
    reference = work / "docs" / "reference"
    head, *sections = _SECTION.split((reference / "cli.md").read_text("utf-8"))
    names = [section.split(maxsplit=3)[2] for section in sections]
    (reference / "commands").mkdir()
    for name, section in zip(names, sections, strict=True):
        text = re.sub(r"\]\((?=\w[\w/-]*\.md)|\]\((?=\.\./)", "](../", section.removeprefix("#"))
        text = text.replace("\nShared: ", "\n[Shared](../cli.md#shared-options): ")
        (reference / "commands" / f"{name}.md").write_text(re.sub(r"\(#ckpt-([\w-]+)\)", r"(\1.md)", text), "utf-8")
    links = "".join(f"- [ckpt {name}](commands/{name}.md)\n" for name in names)
    (reference / "cli.md").write_text(f"{head}\n## Commands\n\n{links}", "utf-8")
    for page in (work / "docs").rglob("*.md"):
        page.write_text(re.sub(r"cli\.md#ckpt-([\w-]+)", r"commands/\1.md", page.read_text("utf-8")), "utf-8")
    menu = "".join(f"          - {name}: reference/commands/{name}.md\n" for name in names)
    config = (work / "mkdocs.yml").read_text("utf-8")
    old, new = "      - Commands: reference/cli.md\n", "      - Commands:\n          - All commands: reference/cli.md\n"
    (work / "mkdocs.yml").write_text(config.replace(old, new + menu), "utf-8")


def _without_outward_links(text: str, page: Path, docs: Path) -> str:
    def kept(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / link[2]))
        return link[0] if target.is_relative_to(docs) and not target.is_dir() else link[1]

    return _LINK.sub(kept, text)


class _Page(HTMLParser):
    """The ids of a page, where it leads, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values.get("id", ""), values.get("name", "")}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if address := values.get(_LOADS.get(tag, "")):
            self.loads.append(address)


def faults(site: Path) -> list[str]:
    """Links that lead nowhere, and what would be loaded from another machine."""
    pages = {path: _Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        at = path.relative_to(site).as_posix()
        found += [f"{at} loads {each}" for each in page.loads if re.match(r"(https?:)?//", each)]
        for link in (*page.links, *page.loads):
            if re.match(r"[a-z]+:|//", link):
                continue
            name, _, anchor = link.partition("#")
            target = Path(os.path.normpath(path.parent / unquote(name))) if name else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{at}: {link} is not there")
            elif anchor and target in pages and unquote(anchor) not in pages[target].ids:
                found.append(f"{at}: {link} has no such heading")
    return found


def build(destination: Path) -> list[str]:
    """Build into a folder that is new, empty or an older site; return the faults, over which nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(ROOT / "docs", work / "docs")
        shutil.copy(ROOT / "mkdocs.yml", work)
        split_commands(work)
        prepare(work / "docs")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(work / "mkdocs.yml")]
        done = subprocess.run(
            command, cwd=work, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode:
            return [done.stdout]
        if found := faults(work / "site"):
            return found
        (work / "site" / MARK).touch()
        if destination.exists():
            shutil.rmtree(destination.resolve())
        shutil.copytree(work / "site", destination.resolve())
    return []


def may_replace(destination: Path) -> bool:
    """Is it new, an empty folder, or a site that was built here?"""
    if not destination.is_dir():
        return not os.path.lexists(destination)
    return not any(destination.iterdir()) or (destination / MARK).exists()


def main(arguments: list[str]) -> int:
    """Build; the exit code."""
    if len(arguments) != 1:
        print("usage: bin/docs --site DIR", file=sys.stderr)
        return 2
    destination = Path(arguments[0])  # relative to where the command was started
    if not may_replace(destination):
        print(f"{destination} exists and is not a site of bin/docs: choose another folder", file=sys.stderr)
        return 2
    found = build(destination)
    print("\n".join(found) or f"wrote {sum(1 for _ in destination.rglob('*.html'))} pages to {destination}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
