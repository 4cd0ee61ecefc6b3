"""What is refused of a server: answers that are none, redirects that lead inside; and words without secrets."""

from __future__ import annotations

import ipaddress
import re
import socket

from ckpt_tools.text import escape_name

MAX_MESSAGE_CHARS = 400
"""Of a server's own words that are shown."""
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


def next_address(url: str, start: str, location: str) -> str:
    """Return where a redirect leads.

    Raises:
        RefusalError: Nowhere that a stranger may send this machine.
    """
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
    inside, began_inside = _is_inside(found.host), _is_inside(asked.host)
    if inside == "link" or (inside and not began_inside):
        what = f"a redirect to an address of the inner network ({found.host}), which is not followed"
        raise RefusalError(None, what, is_lasting=True)
    return str(found)


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
