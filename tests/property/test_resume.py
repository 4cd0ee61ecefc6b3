"""A run that is interrupted anywhere, and run again, gives the same files as one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from samples import (
    content,
    examples,
    files_of,
    memory_directory,
    shard_model,
    small_blocks,
    staging_left,
    stop_after,
    tensor,
    write_model,
)

from ckpt_tools import api

TENSORS = {
    "a": tensor("F32", 13, 7, seed=1),
    "b": tensor("BF16", 40, seed=2),
    "c": tensor("U8", seed=3),
    "d": tensor("I64", 0, 2, seed=4),
    "e": tensor("C64", 4, 3, 5, seed=5),
}
TOTAL = sum(len(raw) for _, _, raw in TENSORS.values())


def _staged(root: Path) -> Path:
    (name,) = staging_left(root)
    return root / name


@pytest.mark.full
@settings(max_examples=examples(40), deadline=None)
@given(
    verb=st.sampled_from(("shard", "gather", "reshard")),
    stops=st.lists(st.integers(0, TOTAL - 1), min_size=1, max_size=3),
    block_bytes=st.sampled_from((16, 64, 4 << 20)),
    workers=st.integers(1, 3),
    damaged=st.booleans(),
)
def test_interrupted_run_continues_and_gives_the_same_files(verb, stops, block_bytes, workers, damaged) -> None:
    with memory_directory() as name, small_blocks(block_bytes):
        root = Path(name)
        run = shard_model(root, "dp_shard=3", TENSORS)
        source = root / "model" if verb == "shard" else run
        options = {} if verb == "gather" else {"mesh": "dp_shard=2,tp=2", "set": ["e=tp:S(2)"]}

        def convert(out: str, **more):
            return getattr(api, verb)(source, root / out, num_workers=workers, **options, **more)

        expected = convert("expected")
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                convert("out", progress=stop_after(stop))
            assert not (root / "out").exists()
            if damaged and staging_left(root):
                for file in sorted(_staged(root).iterdir()):
                    if not file.name.startswith(".") and file.stat().st_size:
                        raw = bytearray(file.read_bytes())
                        raw[len(raw) // 2] ^= 1
                        file.write_bytes(raw)
        result = convert("out")
        assert result.verified
        assert result.counts == expected.counts != {}
        assert staging_left(root) == []
        assert files_of(root / "out", manifest=True) == files_of(root / "expected", manifest=True)
        assert api.verify(root / "out").ok


@pytest.mark.parametrize(("changes", "mesh"), [(True, "dp_shard=2"), (False, "dp_shard=3")])
def test_interrupted_run_of_another_source_or_with_other_arguments_is_not_continued(
    tmp_path: Path, changes: bool, mesh: str
) -> None:
    with small_blocks(64):
        source = write_model(tmp_path / "model", TENSORS)
        with pytest.raises(KeyboardInterrupt):
            api.shard(source, tmp_path / "out", mesh="dp_shard=2", num_workers=1, progress=stop_after(500))
        assert _staged(tmp_path).exists()
        path = source / "model.safetensors"
        if changes:
            path.write_bytes(path.read_bytes()[:-40] + content(40, 9))
        result = api.shard(source, tmp_path / "out", mesh=mesh)
        assert any("removed the remains of an interrupted run" in note for note in result.notes)
        assert f"{len(list((tmp_path / 'out').glob('*.distcp')))}" == mesh[-1]
        assert api.verify(tmp_path / "out", against=source).ok
        assert staging_left(tmp_path) == []


def test_interrupted_overwrite_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    with small_blocks(64):
        run = shard_model(tmp_path, "dp_shard=2", TENSORS)
        before = files_of(run, manifest=True)
        source = tmp_path / "model"
        with pytest.raises(KeyboardInterrupt):
            api.shard(source, run, mesh="dp_shard=3", overwrite=True, num_workers=1, progress=stop_after(500))
        assert files_of(run, manifest=True) == before
        result = api.shard(source, run, mesh="dp_shard=3", overwrite=True)
        assert any("continued an interrupted run" in note for note in result.notes)
        assert len(list(run.glob("*.distcp"))) == 3
        assert staging_left(tmp_path) == []
