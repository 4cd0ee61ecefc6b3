"""DeepSpeed's own JSON, as Trainer, axolotl and accelerate are told of it: a path, or its content.

Source: DeepSpeed's "Configuration JSON" (`zero_optimization`), `transformers/integrations/deepspeed.py`, which opens a
relative path from the current directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ckpt_tools.errors import CkptError
from ckpt_tools.preflight.configs.config import Options
from ckpt_tools.preflight.configs.document import read_document

_STRATEGIES = {0: "no_shard", 2: "shard_grad_op", 3: "full_shard"}
OFFLOAD_DEVICES = ("cpu", "nvme")
"""Where parameters and optimizer state can go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedFile:
    """What the JSON says of sharding."""

    is_read: bool = True
    """False where it is not on this machine, or cannot be read: then the rest says nothing."""
    strategy: str | None = None
    """The stage in FSDP's words."""
    offload_params: bool = False
    offload_optimizer: bool = False


def read_deepspeed(value: object, folders: Iterable[str] = ("",)) -> DeepSpeedFile:
    """Read what `deepspeed` or `deepspeed_config_file` says.

    Args:
        value: A path, or the content itself.
        folders: Where a relative path may begin; '' is the current directory.
    """
    if isinstance(value, str):
        value = _content(value, folders)
    if not isinstance(value, Mapping):
        return DeepSpeedFile(is_read=False)
    zero = value.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return DeepSpeedFile(strategy=zero_strategy(0))
    stage = zero.get("stage", 0)
    return DeepSpeedFile(
        is_read=isinstance(stage, int),
        strategy=zero_strategy(stage) if isinstance(stage, int) else None,
        offload_params=_offloads(zero.get("offload_param")),
        offload_optimizer=_offloads(zero.get("offload_optimizer")),
    )


def _content(name: str, folders: Iterable[str]) -> Mapping[str, object] | None:
    for folder in folders:
        path = os.path.join(folder, name)
        if "\0" not in path and os.path.isfile(path):
            try:
                return read_document(path).values
            except CkptError:
                return None
    return None


def _offloads(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("device") in OFFLOAD_DEVICES


def zero_strategy(stage: int) -> str | None:
    """Return a ZeRO stage in the words of FSDP; stage 1 has none."""
    return _STRATEGIES.get(stage)


def without_file(options: Options, path: str) -> Options:
    """Return the account of a config's options without the one that names a file which was not read."""
    if path in options.unread:
        return options
    return replace(options, unread=(*options.unread, path), understood=options.understood - 1)
