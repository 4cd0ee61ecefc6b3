"""GET requests to hosts that nobody vouches for: bounded in time, size and redirects, retried, without secrets.

A token goes to its own host alone. What comes back is compared with what was asked for before it counts.
"""

from __future__ import annotations

import atexit
import functools
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from ckpt_tools._version import __version__
from ckpt_tools.errors import CkptError, StorageError
from ckpt_tools.storage.remote.patience import patience_s, pause_s, tell_answer, tell_late
from ckpt_tools.storage.remote.server_checks import Peers, RefusalError, next_address, scrub

if TYPE_CHECKING:
    import httpx2

TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # Statuses after which the same request may succeed
MAX_WAIT_S = 120.0  # The longest pause that a server may ask for (Retry-After); a longer one ends the command
CONNECT_TIMEOUT_S = 30.0  # Without an answer at all
MAX_REDIRECTS = 5  # Of one request

_SILENCE_TIMEOUT_S = 60.0  # Without a byte
_MIN_TIME_S = 180.0  # That one range may take where the server sends, and more at `_SLOWEST_BYTES_PER_S`
_SLOWEST_BYTES_PER_S = 32 << 10
_MAX_CONNECTS = 3  # Tries to reach a server that has never answered
_MAX_WHOLE_BYTES = 16 << 20  # A file for whose part the server sends all of it may be as long
_EXPIRED = (401, 403, 404, 410)  # What the host of a redirect says when the address that it was given is no longer good
_peers = Peers()  # of the process, as its connections are
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an answer asks to wait."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    limited = re.search(r"\br=0\s*;\s*t=(\d{1,9})\b", headers.get("RateLimit", ""))
    return None if limited is None else float(limited[1])


class Web:
    """GET requests on behalf of one source; from any thread.

    Args:
        home: Address whose host the token is for.
        token: None for nobody's.
        explain: Makes the error of a refusal that stays, about the thing that is named.
    """

    def __init__(self, *, home: str, token: str | None, explain: Callable[[RefusalError, str], CkptError]) -> None:
        self._home = home
        self._token = token
        self._explain = explain
        self._lock = threading.Lock()
        self._ends: dict[str, str] = {}  # address → where its redirects led
        self._versions: dict[str, str] = {}  # address → what was said of its version
        self._server = urlsplit(home).hostname or home
        self._has_answered = False

    def fill(self, url: str, offset: int, buffer: memoryview, *, nbytes: int, what: str, linked: str = "") -> None:
        """Fill `buffer` with the bytes from `offset` on; goes on at the byte where an answer ends early.

        `nbytes` is the size that the file must have; `linked` is the object id that the hub must name when it leads to
        another host. A file that is another one than at first is a `ChangedError`.
        """
        done = 0

        def work() -> bool:
            nonlocal done
            before = done
            headers = {"Range": f"bytes={offset + done}-{offset + len(buffer) - 1}"}
            with self._get(url, headers, linked=linked) as response:
                self._check_version(str(response.url) if linked else url, response)
                for block in _body(response, offset + done, offset + len(buffer), nbytes):
                    buffer[done : done + len(block)] = block
                    done += len(block)
                    if time.monotonic() > ends:
                        raise RefusalError(None, "too slow", is_lasting=True)
            if done == before:
                raise RefusalError(None, "an empty response")
            return done == len(buffer)

        ends = time.monotonic() + max(_MIN_TIME_S, patience_s()) + len(buffer) / _SLOWEST_BYTES_PER_S
        self._repeat(work, lambda: done, what)

    def read(self, url: str, what: str, *, limit: int) -> tuple[bytes, Mapping[str, str]]:
        """Return a document of at most `limit` bytes, and the headers that it came with. Raises as `fill`."""
        parts: list[bytes] = []
        headers: Mapping[str, str] = {}

        def work() -> bool:
            nonlocal headers
            parts.clear()
            with self._get(url, {}) as response:
                if response.status_code != 200:
                    raise RefusalError(None, "only a part of what was requested", is_lasting=True)
                headers, found = response.headers, 0
                for block in _raw(response):
                    parts.append(block)
                    found += len(block)
                    if found > limit:
                        raise RefusalError(None, f"more than {limit} bytes", is_lasting=True)
                    if time.monotonic() > ends:
                        raise RefusalError(None, "too slow", is_lasting=True)
            return True

        ends = time.monotonic() + max(_MIN_TIME_S, patience_s())
        self._repeat(work, lambda: 0, what)
        return b"".join(parts), headers

    def look(self, url: str, what: str) -> tuple[int, Mapping[str, object]]:
        """Return the size of a file and what tells its version, from an answer to a range of one byte."""
        size = 0
        version: Mapping[str, object] = {}

        def work() -> bool:
            nonlocal size, version
            with self._get(url, {"Range": "bytes=0-0"}) as response:
                found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
                if response.status_code == 416:  # it has no first byte
                    size, version = 0, _version(response)
                    return True
                if response.status_code != 206 or found is None:
                    raise RefusalError(200, "the server does not support range requests", is_lasting=True)
                size, version = int(found[3]), _version(response)
                self._check_version(url, response)
            return True

        self._repeat(work, lambda: 0, what)
        return size, version

    def _repeat(self, work: Callable[[], bool], done: Callable[[], int], what: str) -> None:
        """Do `work` until it returns True; what it gained makes the next try the first one again."""
        tries, before, began = 0, 0, time.monotonic()
        while True:
            try:
                is_whole = work()
                tell_answer(self._server)
                if is_whole:
                    return
                continue
            except RefusalError as error:
                refusal = error
            except _network_errors() as error:
                refusal = RefusalError(None, scrub(str(error) or type(error).__name__, self._token))
                refusal.was_sent = not isinstance(error, _never_sent())
            if done() != before:
                tries, before, began = 0, done(), time.monotonic()
            asked_s = refusal.retry_after_s or 0.0
            may_pass = refusal.status is None or refusal.status in TRANSIENT
            is_stranger = not (refusal.was_sent or self._has_answered)
            pause = pause_s(tries, asked_s)
            waited = time.monotonic() + pause - began
            is_over = waited > patience_s() or (is_stranger and tries + 1 >= _MAX_CONNECTS)
            if refusal.is_lasting or not may_pass or asked_s > MAX_WAIT_S or is_over:
                raise self._explain(refusal, what) from None
            tries += 1
            tell_late(self._server, waited)
            time.sleep(pause)

    @contextmanager
    def _get(self, url: str, headers: Mapping[str, str], *, linked: str = "") -> Iterator[httpx2.Response]:
        """Ask for `url`, and for what its redirects lead to; where they led the last time, while that is good."""
        with self._lock:
            known = self._ends.get(url)
        response = None
        if known is not None:
            response, _ = self._follow(known, url, headers, linked)
            if response.status_code in _EXPIRED:
                response.close()
                response = None
                with self._lock:
                    self._ends.pop(url, None)
        if response is None:
            response, end = self._follow(url, url, headers, linked)
            if response.status_code in (200, 206) and not is_same_host(url, end):
                with self._lock:
                    self._ends[url] = end
        try:
            if response.status_code not in (200, 206, 416):
                raise self._refusal(response)
            yield response
        finally:
            response.close()

    def _follow(self, url: str, start: str, headers: Mapping[str, str], linked: str) -> tuple[httpx2.Response, str]:
        proxies = tuple(sorted(getproxies().items()))
        for _ in range(MAX_REDIRECTS + 1):
            # What redirects lead to has connections of its own: each was judged when it was made.
            rule = "" if is_same_host(url, start) else "inside" if _peers.is_inside(start) else "outside"
            client = _client(proxies, rule)
            asked = {**headers, "Accept-Encoding": "identity", "User-Agent": f"ckpt-tools/{__version__}"}
            if self._token and is_same_host(url, self._home):
                asked["Authorization"] = f"Bearer {self._token}"
            client.cookies.clear()
            request = client.build_request("GET", url, headers=asked)
            request.extensions["trace"] = _peers.watch(request.url.raw_host.decode(), rule)
            response = client.send(request, stream=True)
            self._has_answered = True
            named = response.headers.get("X-Linked-Etag", "").removeprefix("W/").strip('"')
            if linked and named and named != linked and response.status_code < 400:
                response.close()
                raise ChangedError
            if response.status_code not in (301, 302, 303, 307, 308):
                return response, url
            response.close()
            began_inside = _peers.is_inside(start)
            url = next_address(url, start, response.headers.get("Location", ""), began_inside=began_inside)
        raise RefusalError(None, f"more than {MAX_REDIRECTS} redirects", is_lasting=True)

    def _refusal(self, response: httpx2.Response) -> RefusalError:
        headers = response.headers
        message = scrub(headers.get("X-Error-Message", ""), self._token)
        refusal = RefusalError(response.status_code, message, code=headers.get("X-Error-Code"))
        if response.status_code in (429, 503):
            refusal.retry_after_s = retry_after(headers)
        return refusal

    def _check_version(self, url: str, response: httpx2.Response) -> None:
        said = "; ".join(map(str, _version(response).values()))
        with self._lock:
            if self._versions.setdefault(url, said) != said:
                raise ChangedError


class ChangedError(Exception):
    """A file is not the one that it was when it was first looked at."""


def explain(
    refusal: RefusalError,
    where: str,
    *,
    who: str = "the server",
    variables: str = "HTTPS_PROXY",
    error: type[CkptError] = StorageError,
) -> CkptError:
    """Return the error of a refusal that is not about rights or names."""
    if refusal.is_lasting:
        return error(f"{who} cannot be read from: {refusal.message}", where=where)
    if refusal.status is None:
        verb = f"the connection to {who} broke" if refusal.was_sent else f"cannot reach {who}"
        return error(f"{verb}: {refusal.message}", where=where, hint=f"check the network, and {variables} if set")
    if refusal.status == 429 or refusal.status >= 500:
        wait = "" if refusal.retry_after_s is None else f"; it asks to wait {refusal.retry_after_s:.0f} s"
        what = f"{who} answers with status {refusal.status}{wait}"
        return error(what, where=where, hint="run the command again later")
    return error(f"{who} refuses with status {refusal.status}", where=where)


def is_same_host(url: str, other: str) -> bool:
    """Do two addresses lead to the same server by the same scheme?"""
    import httpx2

    return _host(httpx2.URL(url)) == _host(httpx2.URL(other))


def _host(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"https": 443, "http": 80}.get(url.scheme)


def _network_errors() -> tuple[type[Exception], ...]:
    import httpx2

    return (httpx2.HTTPError, httpx2.InvalidURL, OSError)


def _never_sent() -> tuple[type[Exception], ...]:
    import httpx2

    return (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError, httpx2.UnsupportedProtocol)


@functools.lru_cache(maxsize=12)
def _client(proxies: tuple[tuple[str, str], ...], rule: str) -> httpx2.Client:  # noqa: ARG001 - they tell clients apart
    import httpx2

    try:
        timeout = httpx2.Timeout(_SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None)
        limits = httpx2.Limits(max_connections=64, max_keepalive_connections=32)
        client = httpx2.Client(follow_redirects=False, timeout=timeout, limits=limits)
        atexit.register(client.close)
    except (ImportError, OSError, ValueError, ssl.SSLError) as error:
        hint = "check the proxies (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY) and certificates (SSL_CERT_FILE) that are set"
        raise StorageError(f"no connection can be set up: {scrub(str(error), None)}", hint=hint) from None
    return client


def _version(response: httpx2.Response) -> Mapping[str, object]:
    """Return what an answer says of the version of its file."""
    etag, modified = response.headers.get("ETag"), response.headers.get("Last-Modified")
    return {"etag": etag} if etag else {"modified": modified} if modified else {}


def _raw(response: httpx2.Response) -> Iterator[bytes]:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise RefusalError(None, "a compressed response that was not requested", is_lasting=True)
    return response.iter_raw()  # as it comes: a chunk size would hold back what is lost when the connection breaks


def _body(response: httpx2.Response, start: int, stop: int, nbytes: int) -> Iterator[memoryview]:
    """Yield the bytes [start, stop) of a file of `nbytes`, or a beginning of them, whatever the answer sends."""
    at, end = start, stop
    if response.status_code == 416:  # it ends before
        raise ChangedError
    if response.status_code == 206:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if found is None:
            raise RefusalError(None, "a partial response without its position (Content-Range)", is_lasting=True)
        first, last, size = (int(number) for number in found.groups())
        if size != nbytes:
            raise ChangedError
        if first != start or not start <= last < stop:
            what = f"bytes {first}-{last} were sent instead of {start}-{stop - 1}"
            raise RefusalError(None, what, is_lasting=True)
        end = last + 1
    elif nbytes > _MAX_WHOLE_BYTES:
        raise RefusalError(200, "the server does not support range requests", is_lasting=True)
    else:  # the whole file
        at, end = 0, nbytes
        length = response.headers.get("Content-Length")
        if length is not None and length != str(nbytes):
            raise ChangedError
    for block in _raw(response):
        at += len(block)
        if at > end:
            raise RefusalError(None, "more bytes than requested", is_lasting=True)
        wanted = memoryview(block)[max(0, start - (at - len(block))) : max(0, stop - (at - len(block)))]
        if wanted:
            yield wanted
        if at >= stop and response.status_code == 200:  # of a whole file, the rest is nobody's
            return
