"""Saving: all or nothing on every rank; optimizers that come back on other groups; what only rank 0 has."""

from __future__ import annotations

import os
import resource

import pytest
import torch
from fsdp2 import models
from fsdp2.ranks import run_ranks
from torch import nn

from ckpt_tools import api
from ckpt_tools.errors import DestinationExistsError, UnreadableError, UsageError
from ckpt_tools.fsdp2 import load_checkpoint, load_optimizer, parameter_groups, save_checkpoint


def error_of(function, *args, **kwargs):
    """What a call raised: class name and message."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


class Broken(dict):
    """Tensors that cannot be listed."""

    def __len__(self):
        return 1

    def items(self):
        raise OSError("the disk of this rank is gone")


def contents(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def sharded(rank, world_size, mesh="dp_shard=2", kind="llama", source=None, **options):
    from ckpt_tools.checkpoint.layout import parse_mesh
    from ckpt_tools.fsdp2 import build_device_mesh, shard_model

    model = models.build(kind)
    shard_model(model, build_device_mesh(parse_mesh(mesh)), **options)
    if source is not None:
        load_checkpoint(model, source)
    return model


def save_with_failures(rank, world_size, source, out):
    import torch.distributed as dist

    model = sharded(rank, world_size, source=source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**models.batch_of("llama", 0, rank)).loss.backward()
    optimizer.step()
    save_checkpoint(model, optimizer, out / "good")
    before = contents(out)
    dist.barrier()  # rank 0 begins by making a staging directory
    seen = {}
    seen["exists"] = error_of(save_checkpoint, model, optimizer, out / "good")
    state = {"more": Broken() if rank == 1 else {}}
    seen["state"] = error_of(save_checkpoint, model, optimizer, out / "good", overwrite=True, state=state)
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    seen["write"] = error_of(save_checkpoint, model, optimizer, out / "new")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seen["parent"] = error_of(save_checkpoint, model, optimizer, out / "good" / ".metadata" / "such")
    seen["load"] = error_of(load_checkpoint, model, source if rank == 0 else out / "missing")
    dist.barrier()
    after = contents(out)
    seen["changed"] = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    seen["listing"] = sorted(os.listdir(out))
    dist.barrier()
    save_checkpoint(model, optimizer, out / "good", overwrite=True, state={"more": torch.arange(3.0)})
    return seen


@pytest.mark.full
def test_failure_on_one_rank_fails_all_and_leaves_the_destination(tmp_path):
    models.build("llama", "cpu").save_pretrained(tmp_path / "hf")
    out = tmp_path / "out"
    out.mkdir()
    both = run_ranks(2, save_with_failures, tmp_path / "hf", out, timeout=90)
    for rank, seen in enumerate(both):
        assert seen["exists"][0] == "DestinationExistsError"
        assert ("rank 0" in seen["exists"][1]) == (rank == 1)
        assert seen["parent"][0] == "UsageError"
        assert not seen["changed"]
        assert seen["listing"] == ["good"]
        assert seen["write"][0] == "CkptError"
        assert "rank 1" in seen["write"][1]
        assert "File too large" in seen["write"][1]
    # The one that failed says its own error, the other who it was.
    assert both[0]["state"] == ("CkptError", "OSError: the disk of this rank is gone; at: rank 1")
    assert both[1]["state"] == ("OSError", "the disk of this rank is gone")
    assert both[0]["load"][0] == "MissingError"
    assert "rank 1" in both[0]["load"][1]
    assert api.verify(out / "good").ok
    assert "more" in {entry.fqn for entry in api.open_checkpoint(out / "good").tensors}


def load_from_rank_0(rank, world_size, directory):
    from ckpt_tools.checkpoint.layout import parse_mesh
    from ckpt_tools.fsdp2 import build_device_mesh, rank0_load, shard_model

    rows = []
    for source in ("mapping", "path"):
        model = sharded(rank, world_size, mesh="dp_shard=3", kind="llama-tied")
        given = None
        if rank == 0:
            given = models.build("llama-tied", "cpu").state_dict() if source == "mapping" else directory
        report = rank0_load(model, given)
        state = {name: p.full_tensor() for name, p in model.named_parameters()}
        rows.append((report, state if rank == 0 else None, model.lm_head.weight is model.model.embed_tokens.weight))
    empty = save_with_empty_parts(directory / "empty")
    wrong = {"model.norm.weight": torch.ones(3)} if rank == 0 else None
    mesh = build_device_mesh(parse_mesh("dp_shard=3"))
    shape = error_of(rank0_load, model, wrong, strict=False)
    names = error_of(rank0_load, model, {} if rank == 0 else None)
    nothing = error_of(rank0_load, model, None)
    other = models.build("llama" if rank else "bert")
    shard_model(other, mesh)
    differ = error_of(rank0_load, other, {} if rank == 0 else None)
    return rows, shape, names, nothing, differ, empty


def save_with_empty_parts(path):
    """Two rows on three ranks: the last one has nothing of them. Saved and loaded, what is different?"""
    from ckpt_tools.checkpoint.layout import parse_mesh
    from ckpt_tools.fsdp2 import build_device_mesh, shard_model

    mesh = build_device_mesh(parse_mesh("dp_shard=3"))
    pairs = []
    for number in range(2):
        model = Pair()
        if number:
            model.to("meta")
        shard_model(model, mesh)
        if number:
            load_checkpoint(model, path)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if number:
            load_optimizer(model, optimizer, path)
        else:
            step(model, optimizer, 0)
            save_checkpoint(model, optimizer, path)
        pairs.append((step(model, optimizer, 1), step(model, optimizer, 2)))
    return pairs, model.last.weight.to_local().numel(), model.last.bias.to_local().numel()


@pytest.mark.full
def test_rank_0_gives_every_rank_its_parts(tmp_path):
    expected = models.build("llama-tied", "cpu")
    expected.save_pretrained(tmp_path)
    for rank, (rows, shape, names, nothing, differ, empty) in enumerate(
        run_ranks(3, load_from_rank_0, tmp_path, timeout=90)
    ):
        for report, state, is_tied in rows:
            assert (report.missing, report.unexpected, report.tied) == ((), (), ("lm_head.weight",))
            assert "model.rotary_emb.inv_freq" in report.buffers
            assert is_tied
            assert rank == 0 or report.loaded_bytes == 0
            if state is not None:
                assert all(torch.equal(state[name], p) for name, p in expected.named_parameters())
        assert shape[0] == "UsageError"
        assert "[3], and [32]" in shape[1]
        assert names[0] == "UnreadableError"
        assert "rank 0 has nothing to load" in nothing[1]
        assert "the models of rank 0 and rank 1 differ" in differ[1]
        assert empty[0][0] == empty[0][1]
        assert empty[1:] == ((4, 1) if rank < 2 else (0, 0))
    assert api.verify(tmp_path / "empty").ok


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def step(model, optimizer, number):
    draw = torch.Generator().manual_seed(number)
    loss = model(torch.randn(5, 3, generator=draw)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9)),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2), amsgrad=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_continues_bitwise_in_one_process(tmp_path, name):
    model = Pair()
    optimizer = OPTIMIZERS[name](parameter_groups(model, 0.1))
    for number in range(3):
        step(model, optimizer, number)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 3e-3
    save_checkpoint(model, optimizer, tmp_path / "saved")
    with torch.device("meta"):
        again = Pair()
    load_checkpoint(again, tmp_path / "saved")
    other = OPTIMIZERS[name](parameter_groups(again, 0.7))
    load_optimizer(again, other, tmp_path / "saved")
    assert [g["weight_decay"] for g in other.param_groups] == [0.1, 0.0]
    assert [float(g["lr"]) for g in other.param_groups] == [3e-3, 3e-3]
    for number in range(3, 6):
        assert step(again, other, number) == step(model, optimizer, number)
    assert api.verify(tmp_path / "saved").ok


def saved_pair(path, groups=None):
    model = Pair()
    optimizer = torch.optim.AdamW(groups(model) if groups else model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    save_checkpoint(model, optimizer, path)
    return model, optimizer


def test_optimizer_groups_may_be_cut_anew_when_their_options_agree(tmp_path):
    model, optimizer = saved_pair(tmp_path / "one")
    again = Pair()
    load_checkpoint(again, tmp_path / "one")
    groups = [{"params": list(again.last.parameters())}, {"params": list(again.first.parameters())}]
    other = torch.optim.AdamW([*groups, {"params": list(again.norm.parameters())}], lr=9.0)
    load_optimizer(again, other, tmp_path / "one")
    assert {g["lr"] for g in other.param_groups} == {1e-2}
    assert step(again, other, 1) == step(model, optimizer, 1)
    assert step(again, other, 2) == step(model, optimizer, 2)


def test_optimizer_groups_that_disagree_are_not_merged(tmp_path):
    saved_pair(tmp_path / "two", lambda model: parameter_groups(model, 0.1))
    again = Pair()
    with pytest.raises(UsageError, match="had different options"):
        load_optimizer(again, torch.optim.AdamW(again.parameters()), tmp_path / "two")


def test_optimizer_of_another_model_is_refused(tmp_path):
    saved_pair(tmp_path / "one")
    with pytest.raises(UsageError, match="does not belong to the model"):
        load_optimizer(Pair(), torch.optim.AdamW(Pair().parameters()), tmp_path / "one")
    saved_pair(tmp_path / "part", lambda model: list(model.first.parameters()))
    again = Pair()
    with pytest.raises(UnreadableError, match=r"no optimizer state of 'norm\.weight'"):
        load_optimizer(again, torch.optim.AdamW(again.parameters()), tmp_path / "part")


def test_checkpoint_without_optimizer_says_so(tmp_path):
    save_checkpoint(Pair(), None, tmp_path / "model")
    again = Pair()
    with pytest.raises(UnreadableError, match="contains no optimizer state"):
        load_optimizer(again, torch.optim.AdamW(again.parameters()), tmp_path / "model")


def test_flat_optimizer_state_of_torch_is_understood(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = Pair()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
    step(model, optimizer, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state, flat = get_state_dict(model, optimizer, options=options)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": state, "optim": flat}, checkpoint_id=tmp_path / "flat", no_dist=True)
    again = Pair()
    load_checkpoint(again, tmp_path / "flat")
    other = torch.optim.AdamW(parameter_groups(again, 0.0), lr=1.0)
    load_optimizer(again, other, tmp_path / "flat")
    for number in (1, 2):
        assert step(again, other, number) == step(model, optimizer, number)


def test_options_are_never_unpickled(tmp_path):
    import torch.distributed.checkpoint as dcp

    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    model = Pair()
    state = {f"state.{name}.exp_avg": torch.zeros_like(p) for name, p in model.named_parameters()}
    state |= {f"param_groups.{name}.lr": Hostile() for name, _ in model.named_parameters()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "hostile", no_dist=True)
    with pytest.raises(UnreadableError, match="does not hold plain values"):
        load_optimizer(model, torch.optim.AdamW(model.parameters()), tmp_path / "hostile")
    assert not (tmp_path / "ran").exists()


def test_trainable_only_leaves_frozen_parameters_out(tmp_path):
    model = Pair()
    model.first.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    step(model, optimizer, 0)
    save_checkpoint(model, optimizer, tmp_path / "part", trainable_only=True)
    names = {entry.fqn for entry in api.open_checkpoint(tmp_path / "part").tensors}
    assert not [name for name in names if "first" in name]
    assert "model.last.weight" in names


def test_model_on_meta_is_not_saved(tmp_path):
    with torch.device("meta"):
        model = Pair()
    with pytest.raises(UsageError, match="have no values"):
        save_checkpoint(model, None, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_destination_that_exists_is_kept(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "note").write_text("mine")
    with pytest.raises(DestinationExistsError):
        save_checkpoint(Pair(), None, tmp_path / "x")
    with pytest.raises(UsageError, match="only replaces checkpoints"):
        save_checkpoint(Pair(), None, tmp_path / "x", overwrite=True)
    assert (tmp_path / "x" / "note").read_text() == "mine"
