"""A proxy before a store that counts the requests, and damages one of them in the way that it is told."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, get_args
from urllib.parse import urlsplit

Fault = Literal[
    "reset",  # in the middle of the request
    "no-answer",  # the request is read, and nothing is done
    "answer-lost",  # done, and nothing is said
    "error-body",  # 200 with an error in it, as S3 completes uploads at times
    "500", "503", "429", "403", "expired", "404", "409", "412",
    "truncated",  # the answer's body
    "stalled",
    "flipped",
    "slow",  # the answer's body, in eight pieces a tenth of a second apart
    "other-range",  # bytes and Content-Range are others than were asked for
    "other-size",  # Content-Range says another size of the whole
    "other-etag",
    "no-etag",
    "redirect",  # to the address of a cloud's credentials
]  # fmt: skip
FAULTS: tuple[Fault, ...] = get_args(Fault)

_CODES = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "429": (429, "TooManyRequests"),
    "403": (403, "AccessDenied"),
    "expired": (403, "ExpiredToken"),
    "404": (404, "NoSuchKey"),
    "409": (409, "ConditionalRequestConflict"),
    "412": (412, "PreconditionFailed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A request that came by."""

    method: str
    target: str
    range: str | None
    body_nbytes: int


class Proxy:
    """What a test says and asks; requests are served by threads of their own."""

    url: str

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream)
        self.seen: list[Seen] = []
        """Every request, in the order in which they came."""
        self.num_damaged = 0
        self.ended = threading.Event()
        """Wakes stalled answers when the proxy ends."""
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._at = -1
        self._left = 0
        self._victim: Seen | None = None
        self._of = ""
        self._outage_s = 0.0
        self._outage_ends: float | None = None

    def arm(self, fault: Fault | None, *, at: int = 0, times: int = 1, of: str = "") -> None:
        """Damage the request number `at` (from 0, counted from now on), and `times` - 1 more that ask for the same.

        Only those count that have `of` in their target: threads ask in any order.
        """
        with self._lock:
            self.seen.clear()
            self.num_damaged = 0
            self._fault, self._at, self._left, self._victim, self._of = fault, at, times, None, of
            self._outage_s = 0.0

    def fail(self, fault: Fault, *, at: int, seconds: float) -> None:
        """Damage every request for so long, from number `at` on."""
        self.arm(fault, at=at)
        with self._lock:
            self._outage_s, self._outage_ends = seconds, None

    def _is_out(self) -> bool:
        if self._outage_s and self._outage_ends is None and len(self.seen) > self._at:
            self._outage_ends = time.monotonic() + self._outage_s
        return self._outage_ends is not None and time.monotonic() < self._outage_ends

    def note(self, request: Seen) -> Fault | None:
        """Count a request, and return what is to be done to it."""
        with self._lock:
            self.seen.append(request)
            if self._outage_s:
                self.num_damaged += self._is_out()
                return self._fault if self._is_out() else None
            if self._fault is None or self._left <= 0:
                return None
            if self._victim is None and self._of in request.target:
                self._victim = request if self._at == 0 else None
                self._at -= 1
            if request != self._victim:
                return None
            self._left -= 1
            self.num_damaged += 1
            return self._fault


@contextlib.contextmanager
def fault_proxy(upstream: str) -> Iterator[Proxy]:
    """Run a proxy before the store at the address `upstream`, on a port of its own."""
    proxy = Proxy(upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        nbytes = int(self.headers.get("Content-Length") or 0)
        request = Seen(method=self.command, target=self.path, range=self.headers.get("Range"), body_nbytes=nbytes)
        fault = self.proxy.note(request)
        if fault == "reset":
            self.rfile.read(nbytes // 2)
            return self._hang_up(reset=True)
        body = self.rfile.read(nbytes)
        if fault == "no-answer":
            return self._hang_up()
        if fault == "redirect":
            return self._answer(307, {"Location": "http://169.254.169.254/latest/meta-data/"}, b"")
        if fault == "error-body":
            return self._answer(200, {}, _error("InternalError", self.headers))
        if fault in _CODES:
            status, code = _CODES[fault]
            return self._answer(status, {"Retry-After": "1"} if status == 429 else {}, _error(code, self.headers))
        status, headers, content = self._forward(body)
        if fault == "answer-lost":
            return self._hang_up()
        content = self._damage(fault, headers, content)
        if fault in ("truncated", "stalled", "slow"):
            return self._drip(fault, status, headers, content)
        return self._answer(status, headers, content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - http.server's names

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = self.proxy.upstream
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # Host too: it is signed
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            headers = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "content-length")
            }
            if self.command == "HEAD":
                headers["Content-Length"] = answer.headers.get("Content-Length") or "0"
            return answer.status, headers, answer.read()
        finally:
            connection.close()

    def _damage(self, fault: Fault | None, headers: dict[str, str], content: bytes) -> bytes:
        names = {name.lower(): name for name in headers}
        if fault == "flipped" and content:
            middle = len(content) // 2
            return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        if fault == "no-etag":
            headers.pop(names.get("etag", ""), None)
        if fault == "other-etag" and "etag" in names:
            headers[names["etag"]] = '"00000000000000000000000000000000"'
        if fault in ("other-range", "other-size") and "content-range" in names:
            name = names["content-range"]
            span, _, whole = headers[name].removeprefix("bytes ").partition("/")
            first, last = map(int, span.split("-"))
            if fault == "other-size":
                headers[name] = f"bytes {span}/{int(whole) + 7}"
            else:
                headers[name] = f"bytes {first + 1}-{last + 1}/{whole}"
        return content

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self._start(status, headers, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _start(self, status: int, headers: dict[str, str], nbytes: int) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(nbytes))
        self.end_headers()

    def _drip(self, fault: Fault, status: int, headers: dict[str, str], content: bytes) -> None:
        self._start(status, headers, len(content))
        self.wfile.flush()
        piece = max(1, -(-len(content) // 8))
        with contextlib.suppress(OSError):  # the client may have had enough
            for at in range(0, len(content), piece):
                if fault != "slow" and at >= len(content) // 2:
                    break
                self.wfile.write(content[at : at + piece])
                self.wfile.flush()
                if fault == "slow":
                    self.proxy.ended.wait(0.1)
            if fault == "stalled":
                self.proxy.ended.wait(30)
        if fault != "slow":
            self._hang_up()

    def _hang_up(self, *, reset: bool = False) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            if reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

    def handle(self) -> None:
        """Serve a connection; a client that goes away is none of our business."""
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


def _error(code: str, headers: http.client.HTTPMessage) -> bytes:
    """As stores write it: with what was signed, so that a test can look for it in what is printed."""
    signed = headers.get("Authorization", "")
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{code} {signed}</Message>'
        f"<StringToSign>{signed}</StringToSign></Error>"
    ).encode()
