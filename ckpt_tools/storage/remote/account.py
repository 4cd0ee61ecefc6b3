"""Which hub, and as whom: what `huggingface_hub` would take, by its own variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from ckpt_tools.errors import HubError, UsageError

DEFAULT_ENDPOINT = "https://huggingface.co"  # Where the hub is unless HF_ENDPOINT says otherwise
_TRUE = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where to go, and as whom."""

    endpoint: str  # Without a slash at its end
    token: str  # Never shown; "" for nobody's

    def __repr__(self) -> str:
        """Leave the token out."""
        return f"Account(endpoint={self.endpoint!r})"


def is_offline() -> bool:
    """Has the user said that the hub is not to be asked?"""
    return any(os.environ.get(name, "").strip().lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_directory(variable: str) -> str:
    """Return what HF_HOME or HF_HUB_CACHE names, `~` and variables replaced as `huggingface_hub` does."""
    from huggingface_hub import constants

    default: str = getattr(constants, variable)
    return os.path.expandvars(os.path.expanduser(os.environ.get(variable) or default))


def find_account(*, endpoint: str | None = None, token: str | None = None) -> Account:
    """Return the hub's address and the token: the arguments, else the environment, else what `hf auth login` stored."""
    from huggingface_hub import get_token

    address = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        is_address = False
    if not is_address:
        raise UsageError("the hub's address is not a URL", where="HF_ENDPOINT", hint=f"for example {DEFAULT_ENDPOINT}")
    try:
        found = (token if token is not None else get_token() or "").strip()
    except (OSError, ValueError, RuntimeError) as error:
        raise HubError(f"cannot read the stored token ({type(error).__name__})", hint="set HF_TOKEN") from None
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise UsageError("the token contains invalid characters", hint="copy it again, without spaces or quotes")
    return Account(endpoint=address, token=found)


def find_pusher(*, endpoint: str | None = None, token: str | None = None) -> Account:
    """Return what `find_account` does, for whoever needs a token."""
    if is_offline():
        where = "HF_HUB_OFFLINE"
        raise HubError("offline mode is on: nothing is uploaded", where=where, hint="unset HF_HUB_OFFLINE to push")
    account = find_account(endpoint=endpoint, token=token)
    if not account.token:
        what = "pushing needs a token, but there is none"
        raise HubError(what, where=account.endpoint, hint="hf auth login, or set HF_TOKEN")
    return account
