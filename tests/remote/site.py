"""A web server on 127.0.0.1 whose every answer a test makes up, and repositories for the local hub."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hub.local_hub import Commit, File, Hub, is_large


@dataclass
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    """Send so many bytes of the body, then hang up."""


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    number: int
    """How many times this path was asked for before."""

    @property
    def span(self) -> tuple[int, int] | None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return None if found is None else (int(found[1]), int(found[2]) + 1)


Page = bytes | Callable[[Asked], Answer]


def part(asked: Asked, content: bytes, **headers: str) -> Answer:
    """What a good server sends."""
    headers = {"ETag": '"one"', **headers}
    if asked.span is None:
        return Answer(200, headers, content)
    start, stop = asked.span
    stop = min(stop, len(content))
    return Answer(206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"} | headers, content[start:stop])


class Site(ThreadingHTTPServer):
    """Path → content, or what makes the answer."""

    daemon_threads = True

    def __init__(self, pages: dict[str, Page]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages = pages
        self.asked: list[Asked] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.other = f"http://localhost:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Site

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.path, headers, sum(each.path == self.path for each in self.server.asked))
        self.server.asked.append(asked)
        page = self.server.pages.get(path)
        answer = Answer(404) if page is None else part(asked, page) if isinstance(page, bytes) else page(asked)
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body[: answer.cut] if self.command == "GET" else b"")
        if answer.cut is not None:
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815 - http.server's name


@contextmanager
def site(pages: dict[str, Page]) -> Iterator[Site]:
    server = Site(pages)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def publish(hub: Hub, name: str, directory: Path, *, ref: str = "main") -> Commit:
    """Put a directory on the local hub; large files lie on another host."""
    hub.redirect_large = True
    if name not in hub.repos:
        hub.make(name)
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        inside, held = str(path.relative_to(directory)), path.read_bytes()
        files[inside] = File(held, is_large(inside, len(held)))
        if files[inside].is_lfs:
            hub.objects[files[inside].sha256] = held
    return hub.repos[name].add(ref, files, parent=None, title="a model")
