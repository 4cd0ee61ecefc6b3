"""The front door: help, topics, `ckpt SRC`, and where a mistake leads."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import toys
from typer.core import TyperOption

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.table import FORMATS
from ckpt_tools.cli import commands, help_text, main, show_help
from ckpt_tools.cli.app import _load
from ckpt_tools.cli.commands import COMMANDS

Run = Callable[..., tuple[int, str, str]]
OPTION = r"(?<![\w-])--[a-z][a-z-]+"
EXAMPLES = [line for each in COMMANDS.values() for line in each.examples.strip().splitlines()]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line at 80 columns; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(line: str) -> tuple[int, str, str]:
        code = main(shlex.split(line, comments=True)[line.startswith("ckpt") :])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return call


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return toys.save("llama", tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture
def model(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in the current directory, which has nothing else."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(toy, tmp_path / "model")


def parts_of(err: str) -> list[str]:
    """The first words of what is said of an error: error, at, hint."""
    return [line.split(":")[0].strip() for line in err.splitlines()]


# Help


def test_bare_ckpt_prints_the_help_and_is_no_success(ckpt: Run) -> None:
    code, out, err = ckpt("")
    assert (code, out) == (2, "")
    assert ckpt("--help") == ckpt("-h") == (0, err, "")
    assert err.startswith("Usage: ckpt [OPTIONS] COMMAND")
    assert "error" not in err


def test_help_lists_every_command_in_a_group_with_a_whole_phrase(ckpt: Run) -> None:
    lines = ckpt("--help")[1].splitlines()
    rows = {name: line for line in lines for name in COMMANDS if line.startswith(f"  {name} ")}
    assert rows.keys() == COMMANDS.keys()
    for name, line in rows.items():
        assert line.split(maxsplit=1)[1] == COMMANDS[name].short
        assert len(line) <= 80
        assert len(COMMANDS[name].short) <= 55
        assert not line.endswith((".", "…"))
    groups = dict.fromkeys(each.group for each in COMMANDS.values())
    assert [*groups] == ["Look", "Convert", "Check", "Adapters", "Runs and publishing", "Plumbing"]
    assert [line[:-1] for line in lines if line[:-1] in groups] == [*groups]
    assert " ".join(lines).count("Exit codes:") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name: str, ckpt: Run) -> None:
    code, out, err = ckpt(f"{name} --help")
    assert (code, err) == (0, "")
    assert ckpt(f"help {name}") == ckpt(f"{name} -h") == (0, out, "")
    assert max(map(len, out.splitlines())) <= 80
    for each in _load(name).params:
        shown = max(each.opts, key=len) if isinstance(each, TyperOption) else str(each.metavar)
        assert len(re.findall(rf"^  (-\w, )?{re.escape(shown)}( |$)", out, re.MULTILINE)) == 1 + (shown == "SRC") * (
            name == "verify"
        ), shown
    assert all(line in out for line in COMMANDS[name].examples.strip().splitlines())
    assert "<" not in out.replace("<=x<=", "")
    codes = re.findall(r"(\d) [a-z]", " ".join(out.split()).partition("Exit codes: ")[2])
    assert ("3" in codes) == bool(COMMANDS[name].finding)
    assert set(COMMANDS[name].topics.split()) <= {*help_text.topics()}


def test_usage_says_what_may_be_left_out(ckpt: Run) -> None:
    usage = {name: ckpt(f"{name} --help")[1].splitlines()[0].partition("[OPTIONS]")[2] for name in COMMANDS}
    assert usage["verify"] == " SRC [SRC]..."
    assert usage["preflight"] == " [CONFIG]..."
    assert usage["smoke"] == " [SRC]"
    assert usage["merge-lora"] == " BASE ADAPTER... DST"


def test_every_option_is_in_one_group() -> None:
    listed = [flag for flags in help_text.groups().values() for flag in flags.split()]
    assert len({*listed}) == len(listed)
    used = {}
    for name, each in COMMANDS.items():
        used[name] = {max(one.opts, key=len) for one in _load(name).params if isinstance(one, TyperOption)}
        main_options = each.main.split()
        assert used[name] <= {*listed, *main_options}, name
        assert used[name] >= {*main_options}, name
        assert len(main_options) <= 6
        assert len(used[name]) < 11 or len(main_options) >= 5, name
    assert {*listed} - set().union(*used.values()) == {"--help"}


# Examples


def test_every_command_has_three_examples_of_its_own() -> None:
    for name, each in COMMANDS.items():
        lines = each.examples.strip().splitlines()
        assert len(lines) == 3
        assert sum(line.startswith(f"ckpt {name}") for line in lines) >= 2
        assert max(map(len, lines)) <= 78


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_is_read_by_the_real_parser(line: str, ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMMANDS:
        _load(name)
    taken = SimpleNamespace(run=lambda *parts: 0, convert=lambda *parts: 0)
    monkeypatch.setattr(commands, "import_module", lambda name: taken)
    code, _, err = ckpt(line)
    assert (code, err) == (0, "")


RUNS = (
    "ckpt shard Qwen3-8B run/start --mesh",
    "ckpt shard Qwen3-8B run/bf16",
    "ckpt shard Qwen3-8B run/start-tp",
    "ckpt inspect",
    "ckpt reshard run/start",
    "ckpt reshard run/step-500 on-4",
    "ckpt gather run/start",
    "ckpt gather run/step-500",
    "ckpt diff Qwen3-8B run/start",
    "ckpt diff run/start",
    "ckpt verify run",
    "ckpt stats run",
    "ckpt scan Qwen3-8B",
    "ckpt average",
    "ckpt extract ",
    "ckpt help",
    "ckpt env",
)
"""Beginnings of the examples that run on toys, in an order in which each finds what it needs."""


def test_examples_do_what_they_say(model: Path, ckpt: Run) -> None:
    model.rename("Qwen3-8B")
    api.shard("Qwen3-8B", "run/step-500", mesh="dp_shard=2")
    done = set()
    for line in (each for begin in RUNS for each in EXAMPLES if each.startswith(begin)):
        code, out, err = ckpt(line) if line not in done else (0, "", "")
        done.add(line)
        assert code == 0, (line, out, err)
    assert len(done) > 25
    assert api.diff("Qwen3-8B", "full").equal


# Topics


def test_topics_are_short_and_true(ckpt: Run) -> None:
    code, out, err = ckpt("help")
    assert (code, err) == (0, "")
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)
    known = {name: {flag for each in _load(name).params for flag in each.opts} for name in COMMANDS}
    for topic in ("exit-codes", "formats", "mesh", "names", "rules", "stores"):
        assert re.search(rf"^  {topic}  ", out, re.MULTILINE)
        code, page, err = ckpt(f"help {topic}")
        assert (code, err) == (0, "")
        assert len(page.splitlines()) <= 60
        assert max(map(len, help_text.topics()[topic].splitlines())) <= 80
        for option in re.findall(OPTION, page):
            assert any(option in flags for flags in known.values()), (topic, option)
        for verb, rest in re.findall(r"ckpt ([a-z-]+) ([^`\n]*)", page):
            if verb in known:
                assert known[verb].issuperset(re.findall(OPTION, rest)), (topic, verb)
    assert len(help_text.topics()) == 6


def test_topics_have_the_tables_of_the_code() -> None:
    assert all(f"- `{name}`: " in show_help.page("formats") for name in FORMATS)
    assert all(f"- {code} {text}" in show_help.page("exit-codes") for code, text in help_text.EXIT_CODES.items())
    assert "`destination-exists`" in show_help.page("exit-codes")


# A place without a command


def test_a_place_alone_is_inspected(model: Path, tmp_path: Path, ckpt: Run) -> None:
    for place in ("model", "./model", str(model), "model/model.safetensors", f"file://{model}"):
        assert ckpt(place) == ckpt(f"inspect {place}")
        assert ckpt(place)[0] == 0
    assert json.loads(ckpt("model --json")[1]) == json.loads(ckpt("inspect model --json")[1])
    assert ckpt("model --by dtype") == ckpt("inspect model --by dtype")
    (tmp_path / "stats").mkdir()
    assert "missing argument" in ckpt("stats")[2]  # a command before a place


@pytest.mark.parametrize(
    ("line", "code", "hint"),
    [
        ("shardd", 2, "did you mean shard? See ckpt --help"),
        ("insepct model", 2, "did you mean inspect? See ckpt --help"),
        ("modle", 2, "did you mean model? See ckpt --help"),
        ("zzz", 2, "see ckpt --help"),
        ("SHARD model", 2, "did you mean shard? See ckpt --help"),
        ("''", 2, "see ckpt --help"),
        ("-- zzz", 2, "see ckpt --help"),
        ("Qwen/Qwen3-8B@main", 4, "for a repository of the Hugging Face hub, write hf://Qwen/Qwen3-8B@main"),
        ("help msh", 2, "did you mean mesh? ckpt help lists commands and topics"),
        ("./modle", 4, "did you mean ./model?"),
        ("modle/model.safetensors", 4, "did you mean model/model.safetensors?"),
        ("inspect model/modl.safetensors", 4, "did you mean model/model.safetensors?"),
        ("gather modle OUT", 4, "did you mean model?"),
        ("push modle me/it", 4, "did you mean model?"),
        ("prune modle --keep-last 1", 4, "did you mean model?"),
        ("estimate modle", 2, "did you mean model? See ckpt estimate --help"),
        ("preflight model/config.jsn", 4, "did you mean model/config.json?"),
        ("rename model OUT --map model/config.jso", 2, "did you mean model/config.json? See ckpt rename --help"),
        ("Qwen/Qwen3-8B", 4, "for a repository of the Hugging Face hub, write hf://Qwen/Qwen3-8B"),
        ("smoke Qwen/Qwen3-8B", 4, "for a repository of the Hugging Face hub, write hf://Qwen/Qwen3-8B"),
        ("estimate Qwen/Qwen3-8B", 2, "for a repository of the Hugging Face hub, write hf://Qwen/Qwen3-8B"),
        ("verify s3:/bucket/x", 4, "did you mean s3://bucket/x?"),
        ("hf:org/name", 4, "did you mean hf://org/name?"),
        ("runs/last.ckpt", 4, None),
        ("model/nothing-like-it", 4, None),
        ("shard model OUT --mehs dp_shard=2", 2, "did you mean --mesh? See ckpt shard --help"),
        ("gather model OUT --max 5GB", 2, "did you mean --max-shard-size? See ckpt gather --help"),
        ("shard model OUT -z", 2, "see ckpt shard --help"),
        ("shard model OUT --engine strem", 2, "did you mean stream? See ckpt shard --help"),
        ("inspect model --by files", 2, "did you mean file? See ckpt inspect --help"),
        ("verify model --level deep", 2, "see ckpt verify --help"),
        ("shard model OUT --world-size many", 2, "see ckpt shard --help"),
        ("shard model OUT --mesh", 2, "see ckpt shard --help"),
        ("shard model", 2, "usage: ckpt shard [OPTIONS] SRC DST. See ckpt shard --help"),
        ("shard model OUT more", 2, "see ckpt shard --help"),
        ("--json inspect model", 2, "options follow a command: ckpt COMMAND --json. See ckpt --help"),
        ("--verson", 2, "did you mean --version? See ckpt --help"),
    ],
)
def test_a_mistake_leads_on(
    line: str, code: int, hint: str | None, model: Path, ckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_JSON", "1")
    found, _, err = ckpt(line)
    assert (found, json.loads(err)["error"]["hint"]) == (code, hint)
    told = re.search(r"See (ckpt.* --help)", hint or "")
    assert told is None or ckpt(told[1])[0] == 0


# Every command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_mistakes(name: str, tmp_path: Path, ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.txt").write_text("no checkpoint\n")
    (tmp_path / "wrong.safetensors").write_bytes(b"\xff" * 64)
    needed = [each for each in _load(name).params if getattr(each, "required", False)]
    rest = "".join(f" more{number}" for number in range(len(needed) - 1))
    if needed:
        code, out, err = ckpt(name)
        assert (code, out, parts_of(err)) == (2, "", ["error", "hint"])
        assert ckpt(re.search(r"See (.*)", err)[1])[0] == 0  # type: ignore[index]
    code, out, err = ckpt(f"{name} --jsno")
    assert (code, out) == (2, "")
    assert f"did you mean --json? See ckpt {name} --help" in err or name == "help"
    mesh = " --mesh dp_shard=2" if name in ("shard", "reshard") else ""
    for word in ("nowhere", "no/such/place.safetensors", "wrong.txt", "wrong.safetensors") if needed else ():
        code, out, err = ckpt(f"{name} {word}{rest}{mesh}")
        assert code in (0, 2, 3, 4) or (name, code) == ("commit", 5), (word, err)
        assert (code in (0, 3)) == (out != ""), (word, out, err)
        assert code == 0 or out or parts_of(err)[0] == "error"
        assert {*parts_of(err)} <= {"error", "at", "hint", "note", *parts_of(err)[3:]}
