"""Every command over the attack corpus, in a process that is watched; and the watch itself.

`python -m corrupt.attacks` (with PYTHONPATH=tests) runs the same and prints the totals; `--list` names the attacks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from corrupt.attacks import ALL, Corpus, watch
from corrupt.attacks.audit import GROUPS, run_group
from samples import memory_directory


@pytest.fixture(scope="module")
def corpus() -> Iterator[Corpus]:
    with memory_directory() as directory:
        corpus = Corpus(root=Path(directory) / "corpus")
        corpus.build()
        yield corpus
        # Files that are not UTF-8 and pipes: shutil knows how.
        shutil.rmtree(corpus.root)


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
def test_attacks_are_refused_or_harmless(corpus: Corpus, group: str, record_property, pytestconfig) -> None:
    """Every command in text or in JSON, by turns; with --zoo in both."""
    report = run_group(corpus, group, whole=pytestconfig.getoption("zoo"))
    record_property("totals", str(report))
    print(report)
    assert report.problems == []
    assert (report.executions, report.imports, report.opens, report.changes, report.tracebacks) == (0, 0, 0, 0, 0)
    assert report.wrong_outputs == 0
    assert report.num_recipes == len(ALL) >= 500
    assert report.num_runs >= len(GROUPS[group]) * report.num_recipes


def test_attacks_are_described() -> None:
    assert [recipe.name for recipe in ALL.values() if len(recipe.tries) < 4] == []
    for recipe in ALL.values():
        assert all(code in (0, 1, 2, 3, 4, 5) for codes in recipe.codes.values() for code in codes)
        # 1 is for what is not the source's fault: a destination that somebody else prepared.
        assert all(1 not in codes for codes in recipe.codes.values()) or recipe.name.startswith("destination-staging")


# The watch sees what it is there for

DEEDS = {
    "execution": {
        "os.system('true')": "os.system",
        "__import__('subprocess').run(['true'])": "subprocess.Popen",
        "exec('1 + 1')": "exec",
        "eval('1 + 1')": "exec",
        "__import__('socket').socket().close()": "socket.__new__",
        "__import__('pickle').loads(b'cos\\nsystem\\n.')": "pickle.find_class",
        "os.posix_spawn('/bin/true', ['true'], {})": "os.posix_spawn",
        "os.waitpid(os.fork() or os._exit(0), 0)": "os.fork",
        "__import__('ctypes').CDLL(None)": "ctypes.dlopen",
        "__import__('mmap').mmap(os.open(here, os.O_RDONLY), 1, prot=1)": "mmap.__new__",
        "os.chmod(inside, 0o600)": "os.chmod",
        "os.symlink('x', inside + '/link')": "os.symlink",
    },
    "import": {"import wave": "import"},
    "open": {
        "open('/etc/passwd').close()": "open",
        "open(inside + '/../../secret').close()": "open",
        "open(inside + '/out').close()": "open",
        "os.listdir('/etc')": "os.listdir",
        "open('/proc/self/environ').close()": "open",
        "source(inside).read('../../secret', 0, 1)": "",
        "source(inside + '/..').read('elsewhere', 0, 1)": "open",
    },
    "change": {
        "open(inside + '/new', 'w').close()": "open",
        "os.mkdir(inside + '/new')": "os.mkdir",
        "os.remove(inside + '/file')": "os.remove",
        "os.rename(out, inside + '/moved')": "os.rename",
        "os.open(inside + '/file', os.O_WRONLY)": "open",
        "shutil.rmtree(inside)": "shutil.rmtree",
        "os.truncate(inside + '/file', 0)": "os.truncate",
    },
    "nothing": {
        "open(inside + '/file').close()": "",
        "open(out + '/new', 'w').close()": "",
        "os.mkdir(out + '/directory'); os.rmdir(out + '/directory')": "",
        "source(inside).read('file', 0, 1)": "",
        "import json": "",
    },
}
SCRIPT = """
import os, shutil, sys
sys.path.insert(0, {watch!r})
import watch, json, socket, subprocess, pickle, ctypes, mmap, contextlib
from ckpt_tools.errors import CkptError
from ckpt_tools.storage.source import LocalSource
root = {root!r}
inside, out, here = root + "/in/source", root + "/out", watch.__file__
guard = watch.Watch()
guard.roots, guard.writable = (os.path.realpath(inside),), os.path.realpath(out)
def source(path):
    return LocalSource(path)
source(inside).read("file", 0, 1)
sys.addaudithook(guard.hook)
code = compile({deed!r}, "deed", "exec")
guard.known.add(watch._source_of(code))
guard.armed = True
with contextlib.suppress(CkptError, OSError, pickle.UnpicklingError):
    exec(code)
guard.armed = False
print(json.dumps(guard.seen))
"""


def _watched(tmp_path: Path, deed: str) -> list[list[str]]:
    (tmp_path / "in" / "source").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "in" / "elsewhere").write_text("secret")
    (tmp_path / "in" / "source" / "file").write_text("data")
    (tmp_path / "in" / "source" / "out").symlink_to("../../secret")
    script = SCRIPT.format(watch=os.path.dirname(watch.__file__), root=str(tmp_path), deed=deed)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "deed", "event"), [(kind, deed, event) for kind, deeds in DEEDS.items() for deed, event in deeds.items()]
)
def test_watch_sees_deeds(tmp_path: Path, kind: str, deed: str, event: str) -> None:
    seen = _watched(tmp_path, deed)
    if not event:
        assert seen == []
    else:
        assert (kind, event) in {(found, name) for found, name, _ in seen}


@pytest.mark.parametrize("text", ["a\x1b[2J", "\x9b", "\u202e", "\u200b", "\r", "\t", "\u2028", "\ue000", "\ufe0f"])
def test_watch_sees_unsafe_characters(text: str) -> None:
    assert watch.unsafe_characters(text)
    assert not watch.unsafe_characters("plain text, …, é, \\x1b\nand lines")
