"""The random generators of a rank as train state."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from ckpt_tools.fsdp2.agree import this_rank
from ckpt_tools.fsdp2.state import PerRank


class RngState(PerRank):
    """The generators of torch, Python and numpy, and that of the current GPU: stored once per rank.

    At another world size every rank that was saved continues its own stream, and a new rank gets one of its own
    (`start`). The report of the load names both.
    """

    def __init__(self) -> None:
        super().__init__(_Generators())

    def start(self, like: dict[str, Any]) -> None:
        """Begin a stream that no other rank has: made of the state of a saved rank, and this rank's number."""
        seed = _derive(like["torch"], f"rank {this_rank()}")
        torch.manual_seed(seed)  # GPUs as well
        random.seed(seed)
        np.random.seed(seed % 2**32)


class _Generators:
    def state_dict(self) -> dict[str, Any]:
        kind, words, *rest = np.random.get_state(legacy=True)
        state = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (
                str(kind),
                np.asarray(words).tolist(),
                *(float(v) if isinstance(v, float) else int(v) for v in rest),
            ),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        if torch.cuda.is_available():
            if "cuda" in state_dict:
                torch.cuda.set_rng_state(state_dict["cuda"])
            else:  # saved on CPUs: still one stream per rank
                torch.cuda.manual_seed(_derive(state_dict["torch"], f"cuda {this_rank()}"))


def _derive(state: torch.Tensor, what: str) -> int:
    content = state.cpu().numpy().tobytes() + what.encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1
