"""What becomes a unit, on which mesh, with which policy, and what is refused with a reason."""

from __future__ import annotations

import pytest
import torch
from fsdp2 import models
from fsdp2.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckpt_tools.checkpoint.layout import Shard, parse_mesh
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.fsdp2 import (
    STRATEGIES,
    Policy,
    Precision,
    build_device_mesh,
    find_blocks,
    mesh_of,
    parse_policy,
    parse_strategy,
)
from ckpt_tools.fsdp2.entry_methods import dispatch_path


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x, mode="train"):
        return self.route(x) if mode == "train" else self.forward_inference(x)

    def route(self, x):
        return self.forward_train(x)

    def forward_train(self, x):
        return self.a(x) + self.experts[0](x)

    def forward_inference(self, x):
        return self.a(x)

    def encode(self, x):
        return self.a(x) * 2


class Net(nn.Module):
    """Blocks in a list, a shared pair, and a module without parameters."""

    def __init__(self, scalar=None):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.tail = nn.Sequential(nn.Linear(4, 6, bias=False))
        self.tail[0].weight = self.embed.weight
        self.act = nn.GELU()
        if scalar is not None:
            self.scalar = nn.Parameter(torch.tensor(1.0), requires_grad=scalar)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.tail(self.act(x))

    def generate(self, ids):
        return self.tail(self.embed(ids))


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("auto", ["layers.0", "layers.1"]),
        ("Block", ["layers.0", "layers.1"]),
        ([Block], ["layers.0", "layers.1"]),
        ("layers.*", ["layers.0", "layers.1"]),
        (["layers.1", "layers.1.a"], ["layers.1.a", "layers.1"]),
        ("Block, layers.0.experts.*", ["layers.0.experts.0", "layers.0.experts.1", "layers.0", "layers.1"]),
        ([], []),
    ],
)
def test_blocks_are_found_children_first(blocks, expected):
    assert list(find_blocks(Net(), blocks)) == expected


@pytest.mark.parametrize(
    ("blocks", "message", "hint"),
    [
        ("Blocks", "no module has the name or class 'Blocks'", "did you mean Block"),
        (
            "tail",
            "'tail' cannot be a separate FSDP unit: it shares parameters with embed.weight",
            "a module with both",
        ),
        ("act", "it has no parameters", ""),
        ("layers", "a ModuleList defines no forward", "layers.*"),
        ([nn.Conv1d], "no module has the name or class 'Conv1d'", ""),
    ],
)
def test_blocks_that_cannot_be_are_refused_with_the_reason(blocks, message, hint):
    with pytest.raises(UsageError) as caught:
        find_blocks(Net(), blocks)
    assert message in caught.value.what
    assert hint in caught.value.hint


class Cached(Block):
    def forward(self, x, feat_cache=None):
        return super().forward(x)


def test_module_without_forward_or_with_a_list_to_write_into_is_no_block():
    """Levels of `nn.Module()`, as many autoencoders have them; caches of frames, as Wan's has them."""
    model = nn.Module()
    model.levels = nn.ModuleList(nn.Module() for _ in range(2))
    for level in model.levels:
        level.blocks = nn.ModuleList(Block() for _ in range(2))
    model.frames = nn.ModuleList(Cached() for _ in range(2))
    assert sorted(find_blocks(model)) == [f"levels.{a}.blocks.{b}" for a in range(2) for b in range(2)]
    with pytest.raises(UsageError, match="its forward writes into the list feat_cache"):
        find_blocks(model, "frames.*")


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("shared", "blocks", "expected"),
    [
        (Block(), "auto", ["layers.0.shared", "layers.0", "layers.1"]),
        (nn.ModuleList([nn.Linear(4, 4)]), "auto", ["layers.0.shared.0", "layers.0", "layers.1"]),
        (nn.Linear(4, 4), "layers.1", ["layers.0.shared", "layers.1"]),
        (Bare(), "auto", []),  # nothing gathers what has no forward: the root does
        (nn.GELU(), "auto", ["layers.0", "layers.1"]),
    ],
)
def test_module_that_several_blocks_contain_is_wrapped_before_them_or_they_are_left_to_the_root(
    shared, blocks, expected
):
    model = Net()
    for layer in model.layers:
        layer.shared = shared
    assert list(find_blocks(model, blocks)) == expected


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "bert", "t5", "llava"])
def test_blocks_of_transformers_models_are_those_that_may_not_be_split(kind):
    model = models.build(kind)
    names = find_blocks(model)
    kinds = {type(model.get_submodule(name)).__name__ for name in names}
    assert kinds <= set(model._no_split_modules) | {"CLIPEncoderLayer", "CLIPVisionEmbeddings", "LlamaDecoderLayer"}
    assert all(".layers." in name or ".layer." in name or ".block." in name or "vision" in name for name in names)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        *((name, name) for name in STRATEGIES),
        ("FULL_SHARD", "full_shard"),
        ("ShardingStrategy.NO_SHARD", "no_shard"),
        ("hybrid-shard", "hybrid_shard"),
        ("HYBRID_SHARD_ZERO2", "hybrid_shard"),
        *zip("12345", ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard"), strict=True),
    ],
)
def test_strategy_is_known_by_every_spelling(text, strategy):
    assert parse_strategy(text) == strategy


def test_strategy_that_is_none_is_refused():
    with pytest.raises(UsageError, match="unknown strategy '6'"):
        parse_strategy("6")
    with pytest.raises(UsageError, match="unknown strategy"):
        Policy(strategy="zero")
    with pytest.raises(UsageError, match="keeps parameters"):
        Policy(strategy="shard_grad_op", reshard_after_forward=True)
    with pytest.raises(UsageError, match="nothing to reshard"):
        Policy(strategy="no_shard", reshard_after_forward=False)


@pytest.mark.parametrize("name", ["limit_all_gathers", "buffer_dtype", "use_orig_params", "backward_prefetch"])
def test_options_of_fsdp1_are_answered_by_name(name):
    for kind in (Policy, Precision):
        with pytest.raises(UsageError, match=f"{name} is not an option of FSDP2; at: {kind.__name__}; hint: FSDP2 "):
            kind(**{name: True})
    with pytest.raises(TypeError, match="frobnicate"):
        Policy(frobnicate=1)
    with pytest.raises(UsageError, match="must not be negative"):
        Policy(prefetch_forward=-1)


def test_zero2_of_hybrid_shard_keeps_parameters():
    assert parse_policy("5").reshard is False
    assert parse_policy("4").reshard is True


def test_dispatch_is_followed_through_own_methods_only():
    assert dispatch_path(Block, "forward", "forward_train") == ("forward", "route", "forward_train")
    assert dispatch_path(Block, "forward", "forward_inference") == ("forward", "forward_inference")
    assert dispatch_path(Block, "forward", "encode") is None

    class Outer(nn.Module):
        def forward(self, x):
            return self.block.encode(x)  # another module's method

        def encode(self, x):
            def inner():
                return self.forward(x)

            return inner()

    assert dispatch_path(Outer, "forward", "encode") is None
    assert dispatch_path(Outer, "encode", "forward") == ("encode", "forward")


REFUSED = {
    "hybrid-1d": (
        "dp_shard=2",
        {"policy": Policy(strategy="hybrid_shard")},
        "needs the axes dp_replicate and dp_shard",
    ),
    "full-2d": ("dp_replicate=1,dp_shard=2", {}, "shards over one axis"),
    "full-replicate": ("dp_replicate=2", {}, "only dp_replicate"),
    "no-2d": ("dp_replicate=1,dp_shard=2", {"policy": Policy(strategy="no_shard")}, "no_shard needs one axis"),
    "reshard-3": ("dp_shard=2", {"policy": Policy(reshard_after_forward=3)}, "at least 2 and divide the 2 ranks"),
    "pipeline": ("dp_shard=1,pp=2", {}, "the axis pp is not supported"),
    "only-tp": ("tp=2", {"tp_plan": {"tail": "colwise"}}, "no axis for FSDP"),
    "tp-unused": ("dp_shard=1,tp=2", {}, "there is no plan for it"),
    "tp-no-axis": ("dp_shard=2", {"tp_plan": {"layers.*.a": "colwise"}}, "needs a mesh with a tp axis"),
    "tp-unmatched": ("dp_shard=1,tp=2", {"tp_plan": {"layer.*.a": "colwise"}}, "'layer.*.a' matches no module"),
    "tp-style": (
        "dp_shard=1,tp=2",
        {"tp_plan": {"layers.*.a": "sequence_parallel"}},
        "'sequence_parallel' of 'layers.*.a' is not supported",
    ),
    "tp-kind": ("dp_shard=1,tp=2", {"tp_plan": {"act": "colwise"}}, "this is a GELU"),
    "tp-odd": ("dp_shard=1,tp=2", {"tp_plan": {"0": "colwise"}}, "size 5 is not divisible by tp=2"),
    "tp-tied": (
        "dp_shard=1,tp=2",
        {"tp_plan": {"embed": "embedding_rowwise"}},
        "tied parameters must be sharded the same way: embed.weight, tail.0.weight",
    ),
    "tp-no-auto": ("dp_shard=1,tp=2", {"tp_plan": "auto"}, "Net defines no tensor-parallel plan"),
    "tp-heads": ("dp_shard=1,tp=2", {"tp_plan": "auto"}, "would split attention heads"),
    "scalar": ("dp_shard=2", {}, "a trainable scalar cannot be sharded"),
    "double-wrap": (
        "dp_shard=2",
        {"forward_methods": {"Block": ["forward_train"]}},
        "double-wrap: forward → route → forward_train",
    ),
    "method-unit": (
        "dp_shard=2",
        {"forward_methods": {"layers.0.a": ["extra_repr"]}},
        "it is not a separate FSDP unit",
    ),
    "method-none": ("dp_shard=2", {"forward_methods": ["chat"]}, "Net has no method 'chat'"),
    "method-module": (
        "dp_shard=2",
        {"forward_methods": {"Bloc": ["encode"]}},
        "no module has the name or class 'Bloc'",
    ),
    "method-root": (
        "dp_shard=2",
        {"forward_methods": ["generate"], "root": False},
        "methods of the root cannot be registered",
    ),
}
"""Case → mesh, options, what is said."""
MODELS = {
    "tp-odd": lambda: nn.Sequential(nn.Linear(4, 5)),
    "tp-heads": lambda: models.build("llama-one-head"),
    "scalar": lambda: Net(scalar=True),
}


def refusals(rank, world_size):
    """Everything that shard_model refuses, by case; and what it says of what it accepts."""
    from torch.distributed.tensor import DTensor

    from ckpt_tools.fsdp2 import placements_of, plan_of, shard_model

    meshes = {text: build_device_mesh(parse_mesh(text)) for text in dict.fromkeys(row[0] for row in REFUSED.values())}
    dp, tp = meshes["dp_shard=2"], meshes["dp_shard=1,tp=2"]

    def case(mesh, model, policy=None, **options):
        with torch.device("meta"):
            model = model()
        try:
            return shard_model(model, mesh, policy, **options) and None
        except CkptError as error:
            return type(error).__name__, str(error)

    seen = {name: case(meshes[mesh], MODELS.get(name, Net), **options) for name, (mesh, options, _) in REFUSED.items()}
    torch.manual_seed(0)
    model = Net(scalar=False)
    reference = Net(scalar=False)
    reference.load_state_dict(model.state_dict())
    plan = shard_model(model, dp, forward_methods={"": ["generate"], Block: ["encode"]})
    ids = torch.tensor([[1, 2, 3]])
    fine = {
        "plan": (plan.blocks, plan.methods, plan.ignored, plan.ties, plan.root, plan.strategy),
        "placements": dict(plan.placements),
        "same": plan_of(model) is plan,
        "twice": case(dp, lambda: model),
        "forward": torch.allclose(model(ids), reference(ids)),
        "generate": torch.allclose(model.generate(ids), reference.generate(ids)),
        "encode": torch.allclose(
            model.layers[0].encode(torch.ones(1, 4)), reference.layers[0].encode(torch.ones(1, 4))
        ),
        "scalar": type(model.scalar) is nn.Parameter,
        "tied": model.tail[0].weight is model.embed.weight,
        "dtensor": isinstance(model.layers[0].a.weight, DTensor),
    }
    with torch.device("meta"):
        split = Net()
    plan = shard_model(
        split,
        tp,
        Policy(precision=Precision(param_dtype=torch.bfloat16)),
        tp_plan={"embed": "embedding_rowwise", "tail.0": "colwise_gather_output", "layers.*.a": "colwise"},
    )
    fine["tp"] = dict(plan.placements), split.tail[0].weight is split.embed.weight
    fine["tp-found"] = {name: placements_of(t) for name, t in split.named_parameters()}
    fine["world"] = None
    try:
        build_device_mesh(parse_mesh("dp_shard=4"))
    except UsageError as error:
        fine["world"] = error.what
    inferred = build_device_mesh("dp_replicate=1,fsdp=-1")
    fine["inferred"] = str(mesh_of(inferred)), inferred.device_type
    nameless = shard_model(nn.Sequential(nn.Linear(4, 4)), DeviceMesh("cpu", torch.arange(2)))
    fine["nameless"] = nameless.placements["0.weight"]
    return seen, fine


@pytest.fixture(scope="module")
def judged():
    return run_ranks(2, refusals, timeout=90)


@pytest.mark.full
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_every_rank(judged, case):
    for seen, _ in judged:
        assert seen[case] is not None, case
        assert seen[case][0] == ("DoubleWrapError" if case == "double-wrap" else "UsageError")
        assert REFUSED[case][2] in seen[case][1]


def test_plan_says_what_was_done(judged):
    for _, fine in judged:
        blocks = ("layers.0", "layers.1")
        methods = {"": ("generate",), "layers.0": ("encode",), "layers.1": ("encode",)}
        ties = (("embed.weight", "tail.0.weight"),)
        assert fine["plan"] == (blocks, methods, ("scalar",), ties, True, "full_shard")
        assert set(fine["placements"].values().__iter__().__next__().items()) == {("dp_shard", Shard(0))}
        assert "scalar" not in fine["placements"]
        assert "tail.0.weight" in fine["placements"]
        for check in ("same", "forward", "generate", "encode", "scalar", "tied", "dtensor"):
            assert fine[check], check
        assert "already sharded" in fine["twice"][1]
        assert fine["world"] == "the mesh dp_shard=4 has 4 ranks, the process group has 2"
        assert fine["inferred"] == ("dp_replicate=1,dp_shard=2", "cpu")
        assert fine["nameless"] == {"dp_shard": Shard(0)}


def test_plan_with_tp_is_what_the_parameters_became(judged):
    for _, fine in judged:
        expected, tied = fine["tp"]
        assert tied
        cut = {"layers.0.a.weight", "layers.0.a.bias", "layers.1.a.weight", "layers.1.a.bias", "embed.weight"}
        for name, placements in fine["tp-found"].items():
            assert placements == expected[name]
            assert ("tp" in placements) == (name in cut), name
