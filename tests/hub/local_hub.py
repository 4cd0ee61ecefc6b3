"""A hub on 127.0.0.1 for the real client: repositories in memory, real object ids, large objects, faults on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

WRITE_TOKEN = "hf_WriteWriteWriteWrite01"
READ_TOKEN = "hf_ReadReadReadReadRead02"
XET_TOKEN = "xetXetXetXet03"
LARGE = (".safetensors", ".bin", ".pt", ".distcp", ".metadata")
REGULAR_LIMIT = 1_000_000


@dataclass
class File:
    """Content in a commit."""

    content: bytes
    is_lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def row(self, path: str) -> dict:
        row = {"type": "file", "path": path, "size": len(self.content), "oid": blob_id(self.content)}
        if self.is_lfs:
            end = f"oid sha256:{self.sha256}\nsize {len(self.content)}\n"
            pointer = f"version https://git-lfs.github.com/spec/v1\n{end}"
            row["oid"] = blob_id(pointer.encode())
            row["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": len(pointer)}
        return row


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Commit:
    oid: str
    parent: str | None
    title: str
    files: dict[str, File]
    author: str


@dataclass
class Repo:
    private: bool
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def add(self, ref: str, files: dict[str, File], *, parent: str | None, title: str, author: str = "me") -> Commit:
        held = sorted((path, file.sha256) for path, file in files.items())
        text = json.dumps([parent, title, held, len(self.commits)])
        commit = Commit(hashlib.sha1(text.encode()).hexdigest(), parent, title, files, author)
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


@dataclass
class Fault:
    """What goes wrong with requests "METHOD /path" that match."""

    match: str
    kind: str = "status"
    """status, cut (no answer), lost (done, no answer), late (done, and answered with the status all the same),
    truncate (half of the content), or a callable's doing."""
    status: int = 503
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    body: dict | bytes = field(default_factory=dict)
    act: Callable[[], None] | None = None
    seen: int = 0


@dataclass
class Request:
    method: str
    path: str
    token: str | None
    nbytes: int
    host: str


class Hub(ThreadingHTTPServer):
    """Listens on an ephemeral port until the `with` block ends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        """Open uploads in parts; each answer to "batch" opens a new one, as on the hub."""
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.corrupt: set[str] = set()
        """sha256 of objects of which other bytes are handed out than were stored."""
        self.ignored: set[str] = set()
        self.own: tuple[str, ...] | None = None
        """Namespaces that the token may write to and see the private repositories of; None: all."""
        self.num_uploads = 0
        self.multipart_over: int | None = None
        self.redirect_large = False
        self.has_xet = False
        """It offers Xet, and is its storage as well."""
        self.lock = threading.RLock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def writes(self) -> list[Request]:
        """Requests that change something on a hub."""
        asks = ("/preupload/", "/validate-yaml")
        return [r for r in self.requests if r.method not in ("GET", "HEAD") and not any(a in r.path for a in asks)]

    def puts(self) -> list[Request]:
        return [r for r in self.requests if r.method == "PUT"]

    def make(self, name: str, files: dict[str, bytes] | None = None, *, private: bool = False) -> Repo:
        repo = self.repos[name] = Repo(private)
        held = {path: File(content, is_large(path, len(content))) for path, content in (files or {}).items()}
        self.objects |= {file.sha256: file.content for file in held.values() if file.is_lfs}
        start = {".gitattributes": File(b"*.safetensors filter=lfs\n", False)}
        repo.add("main", start | held, parent=None, title="initial commit")
        return repo

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        commit = self.repos[name].at(revision)
        return {path: file.content for path, file in commit.files.items() if path != ".gitattributes"}

    def handle_error(self, request, client_address) -> None:  # a client that has gone is no news
        pass


@contextmanager
def local_hub():
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def is_large(path: str, nbytes: int) -> bool:
    return path.endswith(LARGE) or nbytes > REGULAR_LIMIT


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Hub

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def answer(self) -> None:
        parts = urlsplit(self.path)
        self.route, self.query = unquote(parts.path), parse_qs(parts.query)
        bearer = self.headers.get("Authorization", "")
        self.token = bearer.removeprefix("Bearer ") or None
        fault = self.fault()
        if fault is not None and fault.kind == "cut":
            self.rfile.read(min(1000, int(self.headers.get("Content-Length", 0))))
            return self.hang_up()
        self.body = self.read_body()
        host = self.headers.get("Host", "").partition(":")[0]
        with self.server.lock:
            self.server.requests.append(Request(self.command, self.route, self.token, len(self.body), host))
        self.truncate = fault is not None and fault.kind == "truncate"
        if fault is not None and fault.act is not None:
            fault.act()
        if fault is not None and fault.kind == "status":
            raw = fault.body if isinstance(fault.body, bytes) else None
            return self.send(fault.status, fault.body, fault.headers, raw)
        self.is_lost = fault is not None and fault.kind == "lost"
        self.late = fault if fault is not None and fault.kind == "late" else None
        with self.server.lock:
            return self.dispatch()

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def fault(self) -> Fault | None:
        for fault in self.server.faults:
            if fault.seen < fault.times and re.search(fault.match, f"{self.command} {self.route}"):
                fault.seen += 1
                return fault
        return None

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def send(self, status, document=None, headers=None, raw=None) -> None:
        if getattr(self, "is_lost", False):
            self.hang_up()
            return
        if (late := getattr(self, "late", None)) is not None:
            self.late = None
            status, document, raw = late.status, late.body, None
        content = json.dumps(document if document is not None else {}).encode() if raw is None else raw
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if self.truncate else content)
            if self.truncate:
                self.hang_up()

    def refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.send(status, {"error": message}, headers)

    def dispatch(self) -> None:
        route, command = self.route, self.command
        if command == "PUT":
            return self.put_object()
        if route.startswith("/lfs/complete/"):  # signed like the parts: without the token
            return self.complete(*route.split("/")[3:])
        if route.startswith("/cdn/"):
            return self.send_content(self.server.objects[route[5:]], route[5:])
        if re.match("/v[12]/", route):
            return self.store_xet(route)
        if self.token not in (None, WRITE_TOKEN, READ_TOKEN):
            return self.refuse(401, "Invalid credentials in Authorization header")
        if route == "/api/whoami-v2":
            return self.send(200, {"name": "me", "type": "user"}) if self.token else self.refuse(401, "who?")
        if route == "/api/validate-yaml":
            return self.validate_yaml()
        may_anybody = "create_pr" in self.query or (route.endswith("/batch") and "ref" not in json.loads(self.body))
        is_own = self.server.own is None or self.namespace(route) in self.server.own
        if command == "POST" and not (self.token == WRITE_TOKEN and is_own) and not may_anybody:
            kind = "create this repo" if "repos/create" in route else "write to this repo"
            return self.refuse(403, f"You don't have the rights to {kind}")
        if route == "/api/repos/create":
            return self.create()
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", route):
            return self.batch(match[1])
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", route):
            return self.resolve(*match.groups())
        if self.server.has_xet and re.fullmatch(r"/api/models/[\w.-]+/[\w.-]+/xet-write-token/.+", route):
            return self.give_xet_token()
        if (match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/commits/(.+)", route)) and command == "GET":
            repo, rows = self.server.repos[match[1]], []
            at = repo.at(match[2])
            while at is not None:
                rows.append({"id": at.oid, "title": at.title, "date": "", "authors": [{"user": at.author}]})
                at = repo.commits.get(at.parent)
            return self.send(200, rows)
        pattern = r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree|preupload|commit)/(.+))?"
        if match := re.fullmatch(pattern, route):
            return self.model(match[1], match[2] or "revision", match[3] or "main")
        return self.refuse(404, f"no route {route}")

    def namespace(self, route: str) -> str:
        if route == "/api/repos/create":
            return json.loads(self.body).get("organization") or "me"
        return route.removeprefix("/api/models").split("/")[1]

    def hides(self, repo: Repo | None, name: str) -> bool:
        own = self.server.own
        is_strange = self.token is None or (own is not None and name.split("/")[0] not in own)
        return repo is None or (repo.private and is_strange)

    def validate_yaml(self) -> None:
        text = json.loads(self.body)["content"]
        front = re.match(r"---\n(.*?)^---", text, re.DOTALL | re.MULTILINE)
        try:
            found = yaml.safe_load(front[1]) if front else {}
        except yaml.YAMLError:
            found = None
        if not isinstance(found, dict):
            return self.send(400, {"errors": [{"message": "bad metadata"}], "warnings": []})
        if found.get("license", "mit") not in ("mit", "apache-2.0", "other"):
            return self.send(400, {"errors": [{"message": '"license" must be one of [apache-2.0, mit, ...]'}]})
        return self.send(200, {"errors": [], "warnings": []})

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.server.repos:
            return self.refuse(409, "You already created this model repo")
        self.server.make(name, private=asked.get("visibility") == "private")
        return self.send(200, {"url": f"{self.server.url}/{name}"})

    def model(self, name: str, what: str, revision: str) -> None:
        repo = self.server.repos.get(name)
        if self.hides(repo, name):
            return self.refuse(404 if self.token else 401, "Repository not found", "RepoNotFound")
        commit = repo.at(revision)
        if commit is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if what == "revision":
            siblings = [{"rfilename": path} for path in commit.files]
            return self.send(200, {"id": name, "sha": commit.oid, "private": repo.private, "siblings": siblings})
        if what == "tree":
            return self.send(200, [file.row(path) for path, file in commit.files.items()])
        if what == "preupload":
            return self.preupload(commit)
        return self.commit(repo, name, revision, commit)

    def preupload(self, commit: Commit) -> None:
        rows = []
        for file in json.loads(self.body)["files"]:
            there = commit.files.get(file["path"])
            oid = None if there is None else there.sha256 if there.is_lfs else blob_id(there.content)
            mode = "lfs" if is_large(file["path"], file["size"]) else "regular"
            ignored = file["path"] in self.server.ignored
            rows.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": ignored, "oid": oid})
        self.send(200, {"files": rows})

    def batch(self, name: str) -> None:
        objects = []
        for asked in json.loads(self.body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            row: dict = {"oid": oid, "size": size}
            if oid not in self.server.objects:
                upload: dict = {"href": f"{self.server.url}/store/{oid}?X-Amz-Signature=secretsignature"}
                chunk = self.server.multipart_over
                if chunk is not None and size > chunk:
                    store = f"{self.server.url}/store/{oid}/{self.server.num_uploads}"
                    self.server.uploads[str(self.server.num_uploads)] = {}
                    self.server.num_uploads += 1
                    numbers = range(1, -(-size // chunk) + 1)
                    parts = {f"{n:05d}": f"{store}/{n}?X-Amz-Signature=secretsignature" for n in numbers}
                    href = store.replace("/store/", "/lfs/complete/")
                    upload = {"href": href, "header": {"chunk_size": str(chunk), **parts}}
                row["actions"] = {"upload": upload}
            objects.append(row)
        self.send(200, {"transfer": "basic", "objects": objects})

    def put_object(self) -> None:
        oid, *part = self.route.removeprefix("/store/").split("/")
        if part:
            upload, number = part
            if "Content-Length" not in self.headers:  # as S3, which takes no chunks of unknown number
                return self.refuse(411, "MissingContentLength")
            if upload not in self.server.uploads:
                return self.refuse(403, "Request has expired")
            self.server.uploads[upload][int(number)] = self.body
            return self.send(200, headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.refuse(400, "the content is not what it is called")
        self.server.objects[oid] = self.body
        return self.send(200)

    def complete(self, oid: str, upload: str) -> None:
        held = self.server.uploads.get(upload, {})
        parts = {part["partNumber"]: part["etag"] for part in json.loads(self.body)["parts"]}
        if parts != {number: f'"{hashlib.md5(content).hexdigest()}"' for number, content in held.items()}:
            return self.refuse(404, "NoSuchUpload, or parts that it does not have")
        content = b"".join(held[number] for number in sorted(held))
        if hashlib.sha256(content).hexdigest() != oid:
            return self.refuse(400, "the content is not what it is called")
        self.server.objects[oid] = content
        del self.server.uploads[upload]
        return self.send(200)

    def give_xet_token(self) -> None:
        if self.token != WRITE_TOKEN:
            return self.refuse(403, "You don't have the rights to write to this repo")
        found = {"accessToken": XET_TOKEN, "exp": int(time.time()) + 3600, "casUrl": self.server.url}
        names = ("X-Xet-Access-Token", "X-Xet-Token-Expiration", "X-Xet-Cas-Url")
        return self.send(200, found, dict(zip(names, map(str, found.values()), strict=True)))

    def store_xet(self, route: str) -> None:
        """Keep a xorb's chunks, one after the other, as one object: enough for a single file that does not compress."""
        if route.endswith("/telemetry"):
            return self.send(200)
        if self.token != XET_TOKEN:
            return self.refuse(401, "not a token of this storage")
        if route.startswith("/v1/xorbs/"):
            content, at = b"", 0
            while at < len(self.body) and self.body[at] == 0:  # behind the chunks there is a footer
                size, scheme = int.from_bytes(self.body[at + 1 : at + 4], "little"), self.body[at + 4]
                if scheme:
                    return self.refuse(400, "compressed chunks are more than this hub can read")
                content += self.body[at + 8 : at + 8 + size]
                at += 8 + size
            self.server.objects[hashlib.sha256(content).hexdigest()] = content
            return self.send(200, {"was_inserted": True})
        if route == "/v1/shards":
            return self.send(200, {"result": 1})
        return self.refuse(404, "not known")

    def commit(self, repo: Repo, name: str, revision: str, head: Commit) -> None:
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, head.oid):
            return self.refuse(412, "A commit has happened since. Please refresh and try again.")
        files = dict(head.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            elif value["oid"] not in self.server.objects:
                return self.refuse(400, f"the object of {value['path']} was not uploaded")
            else:
                files[value["path"]] = File(self.server.objects[value["oid"]], True)
        is_pr = "create_pr" in self.query
        ref = f"refs/pr/{len(repo.refs)}" if is_pr else revision
        made = repo.add(ref, files, parent=head.oid, title=header["summary"])
        document = {"commitUrl": f"{self.server.url}/{name}/commit/{made.oid}", "commitOid": made.oid, "success": True}
        if is_pr:
            document["pullRequestUrl"] = f"{self.server.url}/{name}/discussions/{ref.rpartition('/')[2]}"
        return self.send(200, document)

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.server.repos.get(name)
        if self.hides(repo, name):
            return self.refuse(404, "Repository not found", "RepoNotFound")
        commit = repo.at(revision)
        if commit is None:
            return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        file = commit.files.get(path)
        if file is None:
            return self.refuse(404, "Entry not found", "EntryNotFound")
        row = file.row(path)
        oid = file.sha256 if file.is_lfs else row["oid"]
        headers = {"X-Repo-Commit": commit.oid, "X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(row["size"])}
        if file.is_lfs and self.server.redirect_large:  # as the hub does: the bytes lie on another host
            other = f"http://localhost:{self.server.server_port}/cdn/{oid}"
            return self.send(302, headers=headers | {"Location": other})
        return self.send_content(file.content, oid, headers)

    def send_content(self, content: bytes, oid: str, headers: dict[str, str] | None = None) -> None:
        if hashlib.sha256(content).hexdigest() in self.server.corrupt:
            content = bytes([content[0] ^ 1]) + content[1:]
        headers = {"ETag": f'"{oid}"', "Content-Type": "application/octet-stream", **(headers or {})}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(match[1])
            end = min(int(match[2] or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            return self.send(206, headers=headers, raw=content[start : end + 1])
        return self.send(200, headers=headers, raw=content)
