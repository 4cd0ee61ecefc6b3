"""bin/world itself: what it takes for an example, what it says of one, how names are taken from sources, no network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WORLD = Path(__file__).resolve().parents[2] / "bin" / "lib" / "world"


@pytest.fixture
def world() -> Iterator[Any]:
    """The modules of bin/lib/world, which stand beside one another and not in a package."""
    import importlib

    sys.path.insert(0, str(WORLD))
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = [entry for entry in sys.path if entry != str(WORLD)]  # some put it there themselves, too
        for name in ("examples", "known", "lists", "outcomes", "releases", "scores"):
            sys.modules.pop(name, None)


def test_tables_are_whole(world: Any) -> None:
    releases = world("releases")
    pinned = releases.pinned()
    assert len({release.name for release in pinned}) == len(pinned)
    assert all(len(release.sha256) == 64 and release.version in release.file for release in pinned)
    names = {release.name for release in pinned}
    expected = releases.rows(WORLD / "expected.tsv")
    assert {row[0].partition("/")[0] for row in expected} <= names
    assert all(len(row) == 4 for row in expected)
    assert not [row for row in expected if row[1] == "crash"]
    assert all(len(row) == 4 and all(row) for row in releases.rows(WORLD / "judged.tsv"))
    assert all(len(row) >= 3 for row in releases.rows(WORLD / "examples.tsv"))
    assert all(len(row) == 6 for row in releases.rows(WORLD / "names.tsv"))


def test_every_expected_error_is_judged(world: Any) -> None:
    from fnmatch import fnmatchcase

    releases = world("releases")
    judged = releases.rows(WORLD / "judged.tsv")
    for name, verdict, _, codes in releases.rows(WORLD / "expected.tsv"):
        errors = {code.partition(":")[2].partition("×")[0] for code in codes.split() if code.startswith("error:")}
        assert bool(errors) == (verdict == "error"), name
        assert errors <= {row[1] for row in judged if fnmatchcase(name, row[0])}, name


def test_examples_are_files_and_fenced_blocks(world: Any, tmp_path: Path) -> None:
    tree, scratch = tmp_path / "tree", tmp_path / "scratch"
    (tree / "examples" / "llama").mkdir(parents=True)
    (tree / "examples" / "cloud").mkdir()
    scratch.mkdir()
    (tree / "examples" / "llama" / "lora.yaml").write_text("base_model: m\n")
    (tree / "examples" / "cloud" / "modal.yaml").write_text("provider: modal\n")
    (tree / "other.yaml").write_text("a: 1\n")
    (tree / "README.md").write_text(
        "```bash\npip install axolotl\n```\n\n```bash\naxolotl train x.yml --gpus 2\n```\n\n```yaml\na: 1\n```\n"
    )
    found = dict(world("examples").find_examples("axolotl", tree, scratch))
    assert list(found) == ["README.md#2", "examples/llama/lora.yaml"]
    assert found["README.md#2"].suffix == ".sh"
    assert found["README.md#2"].read_text() == "axolotl train x.yml --gpus 2\n"


@pytest.mark.parametrize(
    ("text", "verdict", "codes"),
    [
        ("base_model: m\nmicro_batch_size: 1\n", "green", "-"),
        ("base_model: m\nfsdp_config: {offload_parms: true}\nfsdp_version: 2\n", "error", "error:unknown-key"),
        ("base_model: m\ndeepspeed: nowhere.json\n", "not-checked", "warning:unknown-value"),
        ("a: 1\n", "refused", "-"),
    ],
)
def test_outcome_is_what_the_command_says(text: str, verdict: str, codes: str, world: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    outcome = world("outcomes").judge(path)
    assert outcome.verdict == verdict
    assert codes in (outcome.codes, "-") or codes in outcome.codes.split()


SOURCE = """
class Base:
    seed: int = 1
    kind: ClassVar[str] = "x"

class Args(Base):
    type_of_model: str | None = Field(default=None, alias="model_type")
    version: int = Field(validation_alias=AliasChoices("fsdp_version", "version"))

class Other:
    lonely: int = 0
"""
PARSER = """
for role in ("actor", "critic"):
    parser.add_argument(f"--{role}.lr", type=float)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--targets", nargs="*")
"""


def test_names_are_taken_from_sources_that_are_not_run(world: Any, tmp_path: Path) -> None:
    names = world("lists")
    (tmp_path / "args.py").write_text(SOURCE)
    (tmp_path / "parser.py").write_text(PARSER)
    classes = names._classes(tmp_path, "*.py")
    assert names._fields_of(classes, "Args", frozenset()).keys() == {
        "seed", "type_of_model", "model_type", "version", "fsdp_version",
    }  # fmt: skip
    assert set(names._options(tmp_path / "parser.py")) == {
        ("actor.lr", "value"), ("critic.lr", "value"), ("bf16", "switch"), ("targets", "list"),
    }  # fmt: skip


def test_lists_are_what_their_sources_say(world: Any, tmp_path: Path, capsys: Any) -> None:
    names, releases, known = world("lists"), world("releases"), world("known")
    trees = {}
    for version, fields in (("1.0", "    seed: int\n    old: int\n"), ("2.0", "    seed: int\n    fresh: Inner\n")):
        trees[version] = tmp_path / version
        trees[version].mkdir()
        (trees[version] / "a.py").write_text(f"class Inner:\n    deep: int\nclass Args:\n{fields}")
    made = [
        releases.Release(project="p", version=version, file="", sha256="", tree=tree) for version, tree in trees.items()
    ]
    sources = [["l", "top", "p", "trees", "*.py", "Args"], ["l", "top/at", "-", "words", "a fork", "mine"]]
    body = names.render(sources, made).splitlines()[1:]
    assert body == ["", "[top] p-2.0", "fresh fresh/deep seed", "", "[top] p-1.0", "old", "", "[top] a fork", "at/mine"]
    known._print_changes(sources, *made)
    assert capsys.readouterr().out == "  [top] came, 2: fresh, fresh/deep\n  [top] went, 1: old\n"


def test_table_counts_what_is_read_and_not_the_parts(world: Any) -> None:
    outcomes, scores = world("outcomes"), world("scores")
    scores._mistakes = lambda: (scores.Counter(), scores.Counter())

    def outcome(verdict: str, framework: str, codes: tuple[str, ...] = ()) -> Any:
        found = tuple(outcomes.Found(severity="error", code=code, where="k", what="w") for code in codes)
        return outcomes.Outcome(
            verdict=verdict, framework=framework, findings=found, why="", num_options=10, num_understood=9
        )

    found = {
        "verl-2/a.yaml": outcome("green", "verl"),
        "verl-2/b.yaml": outcome("error", "verl", ("X", "Y")),
        "verl-2/verl/trainer/config/actor/part.yaml": outcome("refused", "-"),
        "verl-2/c.yaml": outcome("refused", "-"),
        "verl-1/old.yaml": outcome("refused", "-"),
    }
    text = scores.table(found, {"verl-2"}, [["verl-2/b.yaml", "X", "k", "why"]])
    assert text.splitlines()[2] == "| verl | 3 | 66.7 % | 20 | 90.0 % | 2 | 1 | 0 | 0 | – |"


def test_index_that_does_not_answer_is_said_loudly(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    done = subprocess.run(
        [sys.executable, str(WORLD), "trl"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "the package index cannot be reached" in done.stderr
    assert "nothing was run" in done.stderr
    assert "green" not in done.stdout
