"""The hub's second way in for large files: used where the hub offers it, bounded, and never the only one.

Source: huggingface_hub 2.4, _commit_api.py (`_upload_files`: with hf_xet installed it asks no hub whether it has Xet);
hf_xet 1.8, whose settings are read from the environment when its first session begins.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from ckpt_tools.hub.client import Hub
from ckpt_tools.hub.session import client_utils

_BOUNDS = {
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "4",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "1s",
    "HF_XET_CLIENT_RETRY_MAX_DURATION": "60s",
}
"""By itself it tries a storage that is away for many minutes, without a word."""


def offers_xet(hub: Hub, *, create_pr: bool) -> bool:
    """Will the client use Xet, and does this hub have it?

    Raises:
        HubError: The token may not write here, or the hub is away.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_DISABLE_XET or importlib.util.find_spec("hf_xet") is None:
        return False
    utils = client_utils()
    url = f"{hub.account.endpoint}/api/models/{hub.repo}/xet-write-token/{quote(hub.revision, safe='')}"
    headers = utils.build_hf_headers(token=hub.account.token, library_name="ckpt-tools")

    def get() -> bool:
        response = utils.get_session().get(url, headers=headers, params={"create_pr": "1"} if create_pr else None)
        if response.status_code in (404, 405, 501):  # a hub of one's own, or a mirror
            return False
        utils.hf_raise_for_status(response)
        return True

    return hub.call("asking for the storage", get)


@contextmanager
def bounded_xet() -> Iterator[None]:
    """Let Xet give up within a minute or so, unless the user has settings of their own."""
    ours = {name: value for name, value in _BOUNDS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def without_xet() -> Iterator[None]:
    """Let the client upload by LFS."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before
