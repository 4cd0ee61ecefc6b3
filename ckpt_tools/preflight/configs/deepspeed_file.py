"""DeepSpeed's own JSON, as Trainer, axolotl and accelerate are told of it: a path, or its content.

Source: DeepSpeed's "Configuration JSON" (`zero_optimization`), `transformers/integrations/deepspeed.py`, which opens a
relative path from the current directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.preflight.configs.document import find_file, read_document
from ckpt_tools.preflight.configs.table import Given, Row, Table, row, value_at

_STRATEGIES = {0: "no_shard", 2: "shard_grad_op", 3: "full_shard"}
OFFLOAD_DEVICES = ("cpu", "nvme")
"""Where parameters and optimizer state can go."""


_MAX_PARENTS = 4

Zero = tuple[str | None, bool, bool]
"""The stage in FSDP's words, and whether parameters and optimizer state lie elsewhere."""


def read_deepspeed(given: Given[Any], option: str, value: object) -> Zero:
    """Read what `deepspeed` or `deepspeed_config_file` says of sharding: content, or a path.

    A relative path begins where the trainer is started: here, beside the config, or at the root of the repository that
    the config lies in. A file that is not on this machine, or cannot be read, is noted: nothing is known of what it
    says.
    """
    if isinstance(value, str):
        value = _content(value, _folders(given.document.path))
        given.contents |= {} if value is None else {option: value}
    zero = value.get("zero_optimization") if isinstance(value, Mapping) else None
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if not isinstance(value, Mapping) or not isinstance(stage, int):
        given.unread.append(option)
    if not isinstance(zero, Mapping):
        return zero_strategy(0) if isinstance(value, Mapping) else None, False, False
    strategy = zero_strategy(stage) if isinstance(stage, int) else None
    return strategy, _offloads(zero.get("offload_param")), _offloads(zero.get("offload_optimizer"))


def deepspeed_rows(option: str = "deepspeed") -> Table[Any]:
    """Return the rows of what an option says."""
    read: Row[Any] = row(value=lambda given: read_deepspeed(given, option, value_at(given.raw, option)))
    return {"strategy offload_params offload_optimizer": read}


def _folders(config: str) -> Iterator[str]:
    """Yield where a relative path may begin."""
    yield ""
    folder = os.path.dirname(os.path.abspath(config))
    for _ in range(_MAX_PARENTS):
        yield folder
        folder = os.path.dirname(folder)


def _content(name: str, folders: Iterable[str]) -> Mapping[str, object] | None:
    place = find_file(name, folders)
    try:
        return None if place is None else read_document(place).values
    except CkptError:
        return None


def _offloads(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("device") in OFFLOAD_DEVICES


def zero_strategy(stage: int) -> str | None:
    """Return a ZeRO stage in the words of FSDP; stage 1 has none."""
    return _STRATEGIES.get(stage)
