"""`infer_mesh` over many meshes, placements and shapes: whatever it answers explains every chunk."""

import math

import pytest
from hypothesis import given, settings, strategies as st
from samples import examples

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.infer_mesh import block_of, infer_mesh, rank_of_file
from ckpt_tools.checkpoint.layout import Mesh, Placement, Replicate, Shard, cut_tensor

S0, S1 = Shard(0), Shard(1)
Rules = dict[str, tuple[tuple[int, ...], dict[str, Placement]]]


def _mesh(text: str) -> Mesh:
    return Mesh(tuple((name, int(size)) for name, _, size in (part.partition("=") for part in text.split(","))))


def _written(mesh: Mesh, rules: Rules, *, pick=None) -> Checkpoint:
    """Lay tensors out as DCP does; `pick` chooses among the ranks that hold a box (default: the lowest)."""
    tensors = []
    for fqn, (shape, placements) in rules.items():
        grid = cut_tensor(shape, mesh, placements)
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.world_size):
            holders.setdefault(grid.local_box(rank).offsets, []).append(rank)
        chunks = []
        for lowest, box in grid.cells:
            ranks = holders[box.offsets]
            assert ranks[0] == lowest
            rank = pick(ranks) if pick else lowest
            span = ByteSpan(file=f"__{rank}_0.distcp", offset=0, nbytes=4 * box.num_elems)
            chunks.append(Chunk(box=box, span=span, encoding="torch_zip"))
        tensors.append(TensorEntry(fqn=fqn, dtype=BY_NAME["F32"], shape=shape, chunks=tuple(chunks)))
    return Checkpoint(root="run", format="dcp", tensors=tuple(tensors))


def _assert_explains(checkpoint: Checkpoint, inferred) -> None:
    assert list(inferred.placements) == [tensor.fqn for tensor in checkpoint.tensors]
    for tensor in checkpoint.tensors:
        placements = inferred.placements[tensor.fqn]
        assert list(placements) == [axis for axis, _ in inferred.mesh.axes]
        grid = cut_tensor(tensor.shape, inferred.mesh, placements)
        assert {chunk.box for chunk in tensor.chunks} == {box for _, box in grid.cells}
        for chunk in tensor.chunks:
            rank = rank_of_file(chunk.span.file)
            assert grid.local_box(rank) == chunk.box


def _llama(dp: str | None, tp: str | None, num_layers: int = 3) -> Rules:
    """A small Llama whose dims divide evenly: hidden 48, intermediate 96, vocabulary 192."""

    def place(tp_placement: Placement | None) -> dict[str, Placement]:
        placements: dict[str, Placement] = {}
        if dp:
            placements[dp] = S0
        if tp and tp_placement:
            placements[tp] = tp_placement
        return placements

    rules: Rules = {"model.embed_tokens.weight": ((192, 48), place(S0))}
    for i in range(num_layers):
        at = f"model.layers.{i}"
        rules[f"{at}.self_attn.q_proj.weight"] = ((48, 48), place(S0))
        rules[f"{at}.self_attn.o_proj.weight"] = ((48, 48), place(S1))
        rules[f"{at}.mlp.up_proj.weight"] = ((96, 48), place(S0))
        rules[f"{at}.mlp.up_proj.bias"] = ((96,), place(S0))
        rules[f"{at}.mlp.down_proj.weight"] = ((48, 96), place(S1))
        rules[f"{at}.input_layernorm.weight"] = ((48,), place(None))
    rules["model.norm.weight"] = ((48,), place(None))
    rules["step"] = ((), {})
    return rules


def _moe(num_experts: int = 8) -> Rules:
    rules: Rules = {"embed.weight": ((192, 48), {"dp_shard": S0})}
    for i in range(2):
        rules[f"layers.{i}.attn.weight"] = ((48, 48), {"dp_shard": S0})
        rules[f"layers.{i}.moe.experts.w1"] = ((num_experts, 48, 96), {"dp_shard": S1, "ep": S0})
        rules[f"layers.{i}.moe.experts.w2"] = ((num_experts, 96, 48), {"dp_shard": S0, "ep": S0})
    return rules


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        *((f"dp_shard={size}", _llama("dp_shard", None)) for size in (2, 3, 8, 24, 64)),
        *((f"tp={size}", _llama(None, "tp")) for size in (2, 8)),
        *((f"dp_shard={d},tp={t}", _llama("dp_shard", "tp")) for d, t in ((2, 2), (4, 2), (3, 4), (5, 2), (2, 8))),
        ("dp_shard=2,ep=4", _moe()),
        ("dp_shard=4,ep=2", _moe()),
    ],
)
def test_infer_mesh_standard_layout_finds_the_true_mesh(text: str, rules: Rules) -> None:
    mesh = _mesh(text)
    checkpoint = _written(mesh, rules)
    inferred = infer_mesh(checkpoint)
    assert inferred is not None
    assert str(inferred.mesh) == text
    _assert_explains(checkpoint, inferred)
    for fqn, (shape, placements) in rules.items():
        told = {axis: p for axis, p in inferred.placements[fqn].items() if p != Replicate()}
        assert told == (placements if shape else {})


@pytest.mark.parametrize(
    "text",
    [
        *(f"dp_replicate={replicas},dp_shard={size}" for replicas, size in ((2, 2), (2, 4), (3, 4), (4, 5))),
        *("dp_replicate=2,dp_shard=2,tp=2", "dp_replicate=2,dp_shard=3,tp=4", "dp_shard=4,tp=2", "dp_replicate=2,tp=4"),
    ],
)
def test_infer_mesh_replicas_spread_by_size_finds_the_true_mesh(text: str) -> None:
    mesh = _mesh(text)
    rules = _llama("dp_shard" if mesh.size("dp_shard") > 1 else None, "tp" if mesh.size("tp") > 1 else None)
    num_chunks = dict.fromkeys(range(mesh.world_size), 0)

    def least_loaded(ranks: list[int]) -> int:
        rank = min(ranks, key=lambda rank: num_chunks[rank])
        num_chunks[rank] += 1
        return rank

    checkpoint = _written(mesh, rules, pick=least_loaded)
    inferred = infer_mesh(checkpoint)
    assert inferred is not None
    assert str(inferred.mesh) == text
    _assert_explains(checkpoint, inferred)


@st.composite
def _anything(draw) -> tuple[Mesh, Rules]:
    names = draw(st.sets(st.sampled_from(["dp_replicate", "dp_shard", "tp", "ep"]), min_size=1, max_size=3))
    axes = tuple((name, draw(st.integers(1, 5))) for name in ("dp_replicate", "dp_shard", "tp", "ep") if name in names)
    mesh = Mesh(axes)
    rules: Rules = {}
    for i in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 13, 24]), max_size=3)))
        placements: dict[str, Placement] = {}
        for name, _ in axes:
            if name != "dp_replicate" and shape and draw(st.booleans()):
                placements[name] = Shard(draw(st.integers(0, len(shape) - 1)))
        rules[f"layers.{i}.weight"] = (shape, placements)
    return mesh, rules


@settings(deadline=None, max_examples=examples(300))
@given(_anything(), st.booleans(), st.randoms(use_true_random=False))
def test_infer_mesh_any_layout_explains_every_chunk_or_says_nothing(case, anywhere: bool, random) -> None:
    mesh, rules = case
    checkpoint = _written(mesh, rules, pick=random.choice if anywhere else None)
    inferred = infer_mesh(checkpoint)
    if inferred is not None:
        _assert_explains(checkpoint, inferred)
        # Replicas written by any rank can look like one more axis, and a smaller mesh comes before one of fewer axes.
        if not anywhere and inferred.mesh.world_size >= mesh.world_size:
            assert len([size for _, size in inferred.mesh.axes if size > 1]) <= max(
                1, len([size for _, size in mesh.axes if size > 1])
            )


@settings(deadline=None, max_examples=examples(150))
@given(st.integers(1, 40), st.lists(st.lists(st.integers(0, 50), max_size=3).map(tuple), min_size=1, max_size=6))
def test_infer_mesh_uneven_fsdp_is_never_longer_than_the_truth(num_ranks: int, shapes) -> None:
    mesh = Mesh((("dp_shard", num_ranks),))
    rules: Rules = {f"p{i}": (shape, {"dp_shard": S0} if shape else {}) for i, shape in enumerate(shapes)}
    checkpoint = _written(mesh, rules)
    inferred = infer_mesh(checkpoint)
    assert inferred is not None
    _assert_explains(checkpoint, inferred)
    [(name, size)] = inferred.mesh.axes
    assert name == "dp_shard"
    longest = max((shape[0] for shape in shapes if shape), default=0)
    assert size == num_ranks or (size < num_ranks and math.ceil(longest / num_ranks) * (num_ranks - 1) >= longest)


@pytest.mark.parametrize("damage", ["box", "rank", "name", "missing"])
def test_infer_mesh_one_chunk_off_says_nothing(damage: str) -> None:
    checkpoint = _written(_mesh("dp_shard=4,tp=2"), _llama("dp_shard", "tp"))
    tensor = checkpoint.tensors[1]
    first, second, *rest = tensor.chunks
    span = second.span
    second = {
        "box": (Chunk(box=first.box, span=span),),
        "rank": (Chunk(box=second.box, span=ByteSpan(file="__7_0.distcp", offset=0, nbytes=1)),),
        "name": (Chunk(box=second.box, span=ByteSpan(file="x.distcp", offset=0, nbytes=1)),),
        "missing": (),
    }[damage]
    chunks = (first, *second, *rest)
    broken = TensorEntry(fqn=tensor.fqn, dtype=tensor.dtype, shape=tensor.shape, chunks=chunks)
    tensors = (checkpoint.tensors[0], broken, *checkpoint.tensors[2:])
    assert infer_mesh(Checkpoint(root="run", format="dcp", tensors=tensors)) is None


def test_infer_mesh_one_rank_is_a_mesh_of_one_rank() -> None:
    inferred = infer_mesh(_written(_mesh("dp_shard=1"), {"w": ((4, 2), {}), "step": ((), {})}))
    assert inferred is not None
    assert str(inferred.mesh) == "dp_shard=1"
    assert inferred.placements == {"w": {"dp_shard": S0}, "step": {"dp_shard": Replicate()}}


def test_infer_mesh_whole_tensors_on_many_ranks_is_ddp() -> None:
    ranks = iter([0, 2, 1, 3, 0, 1])
    rules: Rules = {f"layers.{i}.w": ((4, 2), {}) for i in range(6)}
    inferred = infer_mesh(_written(_mesh("dp_replicate=4"), rules, pick=lambda _: next(ranks)))
    assert inferred is not None
    assert str(inferred.mesh) == "dp_replicate=4"


def test_infer_mesh_pipeline_stages_are_not_called_replicas() -> None:
    ranks = iter([0, 0, 0, 1, 1, 1] * 2)
    rules: Rules = {f"{at}layers.{i}.w": ((4, 2), {}) for at in ("", "optim.") for i in range(6)}
    assert infer_mesh(_written(_mesh("dp_replicate=2"), rules, pick=lambda _: next(ranks))) is None


def test_infer_mesh_packed_dtype_counts_torch_elements() -> None:
    mesh = Mesh((("tp", 2), ("ep", 1)))
    tensors = []
    for fqn, shape, placements in (("a", (4, 12), {"tp": S1}), ("b", (4, 12), {})):
        chunks = tuple(
            Chunk(box=box, span=ByteSpan(file=f"__{rank}_0.distcp", offset=0, nbytes=box.num_elems // 2))
            for rank, box in cut_tensor(shape, mesh, placements, pack=2).cells
        )
        tensors.append(TensorEntry(fqn=fqn, dtype=BY_NAME["F4"], shape=shape, chunks=chunks))
    inferred = infer_mesh(Checkpoint(root="run", format="dcp", tensors=tuple(tensors)))
    assert inferred is not None
    assert str(inferred.mesh) == "tp=2"
    assert inferred.placements["a"] == {"tp": S1}


def test_infer_mesh_absurd_rank_says_nothing_at_once() -> None:
    checkpoint = _written(_mesh("dp_shard=2"), {"w": ((1,), {"dp_shard": S0})}, pick=lambda ranks: ranks[0])
    tensor = checkpoint.tensors[0]
    far = Chunk(box=tensor.chunks[1].box, span=ByteSpan(file="__999999999_0.distcp", offset=0, nbytes=0))
    entry = TensorEntry(fqn="w", dtype=tensor.dtype, shape=(1,), chunks=(tensor.chunks[0], far))
    assert infer_mesh(Checkpoint(root="run", format="dcp", tensors=(entry,))) is None


@pytest.mark.parametrize(
    ("file", "rank"),
    [
        ("__0_0.distcp", 0),
        ("sub/__13_2.distcp", 13),
        ("shard-00003-model-00001-of-00002.safetensors", 2),
        ("shard-00000-model-00001-of-00002.safetensors", None),
        ("model-00001-of-00002.safetensors", None),
        ("__x_0.distcp", None),
        ("__0_0.distcp.bak", None),
        ("__9999999999999_0.distcp", None),
        ("__١_0.distcp", None),
    ],
)
def test_rank_of_file_name_reads_rank(file: str, rank: int | None) -> None:
    assert rank_of_file(file) == rank


@pytest.mark.parametrize(
    ("fqn", "block"),
    [
        ("model.layers.12.mlp.up.weight", ("model.layers", 12)),
        ("h.0", ("h", 0)),
        ("3.weight", ("", 3)),
        ("optim.state.blocks.1.experts.7.w", ("optim.state.blocks", 1)),
        ("model.norm.weight", None),
        ("layer1.conv2.weight", None),
        ("", None),
    ],
)
def test_block_of_fqn_finds_first_number(fqn: str, block: tuple[str, int] | None) -> None:
    assert block_of(fqn) == block
