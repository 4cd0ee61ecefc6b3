"""Checkpoints for PyTorch FSDP2: shard, gather, reshard, inspect, verify, diff.

    import ckpt_tools

    ckpt_tools.shard("model", "model-dp8", mesh="dp_shard=8")
    ckpt_tools.verify("model-dp8").ok

Importing the package loads neither torch nor numpy.
"""

from __future__ import annotations

from ckpt_tools._version import __version__
from ckpt_tools.api import diff, gather, inspect, open_checkpoint, reshard, shard, smoke, verify
from ckpt_tools.checkpoint import BlobEntry, ByteSpan, Checkpoint, Chunk, Finding, TensorEntry
from ckpt_tools.diff import Difference
from ckpt_tools.dtypes import DType
from ckpt_tools.errors import (
    CkptError,
    DestinationExistsError,
    LimitError,
    UnreadableError,
    UsageError,
)
from ckpt_tools.job import Conversion
from ckpt_tools.layout import Box, Mesh, Placement, Replicate, Shard, parse_mesh
from ckpt_tools.smoke import SmokeReport
from ckpt_tools.summary import Summary
from ckpt_tools.verify import Verification

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
    "diff",
    "gather",
    "inspect",
    "open_checkpoint",
    "parse_mesh",
    "reshard",
    "shard",
    "smoke",
    "verify",
]
