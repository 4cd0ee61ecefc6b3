"""A push that was cut goes on with what lacks, and its commit is made once: counted in bytes that arrive."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hub.local_hub import Fault, Hub
from samples import write_model

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]

WEIGHTS = "model.safetensors"
PART = 1000


@pytest.fixture
def model(hub: Hub, monkeypatch, tmp_path: Path) -> Path:
    """A model whose weights go in nine parts."""
    hub.multipart_over = PART
    monkeypatch.setattr("ckpt_tools.hub.parts.RESUMED_BYTES", 0)
    return write_model(tmp_path / "model", {"weight": ("F32", (2000,), os.urandom(8000))})


def received(hub: Hub) -> int:
    return sum(request.nbytes for request in hub.puts())


def records(tmp_path: Path) -> list[Path]:
    directory = tmp_path / "hf-home" / "ckpt-uploads"
    return list(directory.iterdir()) if directory.exists() else []


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT .*/4$", kind="cut", times=99),
        Fault("PUT .*/4$", status=500, times=99),
        Fault("PUT .*/9$", status=413),
        Fault("POST /lfs/complete", status=503, times=99),
        Fault("POST /lfs/complete", status=403, body={"error": "Private repository storage limit reached"}),
    ],
    ids=lambda fault: f"{fault.match}-{fault.kind}-{fault.status}",
)
def test_push_cut_in_parts_goes_on_with_those_that_lack(
    hub: Hub, push_json, model: Path, naps, tmp_path: Path, fault: Fault
):
    size = (model / WEIGHTS).stat().st_size
    hub.faults.append(fault)
    error = push_json(model, "me/model", "-j", 2, code=1)
    assert f"uploading {WEIGHTS}" in error["what"]
    assert ("billing" in error["hint"]) == ("limit" in str(fault.body))
    assert len(hub.repos["me/model"].commits) == 1
    first = received(hub)
    (record,) = records(tmp_path)
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    hub.faults.clear()
    hub.requests.clear()
    assert push_json(model, "me/model")["ok"] is True
    # Whatever the storage had answered for was not sent again; of the part that failed at most one more answer is lost.
    failed = {r.path for r in hub.puts()}
    assert first + received(hub) <= size + 4 * 5 * PART
    assert received(hub) < size // 2
    assert len(failed) == len(hub.puts())
    assert hub.files("me/model")[WEIGHTS] == (model / WEIGHTS).read_bytes()
    assert len(hub.repos["me/model"].commits) == 2
    assert records(tmp_path) == []


@pytest.mark.parametrize("damage", ["expired", "torn", "old", "of another hub"])
def test_push_record_of_no_use_is_begun_anew(hub: Hub, push_json, model: Path, naps, tmp_path: Path, damage: str):
    hub.faults.append(Fault("PUT .*/9$", status=413))
    push_json(model, "me/model", code=1)
    (record,) = records(tmp_path)
    if damage == "expired":
        hub.uploads.clear()
    elif damage == "torn":
        record.write_bytes(record.read_bytes()[:-20])
    elif damage == "old":
        record.write_text(record.read_text().replace('"began": 1', '"began": 0'))
    else:
        record.write_text(record.read_text().replace("me/", "you/").replace('"1":', '"-1":'))
    hub.requests.clear()
    assert push_json(model, "me/model")["ok"] is True
    assert hub.files("me/model")[WEIGHTS] == (model / WEIGHTS).read_bytes()
    assert records(tmp_path) == []


def test_push_end_that_never_succeeds_is_not_tried_for_ever(hub: Hub, push_json, model: Path, naps, tmp_path: Path):
    hub.faults.append(Fault("POST /lfs/complete", status=500, times=99))
    push_json(model, "me/model", code=1)
    assert len(records(tmp_path)) == 1
    push_json(model, "me/model", code=1)
    assert records(tmp_path) == []


def test_push_without_a_place_for_records_arrives_all_the_same(hub: Hub, push_json, model: Path, tmp_path: Path):
    (tmp_path / "hf-home").write_text("not a directory")
    assert push_json(model, "me/model")["ok"] is True
    assert received(hub) == (model / WEIGHTS).stat().st_size


CUT = """
import sys
from ckpt_tools.hub import parts
parts.RESUMED_BYTES = 0
from ckpt_tools.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_push_killed_in_a_part_goes_on(hub: Hub, environment, model: Path, tmp_path: Path, sent: int):
    is_over = threading.Event()
    hub.faults.append(Fault("PUT .*/6$", kind="act", act=lambda: is_over.wait(60)))
    command = [sys.executable, "-c", CUT, "push", str(model), "me/model", "-j", "1"]
    env = os.environ | environment
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        while len(hub.puts()) < 6 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(sent)
        time.sleep(0.2)
        is_over.set()
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if sent == signal.SIGINT else -sent), err
    assert len(hub.repos["me/model"].commits) == 1
    hub.requests.clear()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "5 of 9 parts are there" in done.stderr or "6 of 9 parts are there" in done.stderr, done.stderr
    assert received(hub) <= 4 * PART
    assert hub.files("me/model")[WEIGHTS] == (model / WEIGHTS).read_bytes()
    assert hashlib.sha256(hub.files("me/model")[WEIGHTS]).hexdigest() in hub.objects
