"""Scripts are read as bash reads them, or a variable stays what it is: bash itself is asked."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings, strategies as st
from samples import examples

from ckpt_tools.preflight.configs.commands import read_script

BASH = shutil.which("bash")
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


CERTAIN = {
    "words": "launch a 'b c' \"d e\" f\\ g ''",
    "joined": "launch a'b'\"c\"d",
    "comment": "launch a # b\n",
    "no comment": "launch a#b '#c'",
    "continued": "launch a \\\n  b \\\n  c",
    "continued in quotes": 'launch "a \\\nb"',
    "escapes in quotes": r'launch "a\"b" "a\$b" "a\nb" "a\\b"',
    "ansi": "launch $'a\\nb\\'c' $\"d\"",
    "several lines in quotes": "launch 'a\nb'",
    "redirections": "launch a 2> /dev/null b 3>&1 < /dev/null",
    "or": "launch a b || launch c",
    "variable": 'X=1; launch $X ${X} "$X" a${X}b',
    "variable with blanks": "X='a b'; launch $X \"$X\" $X$X",
    "variable of variables": 'A=1 B=x; C="$A-$B"; launch $C',
    "export": "export X=1 Y='a b'; launch $X \"$Y\"",
    "declare": "declare -a A=(1 2); readonly B=3; launch ${A[@]} $B",
    "default": 'launch ${X:-a} "${X:-b c}" ${X-d} ${X:-} e',
    "default in quotes": 'X=${X:-"a b"}; launch "$X" ${Y:-\'c\'}',
    "quoted default": 'launch "${X:-a b}"',
    "default of a variable": "Y=1; launch ${X:-$Y} ${X:-${Y}/z}",
    "default of an assigned": 'X=1; Y=; launch ${X:-2} "${Y:-3}" "${Y-4}"',
    "assigned default": "X=${X:-a/b}; launch $X",
    "array": "A=(--a 1\n  # comment\n  'b c' # more\n)\nlaunch \"${A[@]}\" x",
    "array that grows": "A=(a)\nA+=(b 'c d')\nlaunch \"${A[@]}\"",
    "array in an array": 'A=(a \'b c\'); B=("${A[@]}" d); launch "${B[@]}"',
    "empty array": 'A=(); launch a "${A[@]}" b',
    "array in a word": 'A=(1 2); launch x"${A[@]}"y',
    "text that grows": "X=a; X+=b; launch $X",
    "arithmetic": "N=4; launch $((N * 2)) $((1024*8+N)) $((7 / 2)) $(( (1+2)*3 )) $(($N%3))",
    "here-document": "read -r -d '' X <<EOF\na \\\n  --b 'c'\nEOF\nlaunch $X",
    "here-document with a variable": "N=3\nread -r -d '' X <<EOF\na $N ${M:-4}\nEOF\nlaunch $X",
    "part of a value": "X='a b'; Y=\"--z $X\"; launch $Y",
    "here-document that is literal": "read -r -d '' X <<'EOF'\na b\nEOF\nlaunch $X",
    "here-document of another command": "cat <<EOF > /dev/null\nlaunch wrong\nEOF\nlaunch right",
    "environment of one command": "X=1; X=2 launch $X",
    "branches": "if [ 1 = 2 ]; then :; else :; fi; launch a",
    "after a function": "f() { echo a; }\nfunction g { echo b; }\nlaunch a",
    "in a branch": "X=1\nif true; then\n  launch $X\nfi",
    "in a subshell": "X=1\n( launch $X )",
    "case": "case a in a) X=1;; b|c) X=2;; esac\nlaunch b",
    "conditional": "true && launch a b",
    "not after it": "X=1\nfalse && X=2\nY=3; launch $Y",
    "semicolons": "X=1;launch $X;launch 2",
    "glued operators": "X=1&&launch $X",
    "of a function": "X=1; f() { X=2; }; f; launch $X",
    "of a function that is not called": "X=1; f() { X=2; }; launch $X",
    "in a function": "f() { launch $1 $X; }; X=1; f 2",
    "in a function with local variables": "X=1\nf() {\n  local X=2 Y=$1\n  Z=$X$Y\n}\nf 3; launch $X $Z",
    "in a function of the other spelling": "function f { launch \"$@\" $#; }\nf 'a b' c",
    "in a function that returns": "f() { X=1; return; X=2; }\nf; launch $X",
    "in a function with branches": "f() {\n  if [ 1 = 2 ]; then\n    :\n  fi\n  X=3\n}\nf; launch $X",
    "function in a function": 'g() { X=$1; }\nf() { g "$1" ; }\nf \'a b\'; launch "$X"',
    "function with a loop and braces": "f() { for i in 1 2; do { :; }; done; X=4; }\nf; launch $X",
    "function that shifts": 'f() { shift; launch "$@"; }\nf a b c',
    "no arguments in one": 'launch "$*" $* a',
    "no arguments": 'f() { launch "$@" a; }\nf "$@"',
    "arguments that were set": "set -- a 'b c'; launch \"$@\" $2 $#",
    "item": "A=(1 2); launch ${A[0]} ${#A[@]}",
    "items from": 'A=(1 "2 3" 4); launch "${A[@]:1}" ${A[@]:0:2}',
    "cut": "X=a/b.c/d/; launch ${X##*/} ${X%/} ${X%%/*} ${X#*/} ${X%.c*} ${X%x}",
    "replaced": "X=a-b-c; launch ${X/-/+} ${X//-/} ${X//b/z}",
    "letters": "X=aB; launch ${X,,} ${X^^}",
    "part": "X=abcdef; launch ${X:2} ${X:1:3} ${#X}",
    "assigned default of nothing": ': "${X:=a b}"; launch "$X"',
    "alternative": "X=1; Y=; launch ${X:+a} ${Y:+b} ${Y+c} ${Z:+d} e",
    "after exit": "X=1\nif [ 1 = 2 ]; then exit 3; fi\nlaunch $X\nexit 0\nX=2",
    "in a function of both spellings": "function f() {\n launch a; }\nf",
    "braces in a line": "{ X=1; Y=2; }; launch a",
}
UNKNOWN = {
    "of the environment": "launch $X",
    "first argument": "X=$1; launch $X",
    "command": "X=$(date); launch $X",
    "backticks": "X=`date`; launch $X",
    "in a branch": "X=1; if true; then X=2; fi; launch $X",
    "in a loop": "for X in 1 2; do launch $X; done",
    "conditional": 'X=1; [ -z "$Y" ] && X=2; launch $X',
    "sourced": "X=1; source other.sh; launch $X",
    "default after sourcing": ". ./other.sh; launch ${X:-1}",
    "evaluated": 'X=1; eval "X=2"; launch $X',
    "read": "X=1; read X < /dev/null; launch $X",
    "counted": "X=1; ((X++)); launch $X",
    "items by name": "declare -A A=([a]=1); launch ${A[@]}",
    "array that grows in a branch": 'A=(a); if true; then A+=(b); fi; launch "${A[@]}"',
    "default that is a command": "launch ${X:-$(nproc)}",
    "arithmetic of unknowns": "launch $((N * 2))",
    "quotes in a default": 'launch ${X:-"a b"}',
    "blanks in a command": "X=$(cat a --b c); launch $X",
    "default that may count": "X=$Y; launch ${X:-a}",
    "unset": "X=1; unset X; launch $X",
    "of a function that may be called": "X=1; f() { X=2; }; $F; launch $X",
    "of a function that is called in a branch": "f() { X=2; }; if true; then f; fi; launch $X",
    "of a function after it may have returned": "f() { if true; then return; fi; X=2; }\nX=1; f; launch $X",
    "of a function that calls itself": "f() { X=1; f; }; f; launch $X",
    "of a function after a pipe": "f() { X=2; }\nX=1; f | cat; launch $X",
    "of a function that is defined in a branch": "if true; then f() { X=2; }; fi\nX=1; f; launch $X",
    "argument after one that may be several": "f() { launch $2; }\nf $X a",
    "of a function that is a subshell": "X=1; f() ( X=2 )\nf; launch $X",
    "of a function in the background": "f() { X=2; }\nX=1; f & launch $X",
    "cut by a pattern": "X=abc; launch ${X%[bc]*}",
    "shifted in a branch": "set -- a b; if true; then shift; fi; launch $1",
}


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


FILES = {
    "env.sh": "NODES=2\nexport OUT=/x\n",
    "common/args.sh": 'ARGS=(--lr 1 "$1")\n',
    "inner.sh": 'launch "$@" $SEEN $HIDDEN\n',
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("source env.sh\nlaunch $NODES", ["2"]),
        (". ./env.sh; launch $((NODES * 4))", ["8"]),
        ('source "$(dirname "$0")/env.sh"; launch $NODES', ["2"]),
        ('HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\n. "$HERE/env.sh"; launch $NODES', ["2"]),
        ('HERE=$(cd -- "$(dirname -- "$0")/.." &> /dev/null; pwd -P)\nlaunch ${HERE##*/}', ["jobs"]),
        ("source common/args.sh 'a b'\nlaunch \"${ARGS[@]}\"", ["--lr", "1", "a b"]),
        ("if true; then source env.sh; fi\nlaunch $NODES", ["$NODES"]),
        ("[ -f env.sh ] && source env.sh\nlaunch $NODES", ["$NODES"]),
        ("NODES=1\nsource missing.sh\nlaunch $NODES", ["$NODES"]),
        ("export SEEN=1; HIDDEN=2; bash inner.sh a 'b c'", ["a", "b c", "1", "$HIDDEN"]),
        ("SEEN=1 ./inner.sh", ["1", "$HIDDEN"]),
        ("X=1; export X; srun --label bash -c 'Y=2; launch $X $Y'", ["1", "2"]),
        ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node 8 # all\nlaunch $SLURM_NNODES $SLURM_GPUS_ON_NODE", ["4", "8"]),
        ("#SBATCH -N 2\n#SBATCH --ntasks-per-node=4\nlaunch $((SLURM_NNODES * 1)) $SLURM_NTASKS", ["2", "8"]),
        ("#SBATCH --gres=gpu:h100:8\nlaunch $SLURM_GPUS_ON_NODE", ["8"]),
        ("#SBATCH --nodes=2-4\nlaunch $SLURM_NNODES", ["$SLURM_NNODES"]),
    ],
)
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
