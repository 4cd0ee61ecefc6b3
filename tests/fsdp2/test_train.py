"""Clipping across meshes, accumulation, groups and freezing, against plain PyTorch on the unsharded model."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from fsdp2 import models
from fsdp2.ranks import run_ranks
from torch import nn

from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2 import accumulate, clip_grad_norm, frozen, offload_optimizer, parameter_groups

MESHES = {
    "fsdp": ("full_shard", "dp_shard=4"),
    "hsdp": ("hybrid_shard", "dp_replicate=2,dp_shard=2"),
    "tp": ("full_shard", "dp_shard=2,tp=2"),
    "replicated": ("no_shard", "dp_replicate=4"),
}
ACCUMULATED = ("hsdp", "tp", "replicated")
MAX_NORM = 0.05
NORMS = (2.0, 1.0, math.inf)


def clip(rank, world_size, source):
    """Norms and clipped gradients of every mesh; gradients of accumulation with and without sync."""
    from torch.distributed.tensor import DTensor

    from ckpt_tools.fsdp2 import Policy, build_device_mesh, load_checkpoint, shard_model

    def full(gradient):
        return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()

    results = {}
    for name, (strategy, text) in MESHES.items():
        mesh = parse_mesh(text)
        model = models.build("llama")
        plan = "auto" if mesh.size("tp") > 1 else None
        shard_model(model, build_device_mesh(mesh), Policy(strategy=strategy), tp_plan=plan)
        load_checkpoint(model, source)
        index = rank // mesh.size("tp")
        rows = []
        for norm_type in NORMS:
            model.zero_grad()
            model(**models.batch_of("llama", 0, index)).loss.backward()
            norm = clip_grad_norm(model.parameters(), MAX_NORM, norm_type)
            rows.append((norm, {n: full(p.grad) for n, p in model.named_parameters()}))
        accumulated = []
        for keeps in (None, False, True) if name in ACCUMULATED else ():
            model.zero_grad()
            for number in range(2):
                with accumulate(model, number == 1, keep_unsharded=bool(keeps)) if keeps is not None else nullcontext():
                    (model(**models.batch_of("llama", number, index)).loss / 2).backward()
            accumulated.append({n: full(p.grad) for n, p in model.named_parameters()})
        results[name] = rows, accumulated
    return results


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    models.build("llama", "cpu").save_pretrained(directory)
    return run_ranks(4, clip, directory, timeout=200)


@pytest.mark.full
@pytest.mark.parametrize("name", MESHES)
def test_clip_is_that_of_the_unsharded_model(clipped, name):
    mesh = parse_mesh(MESHES[name][1])
    num_ranks = mesh.world_size // mesh.size("tp")
    for which, norm_type in enumerate(NORMS):
        model = models.build("llama", "cpu")
        for index in range(num_ranks):
            (model(**models.batch_of("llama", 0, index)).loss / num_ranks).backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
        assert expected > MAX_NORM  # otherwise nothing would be clipped
        for results in clipped:
            norm = results[name][0][which][0]
            assert type(norm) is torch.Tensor
            assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        gradients = clipped[0][name][0][which][1]
        for fqn, parameter in model.named_parameters():
            assert (gradients[fqn] - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), fqn


@pytest.mark.full
@pytest.mark.parametrize("name", ACCUMULATED)
def test_accumulation_without_sync_gives_the_same_gradients(clipped, name):
    synced, local, kept = clipped[0][name][1]
    for fqn, gradient in synced.items():
        # Ranks and micro-batches are summed in another order.
        assert (local[fqn] - gradient).norm() < 1e-5 * gradient.norm(), fqn
        assert torch.equal(local[fqn], kept[fqn]), fqn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.ln_1 = nn.LayerNorm(2)
        self.final_norm = nn.Linear(2, 2, bias=False)
        self.decoder = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


def names_of(model, group):
    return [name for name, p in model.named_parameters() if any(p is q for q in group["params"])]


def test_groups_go_by_name_and_by_class():
    model = Net()
    model.decoder.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert names_of(model, decayed) == ["lin.weight"]
    assert names_of(model, plain) == ["lin.bias", "ln_1.weight", "ln_1.bias", "final_norm.weight"]
    (only,) = parameter_groups(model, 0.3, no_decay=())
    assert len(only["params"]) == 5
    decayed, plain = parameter_groups(model, 0.3, no_decay=("lin.*",))
    assert names_of(model, plain) == ["lin.weight", "lin.bias"]


def test_tied_parameters_are_in_one_group_once():
    model = models.build("llama-tied")
    groups = parameter_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_frozen_takes_modules_and_globs():
    model = Net()
    assert frozen(model, ["decoder", "*.bias"]) == (
        "decoder.0.weight",
        "decoder.0.bias",
        "decoder.1.weight",
        "decoder.1.bias",
        "lin.bias",
        "ln_1.bias",
    )
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "lin.weight",
        "ln_1.weight",
        "final_norm.weight",
    ]
    with pytest.raises(UsageError, match="'encoder' matches no parameter"):
        frozen(model, ["encoder"])


def test_clip_of_a_plain_model_is_torchs():
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())
    for model in (one, other):
        for number, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, float(number))
    assert clip_grad_norm(one, 1.0) == torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert clip_grad_norm(Net(), 1.0) == 0.0
    one.lin.weight.grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        clip_grad_norm(one, 1.0, error_if_nonfinite=True)


def test_accumulate_needs_a_sharded_model():
    with pytest.raises(UsageError, match="no FSDP units"), accumulate(Net(), True):
        pass


@pytest.mark.gpu
def test_offloaded_optimizer_has_its_state_on_the_host_between_steps():
    def steps(offloads):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if offloads:
            offload_optimizer(optimizer)
        for _ in range(3):
            model.lin(torch.ones(1, 2, device="cuda")).sum().backward()
            optimizer.step()
        kept = {value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()}
        return kept, model.lin.weight.tolist()

    (kept, weights), (_, expected) = steps(offloads=True), steps(offloads=False)
    assert kept == {"cpu"}
    assert weights == expected
