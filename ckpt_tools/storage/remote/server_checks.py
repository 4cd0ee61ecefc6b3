"""What is refused of a server: answers that are none, redirects that lead inside; and words without secrets."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_tools.text import escape_name

MAX_MESSAGE_CHARS = 400  # Of a server's own words that are shown
_TOKEN = re.compile(r"\b(hf|api_org)_[A-Za-z0-9]{6,}")
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>]*")
_PASSWORD = re.compile(r"(://[^\s/@:]*):[^\s/@]*@")


class RefusalError(Exception):
    """An answer that is not what was asked for; whoever asked says what it means.

    Args:
        status: HTTP status; None when there was no answer.
        message: The server's or the system's words, without secrets.
        code: X-Error-Code of the hub.
        is_lasting: The same request will not succeed a moment later.
    """

    def __init__(self, status: int | None, message: str, *, code: str | None = None, is_lasting: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.is_lasting = is_lasting
        self.retry_after_s: float | None = None
        self.was_sent = True


def scrub(text: str, token: str | None) -> str:
    """Return `text` without the token or what looks like one, passwords in URLs, and queries of signed URLs."""
    if token:
        text = text.replace(token, "***")
    text = _TOKEN.sub(r"\1_***", text)
    text = _PASSWORD.sub(r"\1:***@", text)
    text = _QUERY.sub(r"\1?…", text)
    text = escape_name(" ".join(text.split()))
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


def next_address(url: str, start: str, location: str, *, began_inside: bool) -> str:
    """Return where a redirect leads; `began_inside`: what the user named is on the inner network."""
    import httpx2

    try:
        found = httpx2.URL(url).join(location)
    except (httpx2.InvalidURL, ValueError):
        raise RefusalError(None, "a redirect without an address", is_lasting=True) from None
    asked = httpx2.URL(start)
    is_allowed = found.scheme == "https" or (found.scheme == "http" and asked.scheme == "http")
    if not location or not found.host or found.userinfo or not is_allowed:
        what = f"a redirect to {scrub(str(found), None)}, which is not followed"
        raise RefusalError(None, what, is_lasting=True)
    _refuse_inside(found.host, found.host, began_inside=began_inside)
    return str(found)


def _refuse_inside(address: str, host: str, *, began_inside: bool) -> None:
    inside = _is_inside(address)
    if inside == "link" or (inside and not began_inside):
        named = host if host == address else f"{host}, which is {address}"
        what = f"a redirect to a private or local address ({named}), which is not followed"
        raise RefusalError(None, what, is_lasting=True)


class Peers:
    """Which names turned out to lie on the inner network, when connections were made to them."""

    def __init__(self) -> None:
        self._inside: dict[str, bool] = {}

    def is_inside(self, url: str) -> bool:
        """Does the host of an address lie there, as far as it is known?"""
        import httpx2

        host = httpx2.URL(url).raw_host.decode()
        return bool(_is_inside(host)) or self._inside.get(host, False)

    def watch(self, host: str, rule: str) -> Callable[[str, Mapping[str, Any]], None]:
        """Return what judges the connections to `host` that httpx2 makes, before a byte is sent.

        `rule` says where the user began, "inside" or "outside"; "" is for the host that he named.
        """
        is_direct = False

        def on_event(event: str, info: Mapping[str, Any]) -> None:
            nonlocal is_direct
            if event == "connection.connect_tcp.started":
                is_direct = info["host"] == host  # what a proxy reaches is the proxy's to judge
            elif event == "connection.connect_tcp.complete" and is_direct:
                address = str(info["return_value"].get_extra_info("server_addr")[0])
                self._inside[host] = bool(_is_inside(address)) and self._inside.get(host, True)
                try:
                    if rule:
                        _refuse_inside(address, host, began_inside=rule == "inside")
                except RefusalError:
                    info["return_value"].close()
                    raise

        return on_event


def _is_inside(host: str) -> str:
    """Say whether `host` is an address of this machine or its network, in any spelling that the system understands."""
    if host.rstrip(".") == "localhost" or host.rstrip(".").endswith(".localhost"):
        return "private"
    try:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):
            return ""
    mapped = getattr(address, "ipv4_mapped", None)
    address = address if mapped is None else mapped
    return "link" if address.is_link_local else "" if address.is_global else "private"
