"""The lab: every strategy trains, keeps what it should, and saves sharded and full."""

from __future__ import annotations

import pytest
import torch
from fsdp2.ranks import run_ranks
from safetensors.torch import save_file
from seeds import guide
from torch import nn

pytestmark = pytest.mark.full

WIDTH, VOCAB, STEPS = 16, 32, 8
MESHES = {
    "FULL_SHARD": "dp_shard=4",
    "shard_grad_op": "dp_shard=4",
    "4": "dp_replicate=2,dp_shard=2",
    "no_shard": "dp_replicate=4",
}
"""Spelling of the strategy → mesh."""


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def build():
    torch.manual_seed(0)
    return Transformer()


def batch(rank):
    """The same every step, so that the loss can fall: each rank's own, to be told apart by position."""
    tokens = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(rank))
    return {"tokens": tokens, "targets": (tokens + 1) % VOCAB}


def local_bytes(tensors):
    from torch.distributed.tensor import DTensor

    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def kept_by(model, optimizer):
    """The bytes that a rank keeps between steps."""
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    kept = {"parameters": model.parameters(), "gradients": gradients, "optimizer": state}
    return {name: local_bytes(tensors) for name, tensors in kept.items()}


def train(rank, world_size, directory):
    results = {}
    runs = [(strategy, torch.float32) for strategy in MESHES] + [("FULL_SHARD", torch.bfloat16)]
    for strategy, dtype in runs:
        names = {"Transformer": Transformer, "path": directory / "model.safetensors"} | batch(rank)
        names |= {"strategy": strategy, "mesh_text": MESHES[strategy], "param_dtype": dtype}
        case = f"{strategy}-{dtype}".replace("torch.", "")
        names |= {"checkpoint": directory / case, "full": directory / f"{case}-full"}
        guide.run("fsdp2-cookbook", "strategy-wrap", names)
        losses = []
        for _ in range(STEPS):
            guide.run("fsdp2-cookbook", "strategy-step", names)
            losses.append(names["loss"].item())
        guide.run("fsdp2-cookbook", "strategy-save", names)
        after = names["model"](names["tokens"], names["targets"])
        after.backward()
        kept = kept_by(names["model"], names["optimizer"])
        # Into a new model, from the shards and from the full file.
        reloaded = []
        guide.run("fsdp2-cookbook", "strategy-wrap", names)
        guide.run("fsdp2-cookbook", "strategy-load", names)
        reloaded.append(names["model"](names["tokens"], names["targets"]).item())
        steps = {int(state["step"]) for state in names["optimizer"].state.values()}
        if rank == 0:
            guide.run("fsdp2-cookbook", "strategy-full", names)
        torch.distributed.barrier()
        guide.run("fsdp2-cookbook", "strategy-wrap", names := names | {"path": names["full"]})
        reloaded.append(names["model"](names["tokens"], names["targets"]).item())
        results[case] = {
            "losses": losses,
            "after": after.item(),
            "reloaded": reloaded,
            "kept": kept,
            "optimizer_steps": steps,
            "plan": names["plan"].strategy,
        }
    return results


@pytest.fixture(scope="module")
def baseline():
    """Losses by rank and step, and the bytes of all tensors, unsharded."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        row = [model(**batch(rank)) for rank in range(4)]
        (sum(row) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in row])
    parameters = sum(p.nbytes for p in model.parameters())
    return losses, {"parameters": parameters, "gradients": parameters, "optimizer": 2 * parameters}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("lab")
    save_file(build().state_dict(), path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def trained(directory):
    return run_ranks(4, train, directory, timeout=150)


CASES = [f"{strategy}-float32" for strategy in MESHES]


@pytest.mark.parametrize("case", CASES)
def test_lab_loss_falls_as_it_does_unsharded(trained, baseline, case):
    for rank, result in enumerate(trained):
        losses = result[case]["losses"]
        # Rounding of sums over ranks, carried through eight steps of AdamW, which normalises small gradients up.
        assert losses == pytest.approx([row[rank] for row in baseline[0]], rel=1e-4)
        assert losses[0] == pytest.approx(baseline[0][0][rank], rel=1e-6)
        assert losses[-1] < 0.6 * losses[0]


def test_lab_mixed_precision_falls_as_well(trained, baseline):
    for rank, result in enumerate(trained):
        losses = result["FULL_SHARD-bfloat16"]["losses"]
        # bf16 has 8 bits of mantissa: 2^-9 at every rounding of three layers, and eight steps.
        assert losses == pytest.approx([row[rank] for row in baseline[0]], rel=5e-2)
        assert losses != result["FULL_SHARD-float32"]["losses"]
        assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("case", "strategy", "share"),
    [
        ("FULL_SHARD-float32", "full_shard", 1 / 4),
        ("shard_grad_op-float32", "shard_grad_op", 1 / 4),
        ("4-float32", "hybrid_shard", 1 / 2),
        ("no_shard-float32", "no_shard", 1),
    ],
)
def test_lab_rank_keeps_its_share_of_the_tensors(trained, baseline, case, strategy, share):
    for result in trained:
        assert result[case]["plan"] == strategy
        for name, whole in baseline[1].items():
            # Every length is divisible by four here; AdamW adds a step counter of 4 bytes for each parameter.
            extra = 4 * 40 if name == "optimizer" else 0
            assert 0 <= result[case]["kept"][name] - whole * share <= extra
    if share < 1:
        assert sum(trained[0][case]["kept"].values()) < 0.6 * sum(baseline[1].values())


@pytest.mark.parametrize("case", [*CASES, "FULL_SHARD-bfloat16"])
def test_lab_saved_sharded_and_full_loads_with_the_same_loss(trained, case):
    for result in trained:
        assert result[case]["reloaded"] == [result[case]["after"]] * 2
        assert result[case]["optimizer_steps"] == {STEPS}
