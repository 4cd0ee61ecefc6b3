"""Noise under the right names, and wrong values in valid JSON: refused, and never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import (
    content,
    memory_directory,
    safetensors_bytes,
    tensor,
    write_model,
)

from ckpt_tools import api
from ckpt_tools.errors import CkptError

TENSORS = {"a.w": tensor("F32", 4, 2, seed=1), "b": tensor("BF16", 3, seed=2), "c": tensor("F8_E4M3", seed=3)}


@pytest.fixture
def root():
    with memory_directory() as name:
        yield Path(name)


def _exit_code(function, *args, **options) -> int:
    """The exit code that the command would have; anything but a `CkptError` fails the test."""
    try:
        function(*args, **options)
    except CkptError as error:
        return error.exit_code
    return 0


def test_random_bytes_under_right_names_are_never_a_traceback(root: Path) -> None:
    write_model(root / "model", TENSORS)
    for seed in range(60):
        directory = root / f"{seed}"
        directory.mkdir()
        names = (
            (".metadata", "__0_0.distcp"),
            ("model.safetensors",),
            ("model.safetensors.index.json",),
            ("shard-00001-model-00001-of-00001.safetensors",),
            ("ckpt_manifest.json", "model.safetensors"),
        )[seed % 5]
        for name in names:
            (directory / name).write_bytes(content(seed * 7, seed))
        with pytest.raises(CkptError) as caught:
            api.verify(directory)
        assert caught.value.exit_code == 4
        with pytest.raises(CkptError) as caught:
            api.gather(directory, root / "out")
        assert caught.value.exit_code == 4
        assert not (root / "out").exists()


def test_header_mutations_are_never_a_traceback(root: Path) -> None:
    """Valid JSON around wrong values gets further than noise does."""
    intact = safetensors_bytes(TENSORS, metadata={"format": "pt"})
    file = root / "model.safetensors"
    for a, b in (
        (b'"F32"', b'"F3"'), (b'"F32"', b"[]"), (b"[4, 2]", b"[4, -2]"), (b"[4, 2]", b"[4, 2.0]"), (b"[4, 2]", b"8"),
        (b"[4, 2]", b"[4, true]"), (b"[4, 2]", b"[8e0]"), (b"[0, 32]", b"[0]"), (b"[0, 32]", b"[32, 0]"),
        (b"[0, 32]", b"[0, 32, 64]"), (b'"pt"', b"1"), (b'"dtype"', b'"dtypo"'), (b'"a.w"', b'"b"'),
        (b'"a.w"', b'"\\ud800"'), (b'"a.w"', b'"__metadata__"'), (b"[32, 38]", b"[31, 38]"), (b"[32, 38]", b"[33, 39]"),
    ):  # fmt: skip
        text = intact[8 : 8 + int.from_bytes(intact[:8], "little")]
        assert a in text
        text = text.replace(a, b)
        file.write_bytes(len(text).to_bytes(8, "little") + text + intact[-39:])
        assert _exit_code(api.verify, file) in (0, 4), (a, b)
        assert _exit_code(api.shard, file, root / "out", mesh="dp_shard=2") in (2, 4), (a, b)
        assert not (root / "out").exists()
