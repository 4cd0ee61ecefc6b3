"""What every test gets: fixed seeds in CI, no network, the quick tier, why marks skip, a watch on children."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports torch or transformers; child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Every option can come from the environment: a tester's own settings must not steer the tests.
for _name in [name for name in os.environ if name.startswith("CKPT_") or name == "COLUMNS"]:
    del os.environ[_name]

# A job that a script starts in the background ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("zoo", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.register_profile("all", settings.get_profile("zoo"), max_examples=50)
settings.register_profile("quick", settings.get_profile("all"), max_examples=25)

# multiprocessing starts these once and keeps them until the interpreter ends.
_HOUSEKEEPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


_LEFT, _FILES = pytest.StashKey[int](), pytest.StashKey[int]()
"""What the quick tier leaves out: tests, and whole files."""

_ALL_FULL = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.full\b(?!\()", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--zoo",
        action="store_true",
        help="walk all of what the whole run walks a part of: architectures, healthy models, calls that fail",
    )
    parser.addoption("--quick", action="store_true", help="leave out what is marked `full`, as bin/test alone does")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("quick" if config.getoption("quick") else "zoo" if config.getoption("zoo") else "all")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which the quick tier runs nothing: its imports and its cases cost more than they are worth."""
    if not config.getoption("quick") or not collection_path.name.startswith("test_"):
        return None
    is_full = bool(_ALL_FULL.search(collection_path.read_text()))
    if is_full:
        config.stash[_FILES] = config.stash.get(_FILES, 0) + 1
    return is_full or None


def _leave_out_full(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is marked `full`, but for what the nearest mark names: a test, `test[case]` or a case."""
    stay: list[pytest.Item] = []
    left: list[pytest.Item] = []
    named: set[tuple[str, str]] = set()
    met: set[tuple[str, str]] = set()
    for item in items:
        mark, case = item.get_closest_marker("full"), getattr(item, "callspec", None)
        names = {item.name, getattr(item, "originalname", item.name), case.id if case else item.name}
        but = set(mark.kwargs.get("but", ())) if mark else names
        (stay if but & names else left).append(item)
        named.update((item.path.name, name) for name in but)
        met.update((item.path.name, name) for name in names)
    if named - met and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"full(but=…) names no test: {sorted(named - met)}")
    items[:] = stay
    config.hook.pytest_deselected(items=left)
    config.stash[_LEFT] = len(left)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes: each collects everything
        session.config.workeroutput["left"] = [session.config.stash.get(key, 0) for key in (_LEFT, _FILES)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_LEFT], node.config.stash[_FILES] = getattr(node, "workeroutput", {}).get("left", (0, 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, 0):
        files = config.stash.get(_FILES, 0)
        terminalreporter.write_line(f"The quick tier: {left} more tests, and {files} files, run with bin/test --all")


def _mark_zoo(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that zoo.txt lists; fail where it lists one of a collected test that there is not."""
    here = Path(__file__).parent
    rows = [line.split() for line in (here / "zoo.txt").read_text().splitlines() if line[0] != "#"]
    tests: dict[str, dict[str, pytest.Item]] = {test: {} for test, *_ in rows}
    for item in items:
        test = f"{item.path.relative_to(here)}::{getattr(item, 'originalname', item.name)}"
        if test in tests and (case := getattr(item, "callspec", None)) is not None:
            tests[test][case.id] = item
    for test, *cases in rows:
        for case in cases:
            if case in tests[test]:
                tests[test][case].add_marker(pytest.mark.zoo)
            elif tests[test] and not any("::" in argument for argument in config.args):
                raise pytest.UsageError(f"tests/zoo.txt: {test} has no case {case}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not quick, if asked; skip, with the reason, what cannot run here or is not asked for."""
    _mark_zoo(config, items)
    if config.getoption("quick"):
        _leave_out_full(config, items)
    is_asked_for = "root" in (config.getoption("markexpr") or "")
    needs = (
        ("root", lambda: is_asked_for, "mounts file systems: bin/test -m root"),
        ("root", lambda: os.geteuid() == 0, "needs root (loop devices, mounts, cgroups)"),
        ("gpu", _has_cuda, "needs a CUDA device"),
        ("zoo", lambda: bool(config.getoption("zoo")), "one of many of its kind: bin/test --zoo"),
    )
    for mark, is_met, reason in needs:
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and not is_met():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _children() -> dict[int, str]:
    """Command line of every living child process, by process id."""
    found: dict[int, str] = {}
    for thread in Path("/proc/self/task").glob("*/children"):
        try:
            pids = thread.read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            # A zombie has no command line: it has ended and only waits to be collected.
            if command and not any(name in command for name in _HOUSEKEEPERS):
                found[int(pid)] = command
    return found


@pytest.fixture(autouse=True)
def _no_stray_children() -> Iterator[None]:
    """Fail a test that leaves a child process running."""
    before = _children()
    yield
    strays = {pid: command for pid, command in _children().items() if pid not in before}
    assert not strays, f"child processes still running: {strays}"
