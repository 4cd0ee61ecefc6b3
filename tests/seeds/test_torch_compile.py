"""Compiled blocks train, save and load as blocks that are not compiled, under the same names."""

from __future__ import annotations

import pytest
import torch
from fsdp2.ranks import run_ranks
from safetensors.torch import save_file
from seeds import guide
from torch import nn

from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.fsdp2 import find_blocks, frozen
from ckpt_tools.fsdp2.wrap import find_styles

pytestmark = pytest.mark.full

WIDTH, VOCAB, STEPS, BLOCKS = 16, 32, 3, 2


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ((tokens + 1) % VOCAB).flatten())


def compiled(calls):
    """A backend that runs the graph as it is, and counts."""

    def backend(graph, _inputs):
        def call(*args):
            calls[-1] += 1
            return graph(*args)

        return call

    return backend


def build(kind, names):
    """The model of one kind, sharded and compiled as the guide does it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from ckpt_tools.fsdp2 import Policy, build_device_mesh, shard_model

    if kind == "in place":
        guide.run("fsdp2-cookbook", "compile-compile", names)
        return
    with torch.device("meta"):
        names["model"] = model = Transformer()
    mesh = build_device_mesh("dp_shard=-1")
    names |= {"torch": torch, "Policy": Policy, "shard_model": shard_model, "mesh": mesh}
    if kind == "checkpoint_wrapper, in place":
        for name, block in list(model.blocks.named_children()):
            model.blocks.register_module(name, checkpoint_wrapper(block))
            model.blocks.get_submodule(name).compile(backend=names["backend"], fullgraph=True)
        shard_model(model, mesh, blocks=["TransformerBlock"])
    elif kind.startswith("wrapped"):
        guide.run("fsdp2-cookbook", "compile-wrapped", names | {"recompute": "recomputed" in kind})
    else:
        plan = shard_model(model, mesh, blocks=["TransformerBlock"], activation_checkpointing="recomputed" in kind)
        for name in plan.blocks if "in place" in kind else ():
            model.get_submodule(name).compile(backend=names["backend"], fullgraph="fullgraph" in kind)


KINDS = ("eager", "in place", "in place, recomputed", "wrapped", "wrapped, recomputed", "checkpoint_wrapper, in place")


def compiled_model():
    model = Transformer()
    for name, block in list(model.blocks.named_children()):
        model.blocks.register_module(name, torch.compile(block, backend="eager"))
    return model


def train(rank, world_size, directory):
    import torch.distributed.checkpoint as dcp

    from ckpt_tools.fsdp2 import audit, load_checkpoint, load_optimizer, save_checkpoint

    tokens = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(rank))
    path = directory / "model.safetensors"
    results = {}
    for number, kind in enumerate(KINDS):
        torch._dynamo.reset()
        calls = [0]
        names = {"Transformer": Transformer, "path": path, "backend": compiled(calls)}
        build(kind, names)
        model = names["model"]
        load_checkpoint(model, path)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(STEPS):
            loss = model(tokens)
            calls.append(0)
            loss.backward()
            calls.append(0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        saved = directory / f"{number}"
        save_checkpoint(model, optimizer, saved)
        if kind == "wrapped":
            dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "live")
        after = model(tokens).item()
        # What the kind before wrote, into this one.
        if number:
            load_checkpoint(model, directory / f"{number - 1}")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            load_optimizer(model, optimizer, directory / f"{number - 1}")
        results[kind] = {
            "losses": losses,
            "after": after,
            "other": model(tokens).item(),
            "moments": sum(s["exp_avg"].full_tensor().abs().sum().item() for s in optimizer.state.values()),
            "calls": calls[:2],
            "findings": [finding.code for finding in audit(model, phase="loaded", optimizer=optimizer)],
        }
    names = {"Transformer": Transformer, "path": path, "backend": "eager"}
    build("eager", names)
    load_checkpoint(names["model"], directory / "live")
    results["live"] = names["model"](tokens).item()
    try:
        build("in place, recomputed, fullgraph", names)
        load_checkpoint(names["model"], path)
        names["model"](tokens).backward()
    except Exception as error:
        results["fullgraph"] = str(error)
    return results


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled")
    torch.manual_seed(0)
    save_file(Transformer().state_dict(), path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def trained(directory):
    return run_ranks(2, train, directory, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_train_and_load_bitwise_as_eager_ones(trained, kind):
    for result in trained:
        assert result[kind]["losses"] == result["eager"]["losses"]
        assert result[kind]["after"] == result[kind]["other"] == result["eager"]["after"]
        assert result[kind]["moments"] == result["eager"]["moments"] > 0
        assert result[kind]["findings"] == []


@pytest.mark.parametrize("kind", KINDS[1:])
def test_compiled_blocks_run_the_graph_in_forward_and_again_where_recomputed(trained, kind):
    again = BLOCKS if "recomputed" in kind else 0
    assert trained[0][kind]["calls"] == [BLOCKS, again]


def fqns(path):
    with open_path(str(path)) as opened:
        return {tensor.fqn for tensor in opened.checkpoint.tensors}


def test_compiled_blocks_are_saved_under_plain_names(trained, directory):
    plain = {f"model.{name}" for name in Transformer().state_dict()}
    for number in range(len(KINDS)):
        assert {name for name in fqns(directory / str(number)) if name.startswith("model.")} == plain


def test_live_names_of_compiled_blocks_are_read_and_gathered(trained, directory, tmp_path):
    from ckpt_tools import api

    assert any("._orig_mod." in name for name in fqns(directory / "live"))
    assert trained[0]["live"] == trained[0]["eager"]["after"]
    api.gather(directory / "live", tmp_path / "full")
    assert fqns(tmp_path / "full") == set(Transformer().state_dict())


def test_compiled_in_place_with_recomputation_has_no_full_graph(trained):
    # The guide says so; should it work some day, the guide has to say that.
    assert "@contextmanager" in trained[0]["fullgraph"]


@pytest.mark.parametrize("blocks", ["auto", "TransformerBlock", "blocks.*", [TransformerBlock]])
def test_compiled_blocks_are_units_with_the_graph_inside(blocks):
    assert find_blocks(compiled_model(), blocks) == ("blocks.0", "blocks.1")


def test_compiled_blocks_are_named_as_before_in_globs_and_plans():
    model = compiled_model()
    assert frozen(model, ["blocks.*.norm", "blocks.0._orig_mod.up.bias"]) == (
        "blocks.0._orig_mod.norm.weight",
        "blocks.0._orig_mod.norm.bias",
        "blocks.1._orig_mod.norm.weight",
        "blocks.1._orig_mod.norm.bias",
        "blocks.0._orig_mod.up.bias",
    )
    assert find_styles(model, {"blocks.*.up": "colwise"}) == {
        "blocks.0._orig_mod.up": "colwise",
        "blocks.1._orig_mod.up": "colwise",
    }
