"""Files that lie beside weights and are nobody else's, by their names: secrets, and the state of a trainer.

Source: names that transformers' Trainer, accelerate and DeepSpeed give their own state. Secrets inside of other files:
`secrets`.
"""

from __future__ import annotations

import re

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


def why_private(path: str) -> str | None:
    """Say why a file stays at home unless it is asked for by `--include`; None when it does not.

    Args:
        path: Relative, with forward slashes.
    """
    name = path.rpartition("/")[2]
    if _STATE.fullmatch(name):
        return "a trainer's own state"
    return "may hold a secret" if _SECRET.fullmatch(name) else None
