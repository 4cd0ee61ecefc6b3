"""Configs of strangers that try to reach a loader: refused by name, or ended by walls, and nothing is ever touched.

`PYTHONPATH=tests:. python -m corrupt.strangers.runner DIRECTORY` runs the same; `…healthy` what must go on working.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from corrupt.strangers.attacks import BY_DEED, BY_NAME, NESTED
from corrupt.strangers.copies import STAND
from corrupt.strangers.tomorrow import COMPILED

from ckpt_tools.cli import main
from ckpt_tools.sandbox.enclose import landlock_version

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watched through inotify")
HARMLESS = {"c_system", "c_connect", "import", "import_here", "safetensors", "safetensors_torch"}
"""Deeds that come to nothing without an end: the kernel hides files from them, or a program does not start."""
OWN = ("/proc/", "/sys/", "/dev/", "/etc/localtime", "/usr/share/zoneinfo")
LATE = ("late-unpickle", "late-popen", "late-connect")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return what came of every attack."""
    root = tmp_path_factory.mktemp("strangers")
    path = os.pathsep.join((str(Path(__file__).parents[1]), str(Path(__file__).parents[2])))
    done = subprocess.run(
        [sys.executable, "-m", "corrupt.strangers.runner", str(root)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def outside(world, answer):
    """Return what the log shows outside of the walls that is not the last thing that the process tried."""
    roots = (*world["prefixes"], str(Path(__file__).parents[2]), "/tmp/ckpt-copy-")
    start = next(index for index, (event, _) in enumerate(answer["events"]) if event == STAND)
    events = [(event, told) for event, told in answer["events"][start + 1 :] if not is_own(event, told, roots)]
    # What ended the process is there as well: it was tried.
    return events[:-1] if "error" in answer else events


def is_own(event, told, roots):
    if event.startswith(("ctypes.dlopen", "import")):
        told = told[1:2] if event == "import" else told
    path = told[0] if told and isinstance(told[0], str) else "None"
    return path == "None" or os.sep not in path or path.startswith((*roots, *OWN))


def judge(world, name):
    answer = world["results"][name]
    assert answer["status"] == 0, answer
    assert answer["harm"] == [], answer
    assert outside(world, answer) == []
    return answer


@pytest.mark.full
@pytest.mark.parametrize("name", BY_NAME)
def test_config_that_names_a_loader_is_refused_before_anything_is_built(world, name):
    error = judge(world, f"named: {name}")["error"]
    assert error["class"] == "RefusedConfigError"
    assert error["what"].startswith("the config is refused: ")
    assert error["hint"]


@pytest.mark.full
@pytest.mark.parametrize("name", BY_NAME)
def test_config_that_names_a_loader_is_harmless_where_the_table_does_not_know_it(world, name):
    judge(world, f"table off: {name}")


@pytest.mark.full
@pytest.mark.parametrize("name", [*BY_DEED, *NESTED, *LATE])
def test_loader_of_tomorrow_is_stopped_by_walls(world, name):
    deed = name.removeprefix("deed-")
    if deed in COMPILED and not landlock_version():
        pytest.skip("this kernel has no Landlock: audit hooks do not see compiled code")
    answer = judge(world, f"walls: {name}")
    if deed not in HARMLESS:
        error = answer["error"]
        assert error["class"] == "RefusedConfigError"
        assert "from its config" in error["what"]
        assert error["where"] == "config.json"


def test_watch_sees_what_walls_would_have_stopped(tmp_path):
    """The same deeds without walls do harm, and are seen."""
    from corrupt.strangers.runner import Canary
    from corrupt.strangers.tomorrow import DEEDS

    canary = Canary(tmp_path)
    for name in ("unpickle", "numpy", "c_open", "c_system", "connect", "popen", "import_file"):
        pid = os.fork()
        if pid == 0:
            try:
                DEEDS[name](type("Config", (), canary.words))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert canary.harm(), name
    canary.close()


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [
        ["estimate", "{model}", "--mesh", "dp_shard=2"],
        ["smoke", "--model", "{model}"],
        ["preflight", "{trainer}", "--model", "{model}", "--framework", "accelerate"],
        ["shard", "{model}", "{out}", "--mesh", "dp_shard=1,tp=2", "--tp-plan", "auto"],
        ["inspect", "{model}", "--mesh", "tp=2", "--tp-plan", "auto"],
    ],
    ids=lambda command: command[0],
)
def test_command_refuses_a_config_that_names_a_loader(command, tmp_path, capsys):
    import numpy
    from safetensors.numpy import save_file

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(BY_NAME["timm-in-llava"]))
    save_file({"a.weight": numpy.zeros((4, 4), numpy.float32)}, model / "model.safetensors")
    trainer = tmp_path / "accelerate.yaml"
    trainer.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 2\n")
    words = {"model": model, "out": tmp_path / "out", "trainer": trainer}
    code = main([word.format(**words) for word in command] + ["--json"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    error = json.loads(err)["error"]
    assert error["code"] == "refused-config"
    assert "vision_config.model_type: timm_wrapper" in error["what"]
    assert not (tmp_path / "out").exists()
