"""Every byte of a small checkpoint, of items every third, is damaged: it is found, or it does not matter to anybody.

`gather` never makes wrong files of it, and what `verify` lets pass, stock torch loads with the very same values:
dates, zip versions and file attributes, and the padding between and inside of items.
"""

from __future__ import annotations

import io
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from samples import (
    content,
    files_of,
    memory_directory,
    safetensors_bytes,
    shard_model,
    staging_left,
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


def _verdict(path: Path) -> tuple[str, bool]:
    """What `verify` says: "found" or "ok", and whether it admits that it could not check everything."""
    try:
        result = api.verify(path, num_workers=1)
    except CkptError as error:
        return ("found" if error.exit_code == 4 else "failed"), False
    return ("found" if result.findings else "ok"), bool(result.not_checked)


def _outcome(path: Path, out: Path) -> tuple[str, str]:
    """What `verify` and `gather` say of a damaged checkpoint."""
    verdict, _ = _verdict(path)
    assert verdict != "failed"
    code = _exit_code(api.gather, path, out, num_workers=1)
    assert code in (0, 2, 4)
    gathered = "refused" if code else "written"
    assert staging_left(out.parent) == []
    assert out.exists() == (gathered == "written")
    return verdict, gathered


def _flip_all(path: Path, name: str, root: Path, mask: int, *, passed=None, step: int = 1) -> Counter[tuple[str, str]]:
    file, out = path / name, root / "out"
    intact = file.read_bytes()
    expected = files_of(root / "model")
    seen: Counter[tuple[str, str]] = Counter()
    for offset in range(0, len(intact), step):
        raw = bytearray(intact)
        raw[offset] ^= mask
        file.write_bytes(raw)
        outcome = _outcome(path, out)
        if outcome[1] == "written":
            assert files_of(out) == expected, f"byte {offset}: other files came out"
            shutil.rmtree(out)
        if outcome[0] == "ok" and passed is not None:
            passed(offset, bytes(raw))
        seen[outcome] += 1
    file.write_bytes(intact)
    return seen


@pytest.mark.full(but=["ckpt_manifest.json"])
@pytest.mark.parametrize("name", [".metadata", "ckpt_manifest.json"])
def test_every_flip_of_a_document_is_found(root: Path, name: str) -> None:
    run = shard_model(root, "dp_shard=2", TENSORS)
    seen = _flip_all(run, name, root, 0x01)
    assert not [outcome for outcome in seen if outcome[0] == "ok"], seen


@pytest.mark.full
@pytest.mark.parametrize(("manifest", "mask"), [(True, 0x01), (False, 0x80)])
def test_flip_of_an_item_is_found_or_harmless(root: Path, manifest: bool, mask: int) -> None:
    run = shard_model(root, "dp_shard=2", TENSORS)
    spans = [
        chunk.span for e in api.open_checkpoint(run).tensors for chunk in e.chunks if chunk.span.file == "__1_0.distcp"
    ]
    intact = (run / "__1_0.distcp").read_bytes()
    if not manifest:
        (run / "ckpt_manifest.json").unlink()
        api.gather(run, root / "plain", assets=root / "model")  # not the original arrangement, but the same tensors
        shutil.rmtree(root / "model")
        (root / "plain").rename(root / "model")

    def same_for_torch(offset: int, raw: bytes) -> None:
        for span in spans:
            if span.offset <= offset < span.offset + span.nbytes:
                load = (
                    torch.load(io.BytesIO(blob[span.offset : span.offset + span.nbytes]), weights_only=True)
                    for blob in (intact, raw)
                )
                one, other = (value.view(torch.uint8) if value.dim() else value for value in load)
                assert one.equal(other), f"byte {offset}"

    seen = _flip_all(run, "__1_0.distcp", root, mask, passed=same_for_torch, step=3)
    assert seen[("found", "refused")] > 0.5 * sum(seen.values())
    assert seen[("ok", "refused")] == 0


@pytest.mark.full
@pytest.mark.parametrize("source", ["gathered", "downloaded"])
def test_every_flip_of_safetensors_is_found_as_far_as_it_can_be(root: Path, source: str) -> None:
    """Without a manifest nothing records a checksum of safetensors' data: then the header's damages are found."""
    run = shard_model(root, "dp_shard=2", TENSORS)
    path = root / "model"
    if source == "gathered":
        api.gather(run, root / "gathered")
        path = root / "gathered"
    file = path / "model.safetensors"
    intact = file.read_bytes()
    data_start = 8 + int.from_bytes(intact[:8], "little")
    for offset in range(len(intact)):
        raw = bytearray(intact)
        raw[offset] ^= 1
        file.write_bytes(raw)
        verdict, admitted = _verdict(path)
        if source == "gathered":
            assert verdict == "found", f"byte {offset}"
        else:
            assert verdict == "found" or admitted
            if offset >= data_start:
                assert verdict == "ok"
    file.write_bytes(intact)


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
