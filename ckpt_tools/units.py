"""Sizes, counts and durations: parse what people write, format what people read.

Decimal suffixes are powers of 1000 and binary suffixes powers of 1024, as in huggingface_hub:
5GB = 5·10⁹ bytes, 5GiB = 5·2³⁰ bytes.
"""

from __future__ import annotations

import re
from decimal import Decimal

from ckpt_tools.errors import UsageError

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Return the number of bytes that `text` stands for ("5GB", "512 MiB", "1000")."""
    match = _SIZE.fullmatch(text)
    scale = (_DECIMAL | _BINARY).get(match[2].upper()) if match else None
    if match is None or scale is None or (num_bytes := int(float(match[1]) * scale)) <= 0:
        raise UsageError(f"{text!r} is not a size", hint="write for example 5GB, 500MB or 2GiB")
    return num_bytes


def parse_count(text: str) -> int:
    """Return the number of parameters that `text` stands for ("7B", "6738415616")."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a number of parameters", hint="write for example 7B or 6738415616")
    return int(Decimal(match[1]) * _COUNTS[match[2].upper()])


def format_size(num_bytes: float) -> str:
    """Return `num_bytes` for people, in binary units with three significant digits ("1.86 GiB")."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    value = float(num_bytes)
    unit = "B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007 - the last one stands for all above
        value /= 1024
        if abs(value) < 1024:
            break
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def format_device(num_bytes: int) -> str:
    """Return the memory of a device as its maker names it, and as what is held against it: "80 GB (74.5 GiB)"."""
    return f"{format_number(num_bytes / 10**9)} GB ({format_size(num_bytes)})"


def format_number(number: float, digits: int = 3) -> str:
    """Return a number for people: 0.0123, 12,300; with a power of ten only far below a thousandth or from 10⁶ on."""
    return f"{float(f'{number:.{digits}g}'):,.6g}"


def parse_duration(text: str) -> float:
    """Return the seconds that `text` stands for ("12h", "1d")."""
    match = re.fullmatch(r"(\d{1,9})\s*([smhdw])", text.strip(), re.ASCII)
    if match is None:
        raise UsageError(f"{text!r} is not a duration", hint="write for example 0s, 12h or 1d")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]]


def format_duration(seconds: float) -> str:
    """Return a duration as h:mm:ss ("0:01:05")."""
    minutes, secs = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{secs:02d}"
