"""The trainers' tables themselves: every row is about a field of the spec, and names options that there are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from preflight.config_examples import AXOLOTL, read
from preflight.rule_cases import NAMES, RIGHT, text_of

from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.configs import names
from ckpt_tools.preflight.configs.document import Document, read_document
from ckpt_tools.preflight.configs.field_rows import _SHARED, FieldRow, ReaderInput
from ckpt_tools.preflight.configs.names import known, newest_release
from ckpt_tools.preflight.configs.read import READERS
from ckpt_tools.preflight.configs.schema import OptionSection
from ckpt_tools.preflight.plain_values import read_rows
from ckpt_tools.preflight.spec import Engine, ParallelSpec

SFT = {
    "an engine": {"defaults": [{"engine@engine": "fsdp"}], "model": {"path": "m"}},
    "none": {"model": {"partial_pretrain": "m"}},
    "Megatron": {"actor_rollout_ref": {"actor": {"strategy": "megatron"}}},
}
"""verl's two SFT trainers, and PPO on another engine."""


def sources(folder: Path) -> Iterator[tuple[str, ReaderInput]]:
    for framework, values in RIGHT.items():
        path = folder / NAMES[framework]
        path.write_text(text_of(framework, values))
        yield framework, READERS[framework].prepare(read_document(str(path)))
    for name, values in SFT.items():
        yield f"verl with {name}", READERS["verl"].prepare(Document(path="sft.yaml", values=values))


def rows_of(source: ReaderInput) -> Iterator[tuple[str, FieldRow[Any]]]:
    for table in (source.table, *source.by_engine.values()):
        yield from table.items()


def has_option(model: type[OptionSection], path: str) -> bool:
    name, _, rest = path.partition(".")
    field = model.model_fields.get(name)
    if field is None or not rest:
        return field is not None
    return issubclass(field.annotation, OptionSection) and has_option(field.annotation, rest)


def test_every_trainer_has_a_table() -> None:
    assert tuple(READERS) == get_args(Framework)
    assert all(reader.name == name for name, reader in READERS.items())


def test_rows_are_about_fields_of_the_spec(tmp_path: Path) -> None:
    known = {field.name for field in fields(ParallelSpec)} - {"framework", "keys"}
    for name, source in sources(tmp_path):
        assert set(source.by_engine) <= set(get_args(Engine))
        for row, _ in rows_of(source):
            assert {field.partition(".")[0] for field in row.split()} <= known, name


def test_options_of_rows_are_read_under_these_names(tmp_path: Path) -> None:
    for name, source in sources(tmp_path):
        model = type(source.part(source.model()))
        for row, one in rows_of(source):
            assert [path for path in one.options if not has_option(model, path)] == [], (name, row)


def tables_and_functions() -> Iterator[tuple[str, set[str]]]:
    """Yield the tables that the readers make, and the functions that they hand in."""
    for path in Path(names.__path__[0]).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "read_table":
                yield ast.literal_eval(node.args[0]), {str(word.arg) for word in node.keywords}


def test_words_of_the_tables_are_those_that_there_are() -> None:
    rows = read_rows("ckpt_tools.preflight.configs", "fields.tsv")
    handed = dict(tables_and_functions())
    assert handed.keys() == {row["table"] for row in rows}
    for table, functions in handed.items():
        own = [row for row in rows if row["table"] == table]
        assert functions == {row["value"] for row in own} - {"-", "elsewhere", *(_SHARED.keys() - functions)}, table
        assert len({row["fields"] for row in own}) == len(own), table
        assert {engine for row in own for engine in row["engines"].split()} <= {"-", *get_args(Engine)}, table


@pytest.mark.parametrize("framework", RIGHT)
def test_right_config_is_detected_as_its_trainers_alone(framework: str, tmp_path: Path) -> None:
    path = tmp_path / NAMES[framework]
    path.write_text(text_of(framework, RIGHT[framework]))
    document = read_document(str(path))
    assert [name for name, reader in READERS.items() if reader.looks_like(document)] == [framework]


# The lists of names


@pytest.mark.parametrize(("here", "is_behind"), [("0.21.3", False), ("0.22.0", False), ("0.23.0", True), ("1.0", True)])
def test_lists_that_are_behind_what_is_installed_are_a_note(
    here: str, is_behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "version", lambda _: here)
    names.installed_and_listed.cache_clear()
    notes = [one.what for one in read(tmp_path, AXOLOTL).findings if one.code == "newer-release"]
    names.installed_and_listed.cache_clear()
    assert notes == (
        [f"axolotl {here} is installed here, but ckpt knows the options of axolotl-0.21.0"] if is_behind else []
    )


LISTS = {
    "accelerate": ("config", "arguments"),
    "ai_toolkit": ("file", "config", "process", "train", "model", "network"),
    "axolotl": ("config", "fsdp_config"),
    "openrlhf": ("switches", "lists", "sft", "rm", "dpo", "ppo_ray"),
    "torchtitan": ("job", "parallelism", "training", "checkpoint"),
    "trainer": ("arguments", "trl", "fsdp_config", "parallelism_config"),
    "verl": ("actor_rollout_ref", "actor", "model", "trainer", "ppo", "sft", "optim", "fsdp", "defaults"),
}


@pytest.mark.parametrize("name", LISTS)
def test_list_of_names_says_which_release_has_them(name: str) -> None:
    for section in LISTS[name]:
        options = newest_release(name, section)
        assert options, section
        assert known(name, section) == options.keys()
        assert any(
            release.startswith((name, "transformers", "trl", "accelerate", "ai-toolkit"))
            for release in options.values()
        )
