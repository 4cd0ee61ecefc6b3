"""A conversion in any number of parts, run in any order, gives the files of one process; and reads little twice."""

from __future__ import annotations

import json
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from samples import examples, files_of, memory_directory, shard_model, small_blocks, staging_left, tensor, write_model

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.dcp_placing import place, places_of
from ckpt_tools.checkpoint.layout import Box, Shard, cut_tensor, parse_mesh, split_blocks
from ckpt_tools.convert import run as running
from ckpt_tools.errors import CkptError
from ckpt_tools.transfer.plan import Plan
from ckpt_tools.transfer.share_record import build_record, parse_record
from ckpt_tools.transfer.split import hull, owned_blocks, restrict, split
from ckpt_tools.units import format_size

TENSORS = {
    "a": tensor("F32", 13, 7, seed=1),
    "b": tensor("BF16", 40, 3, seed=2),
    "c": tensor("U8", seed=3),
    "d": tensor("I64", 0, 2, seed=4),
    "e": tensor("C64", 4, 3, 5, seed=5),
    "f": tensor("BF16", 16, 24, seed=6),
}
OPTIONS = {
    "shard": {"mesh": "dp_shard=5"},
    "gather": {"max_shard_size": "400"},
    "reshard": {"mesh": "dp_shard=3,tp=2", "set": ["f=tp:S(1)", "e=tp:S(2)"]},
}


def _without_run(directory: Path) -> dict[str, object]:
    manifest = json.loads((directory / "ckpt_manifest.json").read_text())
    manifest.pop("checksum")
    manifest["source"].pop("run", None)
    return manifest


@pytest.mark.full
@pytest.mark.parametrize("verb", OPTIONS)
def test_parts_in_any_order_give_the_files_of_one_process(verb: str) -> None:
    with memory_directory() as name, small_blocks(64):
        root = Path(name)
        run = shard_model(root, "dp_shard=2,tp=2", TENSORS, set=["f=tp:S(0)"])
        source = root / "model" if verb == "shard" else run
        one = getattr(api, verb)(source, root / "one", **OPTIONS[verb])
        for count in (1, 3, 8, 64):
            out = root / f"out-{count}"
            order = random.Random(count).sample(range(count), count)
            results = [
                getattr(api, verb)(source, out, **OPTIONS[verb], part=f"{i}/{count}", num_workers=2) for i in order
            ]
            assert [result.published for result in results].index(True) <= count - 1
            assert set(results[0].waiting_for) <= set(range(count)) - {order[0]}
            last = next(result for result in results if result.published)
            if verb == "shard":  # cut along dim 0: no byte is read more than twice
                assert one.bytes_read <= sum(result.bytes_read for result in results) <= 2 * one.bytes_read
            assert (last.counts, dict(last.checked)) == (one.counts, dict(one.checked))
            assert files_of(out) == files_of(root / "one")
            assert _without_run(out) == _without_run(root / "one")
            assert staging_left(root) == []
            assert not (out / ".ckpt").exists()
        assert api.verify(root / "out-8", against=source).ok


def test_parts_cast_rename_and_carry_models_with_assets(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", TENSORS, num_files=3)
    options = {"mesh": "dp_shard=4", "dtype": "f32", "prefix": "model."}
    with small_blocks(128):
        api.shard(source, tmp_path / "one", **options)
        results = [api.shard(source, tmp_path / "out", **options, part=f"{i}/3") for i in (2, 0, 1)]
    assert [result.waiting_for for result in results] == [(0, 1), (1,), ()]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), count=st.integers(1, 70), align=st.integers(1, 4))
def test_split_covers_every_file_once_and_is_balanced(sizes: list[int], count: int, align: int) -> None:
    shares = split(sizes, count, align=align)
    assert len(shares) == count
    assert [i for share in shares for i in share] == list(range(len(sizes)))
    assert all(share.start % align == 0 for share in shares if share)
    largest = max((sum(sizes[i : i + align]) for i in range(0, len(sizes), align)), default=0)
    assert all(sum(sizes[i] for i in share) <= sum(sizes) / count + largest for share in shares)


@given(
    shape=st.lists(st.integers(1, 12), max_size=3).map(tuple),
    ranks=st.integers(1, 9),
    count=st.integers(1, 5),
    block_bytes=st.integers(1, 40),
)
@settings(max_examples=examples(100))
def test_every_block_has_one_owner_and_is_read_twice_at_most(shape, ranks, count, block_bytes) -> None:
    blocks = split_blocks(shape, 8, block_bytes=block_bytes)
    axes = {"dp_shard": Shard(0)} if shape else {}
    boxes = [box for _, box in cut_tensor(shape, parse_mesh(f"dp_shard={ranks}"), axes).cells]
    shares = [[boxes[i] for i in share] for share in split([box.num_elems for box in boxes], count)]
    owned = [owned_blocks(blocks, share, ()) for share in shares]
    assert sorted(index for each in owned for index in each) == list(range(len(blocks)))
    read = 0
    for share, own in zip(shares, owned, strict=True):
        for index, block in enumerate(blocks):
            parts = [part for box in share if (part := box.intersect(block)) is not None and part.num_elems]
            if index in own:
                read += block.num_elems
            elif parts:
                held = hull(block, parts)
                assert all(held.intersect(part) == part for part in parts)
                read += held.num_elems
    assert read <= 2 * sum(block.num_elems for block in blocks)


def test_replicas_in_other_files_belong_to_the_first_share() -> None:
    blocks = split_blocks((4,), 8, block_bytes=2)
    whole = Box((0,), (4,))
    assert owned_blocks(blocks, [whole], ()) == {0, 1}
    assert owned_blocks(blocks, [whole], [Box((0,), (2,))]) == {1}


def _two_parts(root: Path) -> tuple[Path, Path, Path]:
    source = write_model(root / "model", {"a": tensor("F32", 8, 8, seed=1)})
    api.shard(source, root / "out", mesh="dp_shard=3", part="0/2")
    staging = root / staging_left(root)[0] / ".ckpt"
    return source, root / "out", next(staging.glob("share-*"))


def test_part_that_read_other_bytes_is_found(tmp_path: Path) -> None:
    """The owner's block and what the others wrote of it are held together, though nobody else digests it."""
    source, out, path = _two_parts(tmp_path)
    record = parse_record(path.read_bytes(), where="")
    changed = {0: tuple((at, nbytes, crc32 ^ 1) for at, nbytes, crc32 in record.parts["a"].runs[0])}
    for kind, fields in {"runs": changed, "digests": {}}.items():
        part = replace(record.parts["a"], **{kind: fields})
        path.write_bytes(build_record(replace(record, parts={"a": part})))
        with pytest.raises(CkptError, match="have read different bytes" if fields else "no part has read"):
            api.shard(source, out, mesh="dp_shard=3", part="1/2")
        assert not out.exists()
        if fields:  # whoever may be wrong is done again
            assert api.shard(source, out, mesh="dp_shard=3", part="1/2").waiting_for == (0,)
    path.write_bytes(build_record(record))
    assert api.shard(source, out, mesh="dp_shard=3", part="1/2").published


def test_record_of_another_conversion_counts_for_nothing(tmp_path: Path) -> None:
    source, out, path = _two_parts(tmp_path)
    path.write_bytes(build_record(replace(parse_record(path.read_bytes(), where=""), fingerprint="0" * 32)))
    assert api.shard(source, out, mesh="dp_shard=3", part="1/2").waiting_for == (0,)


def test_record_is_the_same_bytes_for_the_same_content_and_damage_is_seen(tmp_path: Path) -> None:
    _, _, path = _two_parts(tmp_path)
    text = path.read_bytes()
    assert build_record(parse_record(text, where="")) == text
    for cut in range(0, len(text), 7):
        for damaged in (text[:cut], text[:cut] + b"7" + text[cut + 1 :]):
            if damaged != text:
                with pytest.raises(CkptError):
                    parse_record(damaged, where="x")


@pytest.mark.parametrize("fqn", ["b", "f"])
def test_damaged_source_is_found_by_whoever_reads_or_publishes(tmp_path: Path, fqn: str) -> None:
    run = shard_model(tmp_path, "dp_shard=4", TENSORS)
    file = run / "__2_0.distcp"
    raw, content = bytearray(file.read_bytes()), TENSORS[fqn][2]
    raw[raw.index(content[len(content) // 2 :][:16])] ^= 1
    file.write_bytes(raw)
    said = []
    for index in range(3):
        try:
            assert not api.reshard(run, tmp_path / "out", part=f"{index}/3", mesh="dp_shard=3").published
        except CkptError as error:
            said.append(error.what)
    assert len(said) == 1
    assert f"tensor '{fqn}' is damaged: CRC-32" in said[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_share_of_a_large_plan_is_planned_alone() -> None:
    """A share's memory and time follow its own files: 8 of the files of 4096 ranks, of 100 GB."""
    mesh, shape, count = parse_mesh("dp_shard=4096"), (8192, 12288), 500
    span = ByteSpan(file="model.safetensors", offset=0, nbytes=2 * shape[0] * shape[1])
    whole = (Chunk(box=Box((0, 0), shape), span=span),)
    entries = tuple(TensorEntry(fqn=f"{i}", dtype=BY_NAME["BF16"], shape=shape, chunks=whole) for i in range(count))
    source = Checkpoint(root="", format="hf", tensors=entries, files={span.file: span.nbytes})
    cells = cut_tensor(shape, mesh, {"dp_shard": Shard(0)}).cells
    tracemalloc.start()
    target = place(entries, dict.fromkeys((entry.fqn for entry in entries), cells))
    names = list(target.files)
    share = frozenset(names[i] for i in split(list(target.files.values()), 512)[7])
    files = Plan(source, target, {}).files_of(share)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(files) == 8
    assert sum(len(file.copies) for file in files) == 8 * count
    assert peak < 16 << 20
    some = restrict(target, frozenset(names[:2])).tensors[5]
    assert [*some.chunks] == [*target.tensors[5].chunks[:2]]
    assert [*places_of(some.chunks)] == [(c.span.file, c.box, c.span.offset, c.encoding) for c in some.chunks]


def test_a_share_reads_the_whole_of_its_blocks_from_pieces_that_it_does_not_write(tmp_path: Path) -> None:
    """The block of a tensor in three pieces goes into two files: its owner needs the third piece as well."""
    run = shard_model(tmp_path, "dp_shard=3")
    api.reshard(run, tmp_path / "one", mesh="dp_shard=2")
    published = [api.reshard(run, tmp_path / "two", mesh="dp_shard=2", part=f"{i}/2").published for i in range(2)]
    assert published == [False, True]
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


def test_parts_of_verify_and_diff_read_every_byte_once_and_claim_no_more(tmp_path: Path) -> None:
    run = shard_model(tmp_path, "dp_shard=3", TENSORS)
    whole = api.verify(run)
    results = [api.verify(run, part=f"{i}/3") for i in range(3)]
    assert all(result.ok for result in results)
    assert sum(result.nbytes for result in results) == whole.nbytes
    assert all("the other parts' (--part)" in " ".join(result.not_checked) for result in results)
    file = run / "__1_0.distcp"
    raw, content = bytearray(file.read_bytes()), TENSORS["f"][2]
    raw[raw.index(content[len(content) // 2 :][:16])] ^= 1
    (tmp_path / "bad").mkdir()
    for each in run.iterdir():
        (tmp_path / "bad" / each.name).write_bytes(each.read_bytes())
    (tmp_path / "bad" / file.name).write_bytes(raw)
    assert sorted(api.verify(tmp_path / "bad", part=f"{i}/3").ok for i in range(3)) == [False, True, True]
    other = write_model(tmp_path / "other", TENSORS | {"f": tensor("BF16", 16, 24, seed=7)})
    found = [api.diff(tmp_path / "model", other, part=f"{i}/3") for i in range(3)]
    assert [change.fqn for difference in found for change in difference.changed] == ["f"]
    assert sum(difference.num_equal for difference in found) == len(TENSORS) - 1
    assert all(difference.notes for difference in found)
    with pytest.raises(CkptError, match="--level structure reads none"):
        api.verify(run, part="0/3", level="structure")


@pytest.mark.parametrize("nbytes", [64, 256, 4 << 20])
def test_a_dry_run_of_a_part_says_what_the_part_reads(tmp_path: Path, nbytes: int) -> None:
    source = write_model(tmp_path / "model", TENSORS)
    with small_blocks(nbytes):
        for i in range(3):
            said = api.shard(source, tmp_path / "out", mesh="dp_shard=5", part=f"{i}/3", dry_run=True).notes[-1]
            done = api.shard(source, tmp_path / "out", mesh="dp_shard=5", part=f"{i}/3")
            assert said.startswith(f"reads {format_size(done.bytes_read)}, "), (said, done.bytes_read)


def test_a_plan_of_too_many_items_is_not_gone_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model", TENSORS)
    monkeypatch.setattr(running, "_MAX_ITEMS", 3)
    assert "not computed" in api.shard(source, tmp_path / "out", mesh="dp_shard=5", part="0/2", dry_run=True).notes[-1]
