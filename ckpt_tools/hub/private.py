"""What lies beside weights and is nobody else's: secrets, and the state of a trainer.

Source: names that transformers' Trainer, accelerate and DeepSpeed give their own state; huggingface.co/docs, "User
access tokens".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.detect import is_weights
from ckpt_tools.hub.plan import LocalFile
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name

MAX_SCANNED_BYTES = 4 << 20
"""Larger files are not searched for tokens: what people write by hand is smaller."""
_STATE = re.compile(
    r"(?:optimizer|scheduler|scaler|rng_state|training_args|random_states)(?:_\d+)*\.(?:pt|pth|bin|pkl)"
    r"|(?:bf16_)?zero_pp_rank_.*_optim_states\.pt",
    re.ASCII,
)
_SECRET = re.compile(
    r".*\.(?:env|pem|key|p12|pfx|keystore)|id_(?:rsa|dsa|ecdsa|ed25519)|(?:hf_|wandb_|api_|access_)?token(?:\.txt)?"
    r"|(?:.*[_-])?(?:credentials?|secrets?|service[_-]account)(?:[_-].*)?(?:\.(?:json|ya?ml|toml|ini|txt))?|kaggle\.json",
    re.ASCII | re.IGNORECASE,
)
_TOKEN = re.compile(rb"(?<![A-Za-z0-9_])hf_[A-Za-z0-9]{34}(?![A-Za-z0-9])")


def why_private(path: str) -> str | None:
    """Say why a file stays at home unless it is asked for by `--include`; None when it does not.

    Args:
        path: Relative, with forward slashes.
    """
    name = path.rpartition("/")[2]
    if _STATE.fullmatch(name):
        return "a trainer's own state"
    return "may hold a secret" if _SECRET.fullmatch(name) else None


def refuse_tokens(source: Source, files: Iterable[LocalFile], token: str | None) -> None:
    """Refuse to send a file that has an access token in it, this user's or anybody's.

    Raises:
        UsageError: One has.
    """
    own = token.encode() if token else None
    for file in files:
        if is_weights(file.path) or file.nbytes > MAX_SCANNED_BYTES:
            continue
        content = file.content if file.content is not None else source.read(file.path, 0, file.nbytes)
        if (own is not None and own in content) or _TOKEN.search(content):
            raise UsageError(
                "the file holds an access token of the hub, which everybody could read there",
                where=escape_name(file.path),
                hint=f"take it out, or leave the file out: --exclude {escape_name(file.path)}",
            )
