"""Checkpoints for PyTorch FSDP2: convert, inspect, verify, compare, try out before a run; adapters; the hub.

    import ckpt_tools

    ckpt_tools.shard("model", "model-dp8", mesh="dp_shard=8")
    ckpt_tools.verify("model-dp8").ok

Importing the package loads neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools import api
from ckpt_tools._version import __version__
from ckpt_tools.api import (
    diff,
    estimate,
    gather,
    inspect,
    open_checkpoint,
    preflight,
    reshard,
    shard,
    smoke,
    verify,
)
from ckpt_tools.checks.diff import Difference
from ckpt_tools.checks.verify import Verification
from ckpt_tools.conversions.job import Conversion
from ckpt_tools.description.checkpoint import BlobEntry, ByteSpan, Checkpoint, Chunk, Finding, TensorEntry
from ckpt_tools.description.dtypes import DType
from ckpt_tools.description.layout import Box, Mesh, Placement, Replicate, Shard, parse_mesh
from ckpt_tools.description.summary import Summary
from ckpt_tools.errors import (
    CkptError,
    DestinationExistsError,
    HubError,
    LimitError,
    UnreadableError,
    UsageError,
)
from ckpt_tools.smoke import SmokeReport

if TYPE_CHECKING:
    from ckpt_tools.api import check_lora, export_lora, merge_lora, push

__all__ = [
    "BlobEntry",
    "Box",
    "ByteSpan",
    "Checkpoint",
    "Chunk",
    "CkptError",
    "Conversion",
    "DType",
    "DestinationExistsError",
    "Difference",
    "Finding",
    "HubError",
    "LimitError",
    "Mesh",
    "Placement",
    "Replicate",
    "Shard",
    "SmokeReport",
    "Summary",
    "TensorEntry",
    "UnreadableError",
    "UsageError",
    "Verification",
    "__version__",
    "check_lora",
    "diff",
    "estimate",
    "export_lora",
    "gather",
    "inspect",
    "merge_lora",
    "open_checkpoint",
    "parse_mesh",
    "preflight",
    "push",
    "reshard",
    "shard",
    "smoke",
    "verify",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        found: object = getattr(api, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
