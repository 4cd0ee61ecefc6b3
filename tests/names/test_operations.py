"""Operations do to mosaics what transformers' own do to tensors."""

from __future__ import annotations

import pytest
import torch
from transformers import core_model_loading as loading

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.names.apply_mosaic import lay_out
from ckpt_tools.checkpoint.names.mosaic import Mosaic, whole
from ckpt_tools.checkpoint.names.operations import UnknownOperationError, run

I64 = BY_NAME["I64"]


class Heads:
    """What `PermuteForRope` asks a config."""

    num_attention_heads = 2


def tensors_of(groups: dict[str, int], shape: tuple[int, ...]) -> dict[str, list[torch.Tensor]]:
    count = 0
    made: dict[str, list[torch.Tensor]] = {}
    for key, length in groups.items():
        made[key] = []
        for _ in range(length):
            size = torch.Size(shape).numel()
            made[key].append(torch.arange(count, count + size).reshape(shape))
            count += size
    return made


def values_of(mosaic: Mosaic, shape: tuple[int, ...]) -> torch.Tensor:
    """Read a mosaic of tensors that hold their own places in the order of their names."""
    size = torch.Size(shape).numel()
    entries = {
        source: TensorEntry(
            fqn=source,
            dtype=I64,
            shape=shape,
            chunks=(
                Chunk(
                    box=Box((0,) * len(shape), shape),
                    span=ByteSpan(file="f", offset=8 * size * int(source), nbytes=8 * size),
                ),
            ),
        )
        for source in mosaic.sources
    }
    result = torch.full(mosaic.shape, -1)
    for chunk in lay_out("t", mosaic, entries).chunks:
        where = tuple(slice(o, o + s) for o, s in zip(chunk.box.offsets, chunk.box.sizes, strict=True))
        flat = torch.arange(chunk.span.offset // 8, (chunk.span.offset + chunk.span.nbytes) // 8)
        strides = chunk.strides or torch.empty(chunk.box.sizes, device="meta").stride()
        result[where] = flat.as_strided(chunk.box.sizes, strides)
    return result


CASES = [
    ("MergeModulelist(dim=0)", [loading.MergeModulelist(0)], {"a.*.w": 3}, ["a.w"], (4, 6)),
    ("MergeModulelist(dim=0),Concatenate(dim=1)", [loading.MergeModulelist(0), loading.Concatenate(1)],
        {"a.*.x": 3, "a.*.y": 3}, ["a.w"], (4, 6)),
    ("Concatenate(dim=0)", [loading.Concatenate(0)], {"q": 1, "k": 1, "v": 1}, ["qkv"], (4, 6)),
    ("Chunk(dim=0)", [loading.Chunk(0)], {"qkv": 1}, ["q", "k"], (4, 6)),
    ("Chunk(dim=1),SplitModulelist(dim=0)", [loading.Chunk(1), loading.SplitModulelist(0)], {"w": 1},
        ["e.*.x", "e.*.y"], (3, 4, 2)),
    ("SplitModulelist(dim=0)", [loading.SplitModulelist(0)], {"w": 1}, ["e.*.x"], (3, 4, 2)),
    ("Transpose(dim0=0;dim1=1)", [loading.Transpose(0, 1)], {"w": 1}, ["v"], (4, 6)),
    ("Interleave(dim=1)", [loading.Interleave(1)], {"w": 1}, ["v"], (4, 6)),
    ("Interleave(dim=0;inverse=True)", [loading.Interleave(0, inverse=True)], {"w": 1}, ["v"], (4, 6)),
    ("PermuteForRope", [loading.PermuteForRope()], {"w": 1}, ["v"], (8, 3)),
    ("PermuteForRope(inverse=True)", [loading.PermuteForRope(inverse=True)], {"w": 1}, ["v"], (8,)),
    ("Chunk(dim=0),PermuteForRope(permute_layer_names=q_proj|k_proj)",
        [loading.Chunk(0), loading.PermuteForRope(permute_layer_names=["q_proj", "k_proj"])], {"qkv": 1},
        ["q_proj", "k_proj", "v_proj"], (24, 3)),
    ("ErnieFuseAndSplitTextVisionExperts(stack_dim=0;concat_dim=1)", [loading.ErnieFuseAndSplitTextVisionExperts()],
        {"e.*.gate": 4, "e.*.up": 4}, ["text", "vision"], (4, 6)),
    ("ErnieSplitAndDecoupleTextVisionExperts(stack_dim=0;concat_dim=1)",
        [loading.ErnieSplitAndDecoupleTextVisionExperts()], {"text": 1, "vision": 1}, ["e.*.gate", "e.*.up"],
        (3, 4, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "operations", "groups", "targets", "shape"), CASES, ids=[case[0] for case in CASES])
def test_operations_do_what_those_of_transformers_do(text, operations, groups, targets, shape) -> None:
    tensors = tensors_of(groups, shape)
    expected = dict(tensors)
    for operation in operations:
        expected = operation.convert(
            expected, source_patterns=list(groups), target_patterns=list(targets), config=Heads()
        )
    names = iter(range(sum(groups.values())))
    mosaics = {key: [whole(str(next(names)), I64, shape) for _ in range(length)] for key, length in groups.items()}
    found = run(text, mosaics, targets, {"num_attention_heads": 2})
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(values_of(found[name], shape), tensor), name


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Frobnicate(dim=0)", "Frobnicate is not known"),
        ("Split(dim=0)", "config.json does not say"),
        ("Transpose(dim0=0;dim1=1;check_dims=True)", "config.json does not say"),
        ("Chunk(dim=0;num_shards_attribute=n)", "not known"),
    ],
)
def test_operation_that_needs_more_than_names_and_shapes_is_refused(text, what) -> None:
    with pytest.raises(UnknownOperationError, match=what):
        run(text, {"w": [whole("0", I64, (4, 4))]}, ["v"], {})


class Live(torch.nn.Module):
    """A model whose shapes are asked for."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))


@pytest.mark.parametrize(
    ("text", "operation", "shape", "shapes"),
    [
        ("Split(dim=0)", loading.Split(0), (9, 2), {"q": (6, 2), "k": (2, 2), "v": (1, 2)}),
        ("Transpose(dim0=1;dim1=2;check_dims=True)", loading.Transpose(1, 2, True), (3, 4, 2), {"v": (3, 2, 4)}),
        ("Transpose(dim0=1;dim1=2;check_dims=True)", loading.Transpose(1, 2, True), (3, 4, 2), {"v": (3, 4, 2)}),
    ],
)
def test_operation_that_needs_the_models_shapes_does_what_that_of_transformers_does(
    text, operation, shape, shapes
) -> None:
    first, *_ = targets = list(shapes)
    tensors = tensors_of({"w": 1}, shape)
    expected = operation.convert(
        {name: one for name, (one,) in tensors.items()},
        source_patterns=["w"],
        target_patterns=targets,
        full_layer_name=first,
        model=Live(shapes),
    )
    found = run(text, {"w": [whole("0", I64, shape)]}, targets, {}, shapes)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(values_of(found[name], shape), tensor), name


@pytest.mark.parametrize("dims", [(1, 2), (2, 1)])
def test_square_matrix_stays_as_it_is_both_ways(dims) -> None:
    """Nobody can tell whether it is transposed."""
    text = "Transpose(dim0={};dim1={};check_dims=True)".format(*dims)
    before = whole("0", I64, (3, 2, 2))
    assert run(text, {"w": [before]}, ["v"], {}, {"v": (3, 2, 2)}) == {"v": before}


def test_split_into_parts_that_are_not_the_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="4 rows are not the"):
        run("Split(dim=0)", {"w": [whole("0", I64, (4, 4))]}, ["q", "k"], {}, {"q": (2, 4), "k": (1, 4)})


def test_renaming_of_a_group_is_switched_on_by_its_first_for_all_names() -> None:
    from ckpt_tools.checkpoint.names.transformers_renames import RenameRule, renamed

    rule = RenameRule(
        kind="group", sources=(r"blocks.(\d+).fc1", r"blocks.(\d+).fc2"), targets=(r"blocks.\1.fc0", r"blocks.\1.fc1")
    )
    names = [f"blocks.{block}.fc{number}.weight" for block in (0, 1) for number in (1, 2)]
    expected = [f"blocks.{block}.fc{number}.weight" for block in (0, 1) for number in (0, 1)]
    assert renamed(names, [rule]) == dict(zip(names, expected, strict=True))
    assert renamed(["blocks.0.fc2.weight"], [rule]) == {"blocks.0.fc2.weight": "blocks.0.fc2.weight"}
