"""What estimate knows by name: dtypes, optimizers, devices. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "f16": 2, "f32": 4}
NF4_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)
"""Per weight: an 8-bit scale for 64 weights, and an f32 scale for 256 of those (double quantisation)."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps per trained value."""

    values: int
    """Moments."""
    nbytes: float | None = None
    """Bytes of one of them, scales of its blocks included; None: the dtype of the state decides."""
    is_paged: bool = False
    """The driver may move its state to host memory when the device is full."""


_INT8 = 1 + 4 / 256
"""bitsandbytes: a code of 8 bits, and an f32 scale for 256 of them (`bitsandbytes.functional`, block-wise)."""
OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(2),
    "adam": Optimizer(2),
    "sgd": Optimizer(0),
    "sgd-momentum": Optimizer(1),
    "adamw-8bit": Optimizer(2, _INT8),
    "adamw-4bit": Optimizer(2, 0.5 + 4 / 128),  # torchao: scales of blocks of 128
    "adamw-fp8": Optimizer(2, _INT8),  # torchao: blocks of 256
    "paged-adamw": Optimizer(2, is_paged=True),
    "paged-adamw-8bit": Optimizer(2, _INT8, is_paged=True),
    "lion": Optimizer(1),
    "lion-8bit": Optimizer(1, _INT8),
    "paged-lion": Optimizer(1, is_paged=True),
    "paged-lion-8bit": Optimizer(1, _INT8, is_paged=True),
    "rmsprop": Optimizer(1),
    "adagrad": Optimizer(1),
    "muon": Optimizer(2),  # one moment for matrices, AdamW's two for the rest: counted as two everywhere
    "adafactor": Optimizer(0),  # a row's and a column's sums: less than a thousandth of a matrix
}
"""By the names that `--optimizer` takes."""
TRACKED_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
"""Those whose step is run; the state of the others is computed."""

_GIB = """
V100-16GB 15.77 · V100-32GB 31.73 · T4 14.56 · A10 21.98 · A10G 21.98 · A30 23.5 · A40 44.34 · A6000 47.4
A100-40GB 39.38 · A100-80GB 79.14 · H100-80GB 79.1 · H100-96GB 94.99 · H200 139.7 · GH200-96GB 94.5 · B200 178.3
L4 21.95 · L40 44.3 · L40S 44.32 · RTX3090 23.57 · RTX4090 23.52 · RTX5090 31.3 · RTX6000-Ada 47.4
MI210 63.98 · MI250X 63.98 · MI300X 191.98
"""
GPUS: Mapping[str, int] = {
    name: round(float(gib) * (1 << 30)) for name, gib in (part.split() for part in re.split("[·\n]", _GIB.strip()))
}
"""Bytes that the driver leaves to a program, error correction on: what PyTorch names "total capacity" when memory runs
out, which is less than `nvidia-smi` shows. A MI250X is one of its two dies, which is a device."""


def gpu_bytes(name: str) -> int | None:
    """Return the memory of a device by its name in any case, None for a name that is not known."""
    return {known.lower(): size for known, size in GPUS.items()}.get(name.strip().lower().replace(" ", "-"))
