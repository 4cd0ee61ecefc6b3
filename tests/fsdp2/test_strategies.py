"""Every strategy against the unsharded model: losses, gradients, weights; saved, and loaded on other ranks.

Tolerances: sums over ranks and over cut dims are taken in another order than the reference takes them, so losses
agree to some units in the last place of float32 (1e-6 relative), gradients to 1e-5 of their norm.
"""

from __future__ import annotations

import json

import pytest
import torch
from fsdp2 import models
from fsdp2.ranks import run_ranks

from ckpt_tools import api
from ckpt_tools.checkpoint.layout import parse_mesh

pytestmark = pytest.mark.full

NUM_STEPS = 3
CASES = {
    "full_shard": ("dp_shard=4", "hf"),
    "shard_grad_op": ("dp_shard=4", "dp"),
    "hybrid_shard": ("dp_replicate=2,dp_shard=2", "hf"),
    "no_shard": ("dp_replicate=4", "dp"),
    "full_shard-tp": ("dp_shard=2,tp=2", "tp"),
    "hybrid_shard-tp": ("dp_replicate=2,dp_shard=1,tp=2", "hf"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same model as HF files, cut for dp_shard=3, and for FSDP×TP."""
    directory = tmp_path_factory.mktemp("llama")
    models.build("llama", "cpu").save_pretrained(directory / "hf")
    api.shard(directory / "hf", directory / "dp", mesh="dp_shard=3")
    api.shard(directory / "hf", directory / "tp", mesh="dp_shard=2,tp=2", tp_plan="auto")
    return directory


def data_rank(mesh, rank):
    """This rank's place among those that see different data, and their number."""
    tp = mesh.size("tp")
    return rank // tp, mesh.world_size // tp


def train(rank, world_size, directory, out):
    """Three steps of every case; then save, load into a new model, and one more loss from both."""
    from ckpt_tools.fsdp2 import (
        Policy,
        build_device_mesh,
        load_checkpoint,
        load_optimizer,
        parameter_groups,
        save_checkpoint,
        shard_model,
    )

    results = {}
    for case, (mesh_text, source) in CASES.items():
        mesh = parse_mesh(mesh_text)
        index, _ = data_rank(mesh, rank)
        device_mesh = build_device_mesh(mesh)

        def make(path, mesh=mesh, device_mesh=device_mesh, case=case):
            model = models.build("llama")
            plan = "auto" if mesh.size("tp") > 1 else None
            shard_model(model, device_mesh, Policy(strategy=case.partition("-")[0]), tp_plan=plan)
            report = load_checkpoint(model, path)
            # The groups are those of the reference: one, all with weight decay.
            optimizer = torch.optim.AdamW(parameter_groups(model, 0.01, no_decay=()), lr=1e-2)
            return model, optimizer, report

        model, optimizer, report = make(directory / source)
        losses, gradients = [], {}
        for step in range(NUM_STEPS):
            loss = model(**models.batch_of("llama", step, index)).loss
            loss.backward()
            if step == 0:
                gradients = {name: full(p.grad) for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        save_checkpoint(model, optimizer, out / case)
        weights = {name: full(p) for name, p in model.named_parameters()}
        again, other, _ = make(out / case)
        load_optimizer(again, other, out / case)
        after = []
        for one, opt in ((model, optimizer), (again, other)):
            rows = []
            for step in range(NUM_STEPS, NUM_STEPS + 2):
                loss = one(**models.batch_of("llama", step, index)).loss
                loss.backward()
                opt.step()
                opt.zero_grad()
                rows.append(loss.item())
            after.append(rows)
        results[case] = {
            "losses": losses,
            "after": after,
            "bytes": report.loaded_bytes,
            "gradients": gradients if rank == 0 else None,
            "weights": weights if rank == 0 else None,
        }
    return results


def full(tensor):
    from torch.distributed.tensor import DTensor

    # Of a replicated tensor, full_tensor() is the local one itself.
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.fixture(scope="module")
def trained(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("saved")
    return run_ranks(4, train, sources, out, timeout=240), out


@pytest.fixture(scope="module")
def references():
    return {count: models.reference("llama", NUM_STEPS, count) for count in (2, 4)}


@pytest.mark.parametrize("case", CASES)
def test_strategy_trains_like_the_unsharded_model(trained, references, case):
    results, _ = trained
    mesh = parse_mesh(CASES[case][0])
    losses, gradients, weights = references[data_rank(mesh, 0)[1]]
    for rank, result in enumerate(results):
        index, _ = data_rank(mesh, rank)
        assert result[case]["losses"] == pytest.approx([row[index] for row in losses], rel=1e-6, abs=0)
    found = results[0][case]
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = (found["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, name
    for name, weight in weights.items():
        # Adam divides by the gradient's size: where a gradient is nearly 0, its rounding decides a step of up to lr.
        assert (found["weights"][name] - weight).norm() / weight.norm() < 1e-4, name


@pytest.mark.parametrize("case", CASES)
def test_saved_checkpoint_continues_bitwise(trained, case):
    for result in trained[0]:
        kept, reloaded = result[case]["after"]
        assert kept == reloaded


@pytest.mark.parametrize("case", CASES)
def test_saved_checkpoint_is_clean_and_says_its_mesh(trained, case):
    path = trained[1] / case
    result = api.verify(path)
    assert result.ok
    assert not result.findings
    checkpoint = api.open_checkpoint(path)
    assert str(checkpoint.mesh) == CASES[case][0]
    placed = {str(v) for p in checkpoint.placements.values() for v in p.values()}
    # FSDP marks its cut inside of tp in its own way: it is a cut all the same.
    assert ("dp_shard" in checkpoint.placements["model.model.layers.0.self_attn.q_proj.weight"]) == (case != "no_shard")
    assert placed == ({"S(0)", "S(1)"} if "-tp" in case else set() if case == "no_shard" else {"S(0)"})
    assert not list(path.parent.glob(f"*{case}*.*")), "staging is left"
    manifest = json.loads((path / "ckpt_manifest.json").read_text())
    assert manifest["tensors"]["optimizer.state.model.norm.weight.exp_avg"]["shape"] == [32]


def reload_on_two(rank, world_size, out):
    """The loss after every case's checkpoint, on two ranks with another strategy, and the next one."""
    from ckpt_tools.fsdp2 import build_device_mesh, load_checkpoint, load_optimizer, shard_model

    rows = {}
    for case in CASES:
        model = models.build("llama")
        shard_model(model, build_device_mesh(parse_mesh("dp_shard=2")))
        load_checkpoint(model, out / case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        load_optimizer(model, optimizer, out / case)
        losses = []
        for step in range(NUM_STEPS, NUM_STEPS + 2):
            loss = model(**models.batch_of("llama", step, rank)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        rows[case] = losses
    return rows


def test_saved_checkpoint_on_another_world_size_gives_the_same_loss(trained):
    results, out = trained
    for rank, rows in enumerate(run_ranks(2, reload_on_two, out, timeout=120)):
        for case, losses in rows.items():
            tp = parse_mesh(CASES[case][0]).size("tp")
            expected = results[rank * tp][case]["after"][0]
            if tp == 1:
                assert losses[0] == expected[0], case  # the same weights, gathered: the very same sums
            assert losses[0] == pytest.approx(expected[0], rel=1e-6), case
            if data_rank(parse_mesh(CASES[case][0]), 0)[1] == 2:  # the same batches: the same next step
                assert losses[1] == pytest.approx(expected[1], rel=1e-5), case


def test_stock_load_reads_what_was_saved(trained):
    import torch.distributed.checkpoint as dcp

    results, out = trained
    weights = results[0]["full_shard-tp"]["weights"]
    state = {"model": {name: torch.zeros_like(weight) for name, weight in weights.items()}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=out / "full_shard-tp", no_dist=True)
    for name, weight in weights.items():
        assert torch.equal(state["model"][name], weight), name


def test_load_reads_only_the_parts_of_this_rank(trained, sources):
    total = api.open_checkpoint(sources / "hf").total_bytes
    for case, (mesh_text, _) in CASES.items():
        mesh = parse_mesh(mesh_text)
        parts = mesh.size("dp_shard") if case != "no_shard" else 1
        for result in trained[0]:
            limit = total / parts
            assert result[case]["bytes"] <= limit * 1.001, case
            if mesh.size("tp") > 1:
                # All but the norms are cut once more; short parts of rows are read with what lies between them.
                assert result[case]["bytes"] < 0.7 * limit, case
