"""Real architectures, tiny and random: built on meta, sharded, loaded from the hub's layout, against the reference."""

from __future__ import annotations

import pytest
import torch
from fsdp2 import models
from fsdp2.ranks import run_ranks

pytestmark = pytest.mark.full

KINDS = ("llama", "llama-tied", "qwen3-moe", "llava", "bert", "t5")
BLOCKS = {"llama": 2, "llama-tied": 2, "qwen3-moe": 2, "llava": 5, "bert": 2, "t5": 4}
TIED = {
    "llama-tied": {"lm_head.weight"},
    "bert": {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"},
    "t5": {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"},
}
BUFFERS = {"llama": "model.rotary_emb.inv_freq", "bert": "bert.embeddings.position_ids"}


def train(rank, world_size, directory):
    """Two steps of every architecture; what was loaded, and how it compares."""
    from torch.distributed.tensor import DTensor

    from ckpt_tools.checkpoint.layout import parse_mesh
    from ckpt_tools.fsdp2 import build_device_mesh, load_checkpoint, shard_model
    from ckpt_tools.fsdp2.ties import tied_groups

    mesh = build_device_mesh(parse_mesh("dp_shard=2"))
    results = {}
    for kind in KINDS:
        model = models.build(kind)
        ties = tied_groups(model)
        plan = shard_model(model, mesh, activation_checkpointing=kind in ("llama", "t5"))
        report = load_checkpoint(model, directory / kind)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        gradients = {}
        for step in range(2):
            loss = model(**models.batch_of(kind, step, rank)).loss
            loss.backward()
            if step == 0:
                gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results[kind] = {
            "blocks": len(plan.blocks),
            "report": report,
            "losses": losses,
            "gradients": gradients,
            "buffers": buffers,
            "poisoned": [n for n, b in model.named_buffers() if b.is_floating_point() and b.isnan().any()],
            "same_ties": tied_groups(model) == ties == plan.ties,
            "all_sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        }
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("architectures")
    for kind in KINDS:
        models.build(kind, "cpu").save_pretrained(directory / kind)
    return run_ranks(2, train, directory, timeout=200)


@pytest.mark.parametrize("kind", KINDS)
def test_architecture_trains_like_the_unsharded_model(trained, kind):
    losses, gradients, _ = models.reference(kind, 2, 2)
    for rank, results in enumerate(trained):
        result = results[kind]
        assert result["blocks"] == BLOCKS[kind]
        assert result["all_sharded"]
        assert result["losses"] == pytest.approx([row[rank] for row in losses], rel=1e-6)
        assert result["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (result["gradients"][name] - gradient).norm()
            # A key's bias changes no attention: its gradient is rounding alone, and is compared with 1.
            assert error < 1e-5 * max(gradient.norm(), 1e-3), name


@pytest.mark.parametrize("kind", KINDS)
def test_architecture_is_loaded_whole_with_ties_and_buffers(trained, kind):
    expected = models.build(kind, "cpu")
    buffers = dict(expected.named_buffers())
    for results in trained:
        report = results[kind]["report"]
        assert (report.missing, report.unexpected) == ((), ())
        assert set(report.tied) == TIED.get(kind, set())
        assert results[kind]["same_ties"]
        assert not results[kind]["poisoned"]
        assert results[kind]["buffers"].keys() == buffers.keys()
        for name, buffer in buffers.items():
            assert torch.equal(results[kind]["buffers"][name], buffer), name
        if kind in BUFFERS:
            assert BUFFERS[kind] in report.buffers
        total = sum(p.numel() * 4 for p in expected.parameters())
        # Halves, give or take a row; ties that are stored twice are compared, hence read, twice.
        assert report.loaded_bytes <= total * 0.5 + 4096
