"""`gather(shard(x)) == x` and `gather(reshard(shard(x))) == x`, byte for byte, for random models and meshes."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import HealthCheck, assume, example, given, settings, strategies as st
from samples import examples, files_of, memory_directory, small_blocks, staging_left, write_model

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.errors import UsageError

DTYPES = ("F32", "BF16", "F64", "I64", "U8", "BOOL", "F16", "F8_E4M3", "C64", "F4", "I16", "U64")
MESHES = (
    *("dp_shard=1", "dp_shard=2", "dp_shard=3", "dp_shard=8", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2"),
    *("dp_shard=3,tp=2", "tp=3", "dp_shard=2,ep=2", "dp_replicate=2,dp_shard=2,tp=2"),
)


@st.composite
def models(draw):
    """FQN → (dtype, shape, bytes)."""
    tensors = {}
    for i in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = list(draw(st.lists(st.integers(0, 9), max_size=4)))
        if dtype == "F4":
            shape = [*shape, 2 * draw(st.integers(0, 5))]
        num_elems = 1
        for size in shape:
            num_elems *= size
        raw = random.Random(draw(st.integers(0, 9))).randbytes(BY_NAME[dtype].num_bytes(num_elems))
        tensors[draw(st.sampled_from(("a.", "b.c.", "model."))) + f"t{i}"] = (dtype, tuple(shape), raw)
    assume(2 * sum(shape == (0,) for _, shape, _ in tensors.values()) <= len(tensors))  # else it is hollow, and refused
    return tensors


def _rules(draw_dim, tensors, mesh):
    """A `--set` rule for every second tensor that has the dim, on an axis of the mesh that is not dp_shard."""
    axes = [part.partition("=")[0] for part in mesh.split(",")]
    others = [axis for axis in axes if axis in ("tp", "ep")]
    rules = []
    for i, (fqn, (dtype, shape, _)) in enumerate(tensors.items()):
        dim = draw_dim % max(1, len(shape))
        if others and i % 2 == 0 and len(shape) > dim and dtype != "F4":
            rules.append(f"{fqn}={others[-1]}:S({dim})")
    return rules


def _try(convert, *args, **options):
    """Run a conversion; a cut that ckpt refuses on purpose is no example of a round trip."""
    try:
        return convert(*args, num_workers=2, **options)
    except UsageError as error:
        assume("divisible" not in str(error) and "multiple" not in str(error) and "divide" not in str(error))
        raise


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tensors=models(),
    num_files=st.integers(1, 3),
    meshes=st.tuples(st.sampled_from(MESHES), st.sampled_from(MESHES), st.sampled_from(MESHES)),
    dims=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    block_bytes=st.sampled_from((16, 48, 4 << 20)),
)
@example(  # Shard(0) → Shard(1), 8 → 3 ranks, TP → FSDP
    tensors={"a.t0": ("F32", (8, 6), bytes(range(192))), "a.t1": ("BF16", (8,), bytes(range(16)))},
    num_files=1,
    meshes=("dp_shard=8", "tp=3", "dp_shard=3"),
    dims=(0, 1, 0),
    block_bytes=16,
)
@example(  # FSDP×TP on one dim and on two
    tensors={"a.t0": ("F32", (8, 6), bytes(range(192))), "a.t1": ("BF16", (8,), bytes(range(16)))},
    num_files=2,
    meshes=("dp_shard=2,tp=2", "dp_shard=2,tp=2", "dp_shard=8"),
    dims=(0, 1, 0),
    block_bytes=16,
)
def test_gather_after_shard_and_reshards_gives_the_same_files(tensors, num_files, meshes, dims, block_bytes) -> None:
    assume(any(raw for *_, raw in tensors.values()))  # else it is hollow, and refused
    with memory_directory() as name, small_blocks(block_bytes):
        root = Path(name)
        source = write_model(root / "source", tensors, num_files=min(num_files, len(tensors)))
        expected = files_of(source)
        _try(api.shard, source, root / "0", mesh=meshes[0], set=_rules(dims[0], tensors, meshes[0]))
        for i in (1, 2):
            mesh = meshes[i]
            _try(api.reshard, root / f"{i - 1}", root / f"{i}", mesh=mesh, set=_rules(dims[i], tensors, mesh))
        for i in range(3):
            result = api.gather(root / f"{i}", root / f"gathered{i}", num_workers=2)
            assert result.checked["digests"] == len(tensors)
            assert files_of(root / f"gathered{i}") == expected
            verification = api.verify(root / f"{i}", against=source, num_workers=2)
            assert verification.ok
            assert not verification.findings
        assert staging_left(root) == []


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tensors=models(), mesh=st.sampled_from(MESHES[:5]), limit=st.integers(1, 400), prefix=st.sampled_from(("", "m."))
)
def test_gather_into_other_files_holds_the_same_tensors(tensors, mesh, limit, prefix) -> None:
    with memory_directory() as name, small_blocks(16):
        root = Path(name)
        source = write_model(root / "source", tensors)
        _try(api.shard, source, root / "run", mesh=mesh, prefix=prefix)
        api.gather(root / "run", root / "split", max_shard_size=str(limit), strip_prefix=prefix or "none")
        assert api.diff(source, root / "split").equal
        for file in (root / "split").glob("*.safetensors"):
            entries = api.open_checkpoint(file).tensors
            assert len(entries) == 1 or sum(entry.nbytes for entry in entries) <= limit
        api.gather(root / "run", root / "like", like=root / "split")
        assert files_of(root / "like") == files_of(root / "split")
