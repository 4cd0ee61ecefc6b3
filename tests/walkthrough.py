"""Runs a page: files that it names are written, commands of its console blocks run, their output is put below them.

PYTHONPATH=tests .venv/bin/python -m walkthrough     rewrites docs/first-conversion.md
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "first-conversion.md"
_BLOCK = re.compile(r"^```(python|console)(?: title=\"(\S+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MEASURED = re.compile(r"in \d[\d.]* s \([\d.]+ \w+/s\), peak memory [\d.]+ \w+")
_WORDS = {"ckpt ": f"{sys.executable} -m ckpt_tools ", "python ": f"{sys.executable} "}


def settled(text: str) -> str:
    """A page without what another run measures otherwise."""
    return _MEASURED.sub("in … s", text)


def walk(text: str, at: Path) -> str:
    """The page with what its commands print now, run in the folder `at`."""
    last = [0]
    return _BLOCK.sub(lambda block: _run(block, at, last), text)


def _run(block: re.Match[str], at: Path, last: list[int]) -> str:
    kind, title, body = block.groups()
    if kind == "python":
        (at / title).write_text(body, encoding="utf-8")
        return block[0]
    lines = []
    for command in re.findall(r"^\$ (.*)$", body, re.MULTILINE):
        lines += [f"$ {command}", *_printed(command, at, last)]
    new = "```console\n" + "\n".join(lines) + "\n```"
    return block[0] if settled(new) == settled(block[0]) else new


def _printed(command: str, at: Path, last: list[int]) -> list[str]:
    if command == "echo $?":
        return [str(last[0])]
    line = command
    for word, real in _WORDS.items():
        line = real + line.removeprefix(word) if line.startswith(word) else line
    names = ("PATH", "HOME", "PYTHONPATH", "TMPDIR", "LD_LIBRARY_PATH")
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "100", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        line, cwd=at, env=env, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    last[0] = done.returncode
    if done.returncode not in (0, 3) or (done.returncode == 3 and "diff" not in command):
        raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout}")
    return [each.rstrip() for each in done.stdout.splitlines()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(walk(PAGE.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")
