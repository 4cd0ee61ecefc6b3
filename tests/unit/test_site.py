"""The documentation site: its menu names every page for users, and what is built is checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bin_lib import bin_modules

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def site() -> Any:
    return bin_modules("docs_site")[0]


def _pages(menu: Any) -> Iterator[str]:
    for entry in menu:
        for page in entry.values():
            yield from [page] if isinstance(page, str) else _pages(page)


def test_menu_names_every_page_for_users_once_and_nothing_that_is_not_there() -> None:
    docs = ROOT / "docs"
    there = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    named = list(_pages(CONFIG["nav"]))
    assert sorted(named) == sorted(page for page in there if not page.startswith("dev/"))
    assert [next(iter(door)) for door in CONFIG["nav"]] == ["Start", "Trainers", "How-to", "Reference", "Explanation"]


def test_site_asks_no_other_machine_for_fonts() -> None:
    assert CONFIG["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css", "plugins"} & CONFIG.keys()


def test_lock_of_the_site_has_a_hash_for_everything() -> None:
    lines = (ROOT / "bin" / "docs.lock").read_text(encoding="utf-8").splitlines()
    names = [line for line in lines if re.match(r"[a-z]", line)]
    assert any(line.startswith("zensical==") for line in names)
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+( ; .+)? \\", line) for line in names)
    assert all(re.fullmatch(r" {4}--hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines[1:] if line not in names)


def test_copy_for_the_site_has_no_names_of_blocks_and_no_links_out_of_it(site: Any, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "glossary.md").write_text("| word | means |\n|---|---|\n| DCP | a directory |\n| file | a file |\n")
    (tmp_path / "page.md").write_text(
        '```python catch\n1\n```\n```python title="a.py"\n```\n[test](../tests/a.py) [one](dev/one.md#a)\n'
    )
    (tmp_path / "dev" / "one.md").write_text(
        "[up](../page.md) [out](../../SECURITY.md) [all](../dev) [web](https://a.b/c)"
    )
    site.prepare(tmp_path)
    page, one = ((tmp_path / name).read_text() for name in ("page.md", "dev/one.md"))
    assert page.startswith('```python\n1\n```\n```python title="a.py"\n```\ntest [one](dev/one.md#a)\n')
    assert page.endswith("*[DCP]: a directory\n")
    assert one.startswith("---\nsearch:\n  exclude: true\n---\n[up](../page.md) out all [web](https://a.b/c)")


def test_every_command_has_a_page_of_its_own_on_the_site(site: Any, tmp_path: Path) -> None:
    reference = tmp_path / "docs" / "reference"
    reference.mkdir(parents=True)
    (reference / "cli.md").write_text(
        "# Reference\n\n[tasks](../guides/a.md)\n\n## Shared options\n\n- `--json`: one\n\n"
        "## ckpt shard\n\n- `--mesh`: [codes](findings.md#x), [tasks](../guides/a.md)\n\nShared: `--json`.\n\n"
        "## ckpt merge-lora\n\nAs in [ckpt shard](#ckpt-shard): `--mesh`.\n"
    )
    (tmp_path / "docs" / "page.md").write_text("[shard](reference/cli.md#ckpt-shard) [all](reference/cli.md)")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    site.split_commands(tmp_path)
    assert (reference / "commands" / "shard.md").read_text() == (
        "# ckpt shard\n\n- `--mesh`: [codes](../findings.md#x), [tasks](../../guides/a.md)\n\n"
        "[Shared](../cli.md#shared-options): `--json`.\n\n"
    )
    assert "(shard.md): `--mesh`" in (reference / "commands" / "merge-lora.md").read_text()
    assert (reference / "cli.md").read_text().endswith("## Commands\n\n- [ckpt shard](commands/shard.md)\n"
                                                       "- [ckpt merge-lora](commands/merge-lora.md)\n")  # fmt: skip
    assert (tmp_path / "docs" / "page.md").read_text() == "[shard](reference/commands/shard.md) [all](reference/cli.md)"
    named = list(_pages(yaml.safe_load((tmp_path / "mkdocs.yml").read_text())["nav"]))
    assert {"reference/cli.md", "reference/commands/shard.md", "reference/commands/merge-lora.md"} <= set(named)


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="b.html#here">', None),
        ('<a href="b.html#there">', "a.html: b.html#there has no such heading"),
        ('<a href="c.html">', "a.html: c.html is not there"),
        ('<a href="#x">', "a.html: #x has no such heading"),
        ('<a href="https://pytorch.org">', None),
        ('<script src="https://unpkg.com/shim"></script>', "a.html loads https://unpkg.com/shim"),
        ('<link rel="stylesheet" href="//fonts.example/css">', "a.html loads //fonts.example/css"),
        ('<img src="gone.png">', "a.html: gone.png is not there"),
    ],
)
def test_faults_of_a_built_site_are_found(site: Any, tmp_path: Path, html: str, fault: str | None) -> None:
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<h1 id="here">')
    assert site.faults(tmp_path) == ([fault] if fault else [])


def test_site_replaces_nothing_but_a_site(site: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitemap.xml").write_text("of another site")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "file", "gone"):
        assert site.main([str(tmp_path / name)]) == 2
        assert "choose another folder" in capsys.readouterr().err
    assert (tmp_path / "mine" / "sitemap.xml").exists()
    (tmp_path / "mine" / site.MARK).touch()
    assert [site.may_replace(tmp_path / name) for name in ("mine", "new")] == [True, True]
    assert site.main([]) == 2
