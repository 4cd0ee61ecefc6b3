"""Scripts are read as bash reads them, or a variable stays what it is: bash itself is asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st
from samples import examples

from ckpt_tools.preflight.configs.commands import read_script

BASH = shutil.which("bash")
_SCRIPTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("shell_scripts.yaml").read_text(encoding="utf-8"))
CERTAIN, UNKNOWN, FILES = (_SCRIPTS[name] for name in ("certain", "unknown", "files"))
needs_bash = pytest.mark.skipif(BASH is None, reason="bash is the judge")


def ask_bash(script: str) -> list[str] | None:
    """The words after `launch`, as bash hands them over; None where bash stops before."""
    stub = 'launch() { for word in "$@"; do printf \'%s\\0\' "$word"; done; exit 0; }\n'
    done = subprocess.run(
        [str(BASH), "--norc", "-c", stub + script],
        capture_output=True,
        env={"PATH": "/nowhere"},
        timeout=20,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.decode().split("\0")[:-1] if done.returncode == 0 else None


def launched(script: str) -> list[str]:
    """The words after `launch`, as they are read here."""
    return next(list(words[1:]) for words in read_script(script).commands if words[0] == "launch")


@needs_bash
@pytest.mark.parametrize("name", CERTAIN)
def test_words_are_those_that_bash_hands_over(name: str) -> None:
    assert launched(CERTAIN[name]) == ask_bash(CERTAIN[name])


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_running_the_script_stays_a_variable(name: str) -> None:
    assert any(mark in word for word in launched(UNKNOWN[name]) for mark in "$`")


WORDS = st.lists(
    st.sampled_from(
        [
            "a", "b c", "'q q'", '"d d"', "\\ ", "\\\n", "\n", ";", " ", "  ", "$X", "${X}", '"$X"', "${Y:-d e}",
            '"${Y:-f}"', "#", "'", '"', "$'\\n'",
            "X=1", "X='m n'", "\nX=2\n", "A=(x 'y z')\n", '"${A[@]}"', "&& ", "=", "$((2*3))",
            "launch ", "\nlaunch ", "\\$", "$",
        ]
    ),
    max_size=10,
)  # fmt: skip


@needs_bash
@settings(max_examples=examples(150), deadline=None)
@given(words=WORDS)
def test_any_words_are_those_of_bash_or_stay_variables(words: list[str]) -> None:
    script = "launch " + "".join(words)
    try:
        ours = launched(script)
    except ValueError:
        return  # refused: a quote that is never closed
    theirs = ask_bash(script)
    if theirs is None:
        return
    assert ours == theirs or any("$" in word for word in ours)


def test_what_is_known_of_a_value_is_read_beside_what_is_not() -> None:
    assert launched('X="--a $HOME/m --b 1 $MORE"; launch $X') == ["--a", "$HOME/m", "--b", "1", "$MORE"]


def test_defaults_that_were_taken_are_named() -> None:
    assert read_script("A=${MODEL:-x}\nB=1\nlaunch $A ${B:-2}").assumed == ("MODEL",)


@pytest.mark.parametrize(
    "text", ["launch 'a", 'launch "a', "A=(a", "launch ${X", "launch $(a", "cat <<EOF\na", "launch `a", "A=(a; b)"]
)
def test_what_is_never_closed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"clos|no closing|no end|operator"):
        read_script(text)


@pytest.mark.parametrize(
    "text",
    [
        "X=aaaaaaaaaaaaaaaa\n" + "X=$X$X\n" * 60,
        "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60,
        "A=(a b)\n" + 'A+=("${A[@]}")\n' * 60,
        "X=" + "a" * 1000 + "\n" + "launch $X$X$X$X$X$X$X$X\n" * 1000,
        "{\n" * 1000,
        "launch " + "${X:-" * 2000 + "}" * 2000,
        "launch " + '"$(' * 2000 + ')"' * 2000,
        "f0() { :; }\n" + "".join(f"f{i + 1}() {{ f{i}; f{i}; f{i}; }}\n" for i in range(14)) + "f14\n",
    ],
)
def test_script_that_stands_for_more_than_any_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"more than|too deep"):
        read_script(text)


@pytest.mark.parametrize("text", ['f() { launch "$@"; }; x', 'set -- $X\nshift 2\nlaunch "$@"'])
def test_arguments_of_a_function_are_not_those_of_the_script(text: str) -> None:
    assert launched(text)[0] not in ("$@", "a")


@pytest.mark.parametrize(("text", "words"), _SCRIPTS["with files and jobs"])
def test_files_and_jobs_say_what_they_say(text: str, words: list[str]) -> None:
    def open_file(name: str) -> tuple[str, str] | None:
        found = name.replace("/home/jobs/run/", "").removeprefix("./")
        return (f"/home/jobs/run/{found}", FILES[found]) if found in FILES else None

    script = read_script(text, path="/home/jobs/run/job.sh", open_file=open_file)
    found = next(words for words in script.commands if "launch" in words)
    assert list(found[found.index("launch") + 1 :]) == words
    assert bool(script.absent) == ("missing" in text)


def test_files_that_a_script_writes_are_known_unless_they_may_differ() -> None:
    text = "N=3\ncat > a.yaml <<EOF\nn: $N\nm: $M\nEOF\n"
    text += "cat <<'EOF' > b.yaml\nx: $N\nEOF\ncat <<EOF | tee c.yaml\ny\nEOF\n"
    assert read_script(text).written == {"a.yaml": "n: 3\nm: $M", "b.yaml": "x: $N", "c.yaml": "y"}
    for more in (
        "echo x >> a.yaml",
        "sed -i s/3/4/ a.yaml",
        "cat >> a.yaml <<EOF\nz\nEOF",
        "if true; then\ncat > a.yaml <<EOF\nz\nEOF\nfi",
    ):
        assert read_script(f"{text}{more}\n").written["a.yaml"] is None


def test_words_know_their_lines() -> None:
    script = read_script('A=(\n  --a 1\n  --b\n)\nlaunch \\\n  x \\\n  "${A[@]}" y\n', path="run.sh")
    assert [(str(word), word.place.line) for word in script.commands[0]] == [  # type: ignore[attr-defined]
        ("launch", 5), ("x", 6), ("--a", 2), ("1", 2), ("--b", 3), ("y", 7)
    ]  # fmt: skip
