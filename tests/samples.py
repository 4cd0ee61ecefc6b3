"""Small checkpoints made by hand: raw safetensors bytes, DCP directories through ckpt itself."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME

Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""FQN → dtype name, shape, bytes."""


def examples(most: int) -> int:
    """How many examples hypothesis tries: all, or the quick tier's share (its profile in conftest.py)."""
    profile = settings.default
    assert profile is not None
    return max(10, most * profile.max_examples // 100)


def content(nbytes: int, seed: int = 0) -> bytes:
    """Bytes without a pattern, the same every time."""
    return random.Random(seed).randbytes(nbytes)


def tensor(dtype: str, *shape: int, seed: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    """One tensor with arbitrary bytes."""
    return dtype, shape, content(BY_NAME[dtype].num_bytes(math.prod(shape)), seed)


def safetensors_bytes(tensors: Tensors, *, metadata: Mapping[str, str] | None = None, pad: int = 8) -> bytes:
    """A safetensors file with `tensors` in the order given."""
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for fqn, (dtype, shape, raw) in tensors.items():
        document[fqn] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(raw)]}
        position += len(raw)
    text = json.dumps(document).encode()
    text += b" " * (-len(text) % pad)
    return len(text).to_bytes(8, "little") + text + b"".join(raw for _, _, raw in tensors.values())


MODEL: Tensors = {
    "model.embed.weight": tensor("F32", 12, 8, seed=1),
    "model.layers.0.up.weight": tensor("BF16", 16, 8, seed=12),
    "model.layers.0.down.weight": tensor("BF16", 8, 16, seed=13),
    "model.layers.0.norm.weight": tensor("F32", 5, seed=4),
    "model.step": tensor("I64", seed=5),
    "model.empty": tensor("F16", 0, 4, seed=6),
}
"""A model in miniature: cut evenly and unevenly, 0-d, empty."""

ASSETS = {"config.json": b'{"model_type": "none"}\n', "tokenizer.json": b"{}\n"}


def write_model(
    directory: Path,
    tensors: Tensors = MODEL,
    *,
    num_files: int = 1,
    assets: Mapping[str, bytes] = ASSETS,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write an HF directory: one file, or several with an index."""
    directory.mkdir(parents=True)
    metadata = {"format": "pt"} if metadata is None else metadata
    if num_files == 1:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors, metadata=metadata))
    else:
        weight_map: dict[str, str] = {}
        for i in range(num_files):
            part = dict(list(tensors.items())[i::num_files])
            name = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
            (directory / name).write_bytes(safetensors_bytes(part, metadata=metadata))
            weight_map |= dict.fromkeys(part, name)
        total = sum(len(raw) for _, _, raw in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for name, raw in assets.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
    return directory


def shard_model(tmp_path: Path, mesh: str = "dp_shard=2", tensors: Tensors = MODEL, **options) -> Path:
    """Write an HF directory `model` and a DCP directory `run` of it; return the latter."""
    source = write_model(tmp_path / "model", tensors)
    api.shard(source, tmp_path / "run", mesh=mesh, num_workers=2, **options)
    return tmp_path / "run"


def stop_after(limit: int) -> Callable[[int], Callable[[int], None]]:
    """A progress receiver that presses Ctrl-C once more than `limit` bytes are done."""

    def start(total: int) -> Callable[[int], None]:
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if done > limit:
                raise KeyboardInterrupt

        return advance

    return start


def files_of(directory: Path, *, manifest: bool = False) -> dict[str, str]:
    """SHA-256 of every file below `directory`, by relative name; without ckpt's manifest unless asked for."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and (manifest or path.name != "ckpt_manifest.json")
    }


def staging_left(directory: Path) -> list[str]:
    """Names of the staging directories that a run left behind."""
    return [path.name for path in directory.iterdir() if path.name.startswith(".ckpt-tmp-")]


def memory_directory() -> tempfile.TemporaryDirectory[str]:
    """A temporary directory in memory where there is one: property tests do not wait for hundreds of fsyncs."""
    shared = "/dev/shm"
    return tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK | os.X_OK) else None)


@contextlib.contextmanager
def without_ranks() -> Iterator[None]:
    """Let torch save and load without a process group, as it warns that it does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


@contextlib.contextmanager
def small_blocks(nbytes: int) -> Iterator[None]:
    """Cut tensors into blocks of `nbytes`, so that small ones have many, as large ones do in real life.

    The constant is part of the manifest's digest, and plan and digest must agree on it.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in ("transfer.plan", "checkpoint.formats.digest", "checkpoint.formats.manifest"):
            patch.setattr(f"ckpt_tools.{module}.BLOCK_BYTES", nbytes)
        yield
