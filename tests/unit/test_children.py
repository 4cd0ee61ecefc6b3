"""A function in a process of its own: what it answers, how it ends, what is left of it."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools import errors
from ckpt_tools.errors import CkptError, LimitError, StorageError
from ckpt_tools.sandbox.child import Child, Here, describe_end, environment
from ckpt_tools.sandbox.wire import error_from_json, error_to_json

BIG = 10 << 20


# What children do.


def echo(job: Any, here: Here):
    return {**job, "parent": here.parent}


def refuse(job: Any, here: Here):
    raise LimitError("too much", where="here", hint="less")


def fail(job: Any, here: Here):
    print("not the reason")
    raise ValueError("the \x1b[31mreason")


def die(job: Any, here: Here):
    print("the last word", flush=True)
    os.kill(os.getpid(), job["number"])
    time.sleep(60)


def crash(job: Any, here: Here):
    faulthandler._sigsegv()


def sleep(job: Any, here: Here):
    time.sleep(60)


def sleep_deaf(job: Any, here: Here):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(here.directory, "ready").touch()
    time.sleep(60)


def leave(job: Any, here: Here):
    os._exit(job["status"])


def print_rubbish(job: Any, here: Here):
    os.write(1, b'\xff\x00{"result": 1}\n' * 1000)
    os.write(2, b"\xfe" * 100_000)
    return {"fine": True}


def print_much(job: Any, here: Here):
    for number in (1, 2):
        for _ in range(10):
            os.write(number, b"x" * (BIG // 10))
    return {"text": "ä" * BIG}


def print_much_and_fail(job: Any, here: Here):
    os.write(1, b"x" * BIG)
    raise RuntimeError("at last")


def cut_short(job: Any, here: Here):
    Path(here.directory, "result.json").write_text('{"result": {"a"')
    os._exit(0)


def describe(job: Any, here: Here):
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "stdin": os.read(0, 1).decode(),
        "temporary": tempfile.gettempdir(),
        "environment": dict(os.environ),
        "path": sys.path,
    }


def tell(job, *pids):
    part = Path(job["file"] + ".part")
    part.write_text(json.dumps(pids))
    part.rename(job["file"])


def be_alone(job: Any, here: Here):
    tell(job, os.getpid())
    time.sleep(60)


def be_family(job: Any, here: Here):
    """Have a child that ends when told to and one that does not, tell who they are, and wait."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    mild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        tell(job, os.getpid(), mild.pid, other.pid)
        if job["wait"]:
            time.sleep(60)
        os._exit(0)


# What is seen of them.


def child(function, job=None, **options):
    return Child(f"{__name__}:{function.__name__}", job or {}, object, does="is tried", **options)


def result_of(function, job=None, **options):
    with child(function, job) as started:
        return started.result(**options)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def read_pids(file):
    wait_for(file.exists)
    return json.loads(file.read_text())


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    """Whatever happens, nothing is left of a directory."""
    directory = tmp_path / "private"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert not list(directory.iterdir())


def test_child_returns_what_the_function_returns():
    answer = result_of(echo, {"a": [1, None, "ä\udcff"]})
    assert answer["a"] == [1, None, "ä\udcff"]
    assert answer["parent"] == os.getpid()


def test_child_that_refuses_raises_the_same_error_here():
    with pytest.raises(LimitError, match="too much") as caught:
        result_of(refuse)
    assert (caught.value.where, caught.value.hint) == ("here", "less")
    assert not getattr(caught.value, "__notes__", [])


def test_child_that_fails_is_told_by_its_last_words_made_safe():
    with pytest.raises(CkptError) as caught:
        result_of(fail)
    assert caught.value.what == r"the process that is tried failed: ValueError: the \x1b[31mreason"
    (note,) = caught.value.__notes__
    assert "not the reason" in note
    assert "Traceback" in note
    assert "\x1b" not in note


@pytest.mark.parametrize(
    ("number", "what", "hint"),
    [
        (signal.SIGKILL, "was killed by SIGKILL", "the machine may have run out of memory: make room"),
        (signal.SIGTERM, "was killed by SIGTERM", None),
        (signal.SIGRTMIN + 3, f"was killed by signal {signal.SIGRTMIN + 3}", None),
    ],
)
def test_child_that_is_killed_is_reported_with_what_to_do(number, what, hint):
    with child(die, {"number": int(number)}, relief="make room") as started, pytest.raises(CkptError) as caught:
        started.result()
    assert caught.value.what == f"the process that is tried {what}"
    assert caught.value.hint == hint
    assert caught.value.__notes__ == ["the last word"]


@pytest.mark.full
def test_child_whose_library_crashes_says_where():
    with pytest.raises(CkptError, match="was killed by SIGSEGV") as caught:
        result_of(crash)
    assert "a compiled library" in caught.value.hint
    assert "in crash" in caught.value.__notes__[0]


@pytest.mark.full(but=["leave with 7"])
@pytest.mark.parametrize(
    ("function", "job", "what"),
    [
        (leave, {"status": 0}, "failed: exit status 0"),
        (leave, {"status": 7}, "failed: exit status 7"),
        (cut_short, {}, "returned an answer that cannot be read"),
    ],
    ids=["leave with 0", "leave with 7", "an answer cut short"],
)
def test_child_that_leaves_without_a_whole_answer_is_an_error(function, job, what):
    with pytest.raises(CkptError, match=what):
        result_of(function, job)


@pytest.mark.full
@pytest.mark.parametrize(("function", "timeout_s"), [(sleep, 1.0), (sleep_deaf, 0.1)], ids=["silent", "deaf"])
def test_child_past_its_deadline_is_ended(function, timeout_s):
    with child(function) as started:
        wait_for(lambda: function is sleep or Path(started.directory, "ready").exists())
        with pytest.raises(CkptError, match=f"took more than {timeout_s:.0f} s"):
            started.result(timeout_s=timeout_s)
        assert not is_alive(started._process.pid)


@pytest.mark.full
def test_child_that_writes_much_or_rubbish_still_answers():
    assert result_of(print_rubbish) == {"fine": True}
    assert result_of(print_much) == {"text": "ä" * BIG}
    with pytest.raises(CkptError, match="RuntimeError: at last") as caught:
        result_of(print_much_and_fail)
    assert len(caught.value.__notes__[0]) < 5000


@pytest.mark.full
def test_child_lives_apart_from_terminal_torchrun_and_network(monkeypatch, tmp_path):
    here = {"RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "x", "CKPT_JSON": "1"}
    for name, value in (here | {"OMP_NUM_THREADS": "64", "MY_RANK": "kept"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    found = result_of(describe)
    assert found["parent"] == os.getpid()
    assert found["session"] == found["pid"]
    assert found["stdin"] == ""
    assert "" not in found["path"]
    seen = found["environment"]
    assert not set(here) & set(seen)
    assert found["temporary"] == seen["TMPDIR"]
    assert not os.path.exists(found["temporary"])
    expected = {"OMP_NUM_THREADS": "1", "MY_RANK": "kept", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert expected.items() <= seen.items()
    assert seen["GLOO_SOCKET_IFNAME"] == "lo"


def test_environment_with_gpus_leaves_those_that_the_caller_may_see(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environment("/x", gpu=True)["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment("/x")["CUDA_VISIBLE_DEVICES"] == ""


SECRETS = (
    "AZURE_STORAGE_KEY AZURE_STORAGE_CONNECTION_STRING AWS_SESSION_TOKEN AWS_ACCESS_KEY_ID GH_PAT PGPASSWORD HF_TOKEN"
    " MYSQL_PWD GOOGLE_APPLICATION_CREDENTIALS NVIDIA_API_KEY DATABASE_URL SSH_AUTH_SOCK HTTPS_PROXY FIREBASE_X NEW"
)


def test_walled_child_has_of_the_environment_what_libraries_need(monkeypatch):
    needed = ("PATH", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "NCCL_DEBUG", "PYTORCH_ALLOC_CONF", "PYTHONPATH")
    for name in (*SECRETS.split(), *needed):
        monkeypatch.setenv(name, "/it")
    with child(describe, sandboxed=True) as started:
        seen = started.result()["environment"]
    assert not set(SECRETS.split()) & set(seen)
    assert {name: seen.get(name) for name in needed} == dict.fromkeys(needed, "/it")
    with child(describe) as started:  # what is the user's own has all of it
        assert set(SECRETS.split()) <= set(started.result()["environment"])


BUILD = """
import sys
from ckpt_tools.sandbox.audit import Sandbox, in_sandbox
with in_sandbox(Sandbox(subject="a model", where="x", scratch=sys.argv[1])):
    import email.mime.text, wave
"""


def test_healthy_model_is_built_where_bytecode_has_a_place_of_its_own(tmp_path):
    command = [sys.executable, "-c", BUILD, str(tmp_path / "scratch")]
    here = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    here.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([sys.executable, "-c", "import email.mime.text, wave"], env=here, check=True)
    assert list((tmp_path / "cache").rglob("wave*.pyc"))
    done = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
@pytest.mark.parametrize("wait", [True, False])
def test_child_takes_what_it_has_started_with_it(tmp_path, wait):
    file = tmp_path / "pids"
    with child(be_family, {"file": str(file), "wait": wait}) as started:
        pids = read_pids(file)
        if not wait:
            with pytest.raises(CkptError, match="exit status 0"):
                started.result()
    wait_for(lambda: not any(map(is_alive, pids)), 2)


PARENT = """
import os, sys, tempfile, time
sys.path[:0] = [sys.argv[1]]
from ckpt_tools.sandbox.child import Child
with Child(f"test_children:{sys.argv[2]}", {"file": sys.argv[3], "wait": True}, object, does="is tried") as child:
    child.result(None)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("does", "number", "seconds"),
    [("be_family", signal.SIGKILL, 5), ("be_family", signal.SIGINT, 5), ("be_alone", signal.SIGKILL, 1)],
)
def test_parent_that_is_ended_leaves_no_process_and_no_file(tmp_path, private, does, number, seconds):
    command = [sys.executable, "-c", PARENT, os.path.dirname(__file__), does, str(tmp_path / "pids")]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(private)}, stderr=subprocess.DEVNULL) as process:
        try:
            pids = read_pids(tmp_path / "pids")
            assert list(private.iterdir())
            process.send_signal(number)
            process.wait(timeout=10)
            wait_for(lambda: not any(map(is_alive, pids)), seconds)
            wait_for(lambda: not list(private.iterdir()), 2)
        finally:
            process.kill()


def test_interrupt_while_a_child_is_awaited_ends_it_at_once():
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    with child(sleep) as started:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            started.result()
    timer.join()
    assert not is_alive(started._process.pid)


@pytest.mark.full
def test_child_of_a_thread_that_blocks_signals_still_ends():
    def work():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        with child(sleep) as started:
            time.sleep(0.5)
            begun.append(time.monotonic())
        begun.append(time.monotonic())
        assert not is_alive(started._process.pid)

    begun = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert begun[1] - begun[0] < 2


def test_waiting_caller_is_called_often_and_after_the_end():
    calls = []
    with child(echo) as started:
        started.result(on_wait=lambda: calls.append(os.path.exists(os.path.join(started.directory, "result.json"))))
    assert calls[0] is False
    assert calls[-1] is True


@pytest.mark.parametrize("lacks", ["the interpreter", "the temporary directory"])
def test_child_that_cannot_be_started_is_an_error_of_the_system(monkeypatch, private, lacks):
    what = "the process that is tried cannot be started: No such file"
    if lacks == "the interpreter":
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(private / "missing"))
        what = "cannot be started"
    with pytest.raises(StorageError, match=what), child(echo):
        pass


@pytest.mark.parametrize("kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, CkptError)])
def test_errors_survive_the_way_between_processes(kind):
    error = error_from_json(json.loads(json.dumps(error_to_json(kind("what", where="where", hint=None)))))
    assert type(error) is kind
    assert (error.what, error.where, error.hint) == ("what", "where", None)

    class OtherError(kind):
        """Is not known where it arrives."""

    assert type(error_from_json(error_to_json(OtherError("what")))) is CkptError


def test_describe_end_of_an_exit_status_blames_nothing():
    assert describe_end(3, "make room") == ("ended with exit status 3", None)
