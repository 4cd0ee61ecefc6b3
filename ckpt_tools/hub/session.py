"""The client's shared connections and logs: bounded and without secrets while ckpt uses them, then as before."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import HubError
from ckpt_tools.hub.answers import Failure
from ckpt_tools.remote.refusals import scrub
from ckpt_tools.remote.web import CONNECT_TIMEOUT_S, MAX_WAIT_S, retry_after

if TYPE_CHECKING:
    import httpx2

Say = Callable[[str], None]

SILENCE_TIMEOUT_S = 300.0
"""Without a byte in either direction; a large commit takes the hub a minute. The client's own default is for ever."""


def client_utils() -> Any:  # noqa: ANN401 - the module re-exports its names in a way that type checkers do not see
    """Return the client's own building blocks."""
    return importlib.import_module("huggingface_hub.utils")


def client_errors() -> tuple[type[Exception], ...]:
    """Return what the client raises when the hub refuses, is away or answers nonsense."""
    import httpx2

    return (httpx2.HTTPError, OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)


def to_failure(error: BaseException, token: str | None) -> Failure:
    """Return what an exception of the client means."""
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    while isinstance(error, RuntimeError) and error.__cause__ is not None:  # an upload's thread wraps what it met
        error = error.__cause__
    response = getattr(error, "response", None)
    if response is not None:
        headers = response.headers
        message = getattr(error, "server_message", None) or headers.get("X-Error-Message") or ""
        return Failure(
            status=response.status_code,
            code=headers.get("X-Error-Code"),
            message=scrub(str(message), token),
            retry_after_s=retry_after(headers),
        )
    kind = type(error).__name__
    message = scrub(str(error) or kind, token)
    if isinstance(error, OfflineModeIsEnabled):
        return Failure(status=None, code=None, message="offline mode is on: unset HF_HUB_OFFLINE", is_lasting=True)
    if isinstance(error, (httpx2.HTTPError, ConnectionError, TimeoutError)):  # the network, not the hub or the client
        never_left = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError, httpx2.UnsupportedProtocol)
        return Failure(status=None, code=None, message=message, was_sent=not isinstance(error, never_left))
    is_json = not isinstance(error, json.JSONDecodeError)
    return Failure(status=None, code=None, message=f"{kind}: {message}", is_lasting=True, is_json=is_json)


def bound_session() -> None:
    """Bound the waiting of the client's connections; call it before every request, since the client replaces them."""
    import httpx2

    session = _get_session()
    if session.timeout == httpx2.Timeout(None):
        session.timeout = _bounds()
    if _refuse_long_waits not in (hooks := session.event_hooks)["response"]:
        session.event_hooks = hooks | {"response": [*hooks["response"], _refuse_long_waits]}


def _bounds() -> httpx2.Timeout:
    import httpx2

    return httpx2.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)


def _get_session() -> httpx2.Client:
    try:
        session: httpx2.Client = client_utils().get_session()
    except (ImportError, OSError, ValueError) as error:
        raise HubError(
            f"no connection can be set up: {scrub(str(error), None)}",
            hint="check the proxies (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY) and certificates (SSL_CERT_FILE) that are set",
        ) from None
    return session


def _unbound_session() -> None:
    """Leave the client as it was: it is shared with whatever else runs in this process."""
    import httpx2

    try:
        session = _get_session()
    except HubError:  # there was none to begin with
        return
    if session.timeout == _bounds():
        session.timeout = httpx2.Timeout(None)
    hooks = session.event_hooks
    session.event_hooks = hooks | {"response": [hook for hook in hooks["response"] if hook is not _refuse_long_waits]}


def _refuse_long_waits(response: httpx2.Response) -> None:
    """End what the client would otherwise sleep through: it waits as long as it is told, be it a day."""
    asked_s = retry_after(response.headers) if response.status_code in (429, 503) else None
    if asked_s is not None and asked_s > MAX_WAIT_S:
        raise _LongWaitError(response)


class _LongWaitError(RuntimeError):
    """The hub asks for a pause that is longer than anybody waits at a prompt."""

    def __init__(self, response: httpx2.Response) -> None:
        super().__init__("the hub asks for a long pause")
        self.response = response


@contextmanager
def quiet_client(token: str | None, say: Say, *, bars: bool) -> Iterator[None]:
    """Pass on what the client logs without its secrets, and let it draw no progress bars unless they are wanted."""
    utils = client_utils()

    class Relay(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(scrub(record.getMessage(), token))

    logger = logging.getLogger("huggingface_hub")
    handlers, propagate, relay = logger.handlers[:], logger.propagate, Relay(logging.WARNING)
    logger.handlers, logger.propagate = [relay], False
    hide = not bars and not utils.are_progress_bars_disabled()
    if hide:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        _unbound_session()
        logger.handlers, logger.propagate = handlers, propagate
        if hide:
            utils.enable_progress_bars()
