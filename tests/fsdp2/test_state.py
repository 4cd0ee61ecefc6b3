"""Train state: several models, schedulers, generators, positions in one checkpoint, on other worlds too."""

from __future__ import annotations

import random
import re
import resource
from collections import Counter, OrderedDict
from concurrent.futures import wait

import numpy as np
import pytest
import torch
from fsdp2.ranks import run_ranks
from torch import nn
from torch.optim import lr_scheduler

from ckpt_tools import api
from ckpt_tools.errors import CkptError, DestinationExistsError, UnreadableError, UsageError
from ckpt_tools.fsdp2 import (
    PerRank,
    RngState,
    async_save_checkpoint,
    load_checkpoint,
    load_optimizer,
    parameter_groups,
    save as saving,
    save_checkpoint,
)


class Net(nn.Module):
    """Dropout draws from the rank's generator; rows that four ranks cannot share evenly."""

    def __init__(self, seed=0, drops=0.25):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.last = nn.Linear(10, 3)
        self.drops = drops

    def forward(self, x):
        hidden = nn.functional.dropout(self.norm(self.first(x)), self.drops)
        return self.last(hidden)


class Loader:
    """A data loader with a position, as torchdata's have one."""

    def __init__(self, rank=0):
        self.rank, self.seen, self.epochs = rank, 0, {}

    def batch(self):
        self.seen += 1
        draw = torch.Generator().manual_seed(100 * self.rank + self.seen)
        return torch.randn(4, 6, generator=draw)

    def state_dict(self):
        return {"seen": self.seen, "epochs": self.epochs, "place": {"file": "a.txt", "rows": [1, 2], "pair": (1, None)}}

    def load_state_dict(self, state):
        assert state["place"] == {"file": "a.txt", "rows": [1, 2], "pair": (1, None)}
        self.seen, self.epochs = state["seen"], state["epochs"]


class Run:
    """Actor and critic, each with its optimizer, a schedule, a loader per rank, an average and progress."""

    def __init__(self, mesh=None, device="cpu", rank=0, drops=0.25):
        from ckpt_tools.fsdp2 import shard_model

        with torch.device(device):
            self.actor, self.critic = Net(0, drops), Net(1, drops)
        for model in (self.actor, self.critic) if mesh is not None else ():
            shard_model(model, mesh, blocks=["first"])
        self.optimizer = torch.optim.AdamW(parameter_groups(self.actor, 0.1), lr=1e-2)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9)
        self.scheduler = lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 4], gamma=0.5)
        self.loader = Loader(rank)
        self.ema = {name: p.detach().clone() for name, p in self.actor.named_parameters()} if device == "cpu" else {}
        self.progress = {"step": 0, "best": float("inf"), "name": "run", "notes": None, "metrics": {}}

    def state(self):
        return {
            "critic": self.critic,
            "critic_optimizer": self.critic_optimizer,
            "scheduler": self.scheduler,
            "rng": RngState(),
            "data": PerRank(self.loader),
            "ema": self.ema,
            "progress": self.progress,
        }

    def step(self, x=None):
        x = self.loader.batch() if x is None else x
        losses = []
        for model, optimizer in ((self.actor, self.optimizer), (self.critic, self.critic_optimizer)):
            loss = (model(x) - random.random() - np.random.rand()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        self.scheduler.step()
        with torch.no_grad():
            for name, parameter in self.actor.named_parameters():
                self.ema[name].lerp_(parameter, 0.1)
        self.progress["step"] += 1
        self.progress["best"] = min(self.progress["best"], *losses)
        return [*losses, self.optimizer.param_groups[0]["lr"]]

    def save(self, path, **options):
        save_checkpoint(self.actor, self.optimizer, path, state=self.state(), **options)

    def load(self, path, **options):
        return load_checkpoint(self.actor, path, optimizer=self.optimizer, state=self.state(), **options)


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def test_everything_comes_back_bitwise_in_one_process(tmp_path):
    run = Run()
    seed(7)
    for _ in range(3):
        run.step()
    run.save(tmp_path / "step")
    seed(8)  # whatever else draws
    again = Run()
    report = again.load(tmp_path / "step")
    assert (report.missing, report.unexpected, report.unread, report.notes) == ((), (), (), ())
    assert report.state["progress"] == again.progress == run.progress
    assert again.progress["metrics"] == {}
    assert type(again.scheduler.milestones) is Counter
    assert again.scheduler.milestones == run.scheduler.milestones
    assert all(torch.equal(again.ema[name], tensor) for name, tensor in run.ema.items())
    resumed = [again.step() for _ in range(3)]
    seed(0)
    random.seed(0)
    load_checkpoint(Run().actor, tmp_path / "step", state={"rng": RngState()})
    assert [run.step() for _ in range(3)] == resumed
    assert api.verify(tmp_path / "step", level="data").ok


def test_optimizer_and_schedule_that_are_older_than_the_load_train_on(tmp_path):
    run = Run()
    run.step()
    run.save(tmp_path / "step")
    again = Run(device="meta")
    again.ema = {name: torch.zeros_like(p, device="cpu") for name, p in again.actor.named_parameters()}
    again.load(tmp_path / "step")
    own = {id(p) for p in again.actor.parameters()}
    assert all(id(p) in own for group in again.optimizer.param_groups for p in group["params"])
    before = again.actor.last.weight.detach().clone()
    again.step()
    assert not torch.equal(before, again.actor.last.weight)


@pytest.mark.parametrize(
    "name",
    [
        "CosineAnnealingLR",
        "OneCycleLR",
        "ReduceLROnPlateau",
        "SequentialLR",
        "ChainedScheduler",
        "LambdaLR",
        "CyclicLR",
    ],
)
def test_schedules_of_torch_come_back_as_they_were(tmp_path, name):
    def make(optimizer):
        parts = {
            "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 10),
            "OneCycleLR": lambda: lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
            "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
            "LambdaLR": lambda: lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step]),
            "CyclicLR": lambda: lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        }
        if name in parts:
            return parts[name]()
        two = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ConstantLR(optimizer)]
        return (
            lr_scheduler.SequentialLR(optimizer, two, [3])
            if name == "SequentialLR"
            else getattr(lr_scheduler, name)(two)
        )

    def started():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, make(optimizer)

    def rates(optimizer, scheduler):
        found = []
        for _ in range(4):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = started()
    rates(optimizer, scheduler)
    save_checkpoint(model, optimizer, tmp_path / "step", state={"scheduler": scheduler})
    again, other, schedule = started()
    load_checkpoint(again, tmp_path / "step", optimizer=other, state={"scheduler": schedule})
    assert schedule.state_dict() == scheduler.state_dict()
    assert rates(other, schedule) == rates(optimizer, scheduler)


def test_stock_dcp_load_reads_the_same_bytes(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    run = Run()
    for _ in range(3):
        run.step()
    run.scheduler = lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    run.step()
    run.save(tmp_path / "step")
    again = Run()
    again.scheduler = lr_scheduler.CosineAnnealingLR(again.optimizer, 10)
    model, optimizer = get_state_dict(again.actor, again.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": again.scheduler, "rng": RngState()}
    state |= {"data": PerRank(again.loader), "progress": again.progress}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=tmp_path / "step", no_dist=True)
    set_state_dict(again.actor, again.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    assert again.scheduler.state_dict() == run.scheduler.state_dict()
    assert again.progress == run.progress
    assert [again.step() for _ in range(2)]
    assert again.loader.seen == run.loader.seen + 2


def test_gather_takes_the_model_and_says_what_else_is_there(tmp_path):
    run = Run()
    run.step()
    run.save(tmp_path / "step")
    report = api.gather(tmp_path / "step", tmp_path / "out")
    model = Net(5)
    load_checkpoint(model, tmp_path / "out")
    assert torch.equal(model.last.weight, run.actor.last.weight)
    assert "left out 24 tensors of optimizer state" in report.notes  # of both optimizers
    assert "(of critic, rng, ema; --strip-prefix takes one)" in " ".join(report.notes)
    api.gather(tmp_path / "step", tmp_path / "critic", strip_prefix="critic")
    load_checkpoint(model, tmp_path / "critic")
    assert torch.equal(model.last.weight, run.critic.last.weight)
    api.reshard(tmp_path / "step", tmp_path / "two", mesh="dp_shard=2")
    assert api.verify(tmp_path / "two", against=tmp_path / "step").ok
    again = Run()
    again.load(tmp_path / "two")
    assert again.progress == run.progress
    assert torch.equal(again.critic.last.weight, run.critic.last.weight)
    load_optimizer(again.actor, again.optimizer, tmp_path / "two")
    report = load_checkpoint(again.actor, tmp_path / "two", state={"ema": None})
    assert [note.partition(":")[0] for note in report.notes] == ["ema"]  # nothing says how to cut it
    assert torch.equal(report.state["ema"]["last.weight"], run.ema["last.weight"])


class Odd(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (b"bytes", "state: odd"),
        ({"inner": {1, 2}}, "state: odd.inner"),
        ({"inner": [np.float64(1.5)]}, "state: odd.inner"),
        (np.zeros(2), "state: odd"),
        (lambda: 1, "state: odd"),
        (torch.Generator(), "state: odd"),
        ((1, torch.zeros(2)), "state: odd"),
        ({"a": [(torch.zeros(2),)]}, "state: odd.a"),
        (Odd("text"), "state: odd"),
        (torch.float32, "state: odd"),
        (OrderedDict(a=complex(1, 2)), "state: odd.a"),
        (torch.zeros(2).to_sparse(), "state: odd"),
        (torch.zeros(2, device="meta"), "state: odd"),
        ({1: 2}, "state: odd"),
        ({"a": [{"b": {None: 1}}]}, "state: odd.a.0.b"),
        ({"a.b": 1, "a": {"b": 2}}, "state"),
    ],
    ids=lambda value: re.sub(" at 0x\\w+", "", repr(value)),  # equal in every process
)
def test_state_that_could_not_be_read_back_is_refused_by_name(tmp_path, value, where):
    with pytest.raises(UsageError) as caught:
        save_checkpoint(Net(), None, tmp_path / "step", state={"odd": value})
    assert caught.value.where == where
    assert not list(tmp_path.iterdir())


def test_values_come_back_in_place_and_in_the_report(tmp_path):
    values = {
        "step": 3,
        "none": None,
        "text": "é",
        "table": {"rows": [1, [2.5, "x"]], "pair": (1, (2, None)), "empty": {}, "nothing": [], "list": [{}, {"a": 1}]},
        "noise": torch.arange(6.0).reshape(2, 3).t(),
        "half": {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.tensor(True), "none": torch.zeros(0, 4)},
        "nan": float("nan"),
        "generator": np.random.default_rng(1).bit_generator.state,
    }
    save_checkpoint(Net(), None, tmp_path / "step", state=values)
    mine = torch.zeros(3, 2)
    half = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    half_a = half["a"]
    asked = dict.fromkeys(values) | {"noise": mine, "half": half}
    report = load_checkpoint(Net(), tmp_path / "step", state=asked)
    for name in ("step", "none", "text", "table", "generator"):
        assert report.state[name] == values[name], name
        assert type(report.state[name]) is type(values[name])
    assert report.state["nan"] != report.state["nan"]
    assert torch.equal(mine, values["noise"])
    assert torch.equal(half_a, values["half"]["a"])
    assert half["b"].dtype == torch.bool
    assert report.state["half"]["none"].shape == (0, 4)
    report = load_checkpoint(Net(), tmp_path / "step", state={"step": 0})
    assert set(report.unread) == set(values) - {"step"}


def test_what_the_checkpoint_lacks_is_missing(tmp_path):
    run = Run()
    save_checkpoint(run.actor, run.optimizer, tmp_path / "step", state={"progress": {"step": 3}})
    with pytest.raises(
        UnreadableError, match=r"does not contain this train state: critic, critic_optimizer, scheduler"
    ):
        run.load(tmp_path / "step")
    report = run.load(tmp_path / "step", strict=False)
    assert "progress.best" in report.missing
    assert "critic" in report.missing
    assert run.progress["step"] == 3
    save_checkpoint(run.actor, None, tmp_path / "model")
    with pytest.raises(UnreadableError, match="no optimizer state"):
        load_checkpoint(run.actor, tmp_path / "model", optimizer=run.optimizer)


@pytest.mark.parametrize("name", ["model", "optimizer", "a.b", "", 3])
def test_names_that_cannot_be_keys_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match="not a valid name for train state"):
        save_checkpoint(Net(), None, tmp_path / "step", state={name: 1})


def test_optimizer_of_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no model has all parameters"):
        save_checkpoint(Net(), None, tmp_path / "step", state={"other": torch.optim.SGD(Net().parameters())})
    with pytest.raises(UsageError, match=r"2 in all|6 in all"):
        save_checkpoint(Net(), None, tmp_path / "step", state={"ref": Net().to("meta")})


@pytest.mark.parametrize(
    ("saved", "given", "error", "message"),
    [
        (3, {"step": 0}, UnreadableError, "does not contain this train state: x"),
        (torch.ones(1), torch.zeros(3), UsageError, r"must be \[3\] torch.float32, the checkpoint has \[1\]"),
        ({"a": torch.ones(2)}, {"a": torch.zeros(2, dtype=torch.int64)}, UsageError, "must be .* at: state: x.a"),
        (torch.ones(2), torch.zeros(2, device="meta"), UsageError, "cannot fill a tensor on meta"),
    ],
    ids=["number-for-dict", "broadcast", "dtype", "meta"],
)
def test_what_cannot_take_the_value_is_refused_before_anything_changes(tmp_path, saved, given, error, message):
    save_checkpoint(Net(1), None, tmp_path / "step", state={"x": saved})
    model = Net(2)
    with pytest.raises(error, match=message):
        load_checkpoint(model, tmp_path / "step", state={"x": given})
    assert torch.equal(model.last.weight, Net(2).last.weight)


def test_tensors_on_meta_in_a_dict_are_replaced(tmp_path):
    save_checkpoint(Net(), None, tmp_path / "step", state={"x": {"a": torch.ones(2)}})
    given = {"a": torch.zeros(2, device="meta")}
    load_checkpoint(Net(), tmp_path / "step", state={"x": given})
    assert given["a"].tolist() == [1, 1]


def test_two_optimizers_of_one_model_come_back(tmp_path):
    def make():
        model = Net(1, drops=0.0)
        split = [[p for p in model.parameters() if (p.dim() == 2) is wide] for wide in (False, True)]
        return model, torch.optim.AdamW(split[0], lr=1e-2), torch.optim.Muon(split[1], lr=1e-2)

    def step(model, *optimizers):
        model(torch.ones(2, 6)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return model.last.weight.tolist()

    model, adam, muon = make()
    step(model, adam, muon)
    save_checkpoint(model, adam, tmp_path / "step", state={"muon": muon})
    again, other, second = make()
    load_checkpoint(again, tmp_path / "step", optimizer=other, state={"muon": second})
    assert step(again, other, second) == step(model, adam, muon)


def test_state_that_would_come_back_in_part_is_refused(tmp_path):
    model = Net(drops=0.0)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(12.0).reshape(2, 6)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    save_checkpoint(model, optimizer, tmp_path / "step")
    with pytest.raises(UsageError, match=r"in nested lists or dicts is not supported: first\.weight\."):
        load_checkpoint(model, tmp_path / "step", optimizer=optimizer)
    other = Net(3)
    other.first.weight = model.first.weight
    save_checkpoint(model, None, tmp_path / "two", state={"other": other})
    with pytest.raises(UsageError, match="share a parameter in different modules"):
        load_checkpoint(model, tmp_path / "two", state={"other": other})
    loop = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself; at: state: loop"):
        save_checkpoint(model, None, tmp_path / "three", state={"loop": loop})


def test_async_save_keeps_what_was_there_when_it_was_called(tmp_path):
    run = Run()
    run.step()
    run.save(tmp_path / "now")
    saves = [async_save_checkpoint(run.actor, run.optimizer, tmp_path / "later", state=run.state())]
    with torch.no_grad():
        for parameter in (*run.actor.parameters(), *run.critic.parameters(), *run.ema.values()):
            parameter.zero_()
    saves.append(async_save_checkpoint(run.actor, None, tmp_path / "zeros"))  # waits for the first
    assert saves[0].done()
    for save in saves:
        save.result(timeout=60)
    assert api.diff(tmp_path / "now", tmp_path / "later").equal
    assert api.verify(tmp_path / "later").ok
    with pytest.raises(DestinationExistsError):
        async_save_checkpoint(run.actor, None, tmp_path / "later")


@pytest.mark.parametrize("is_asked", [False, True])
def test_failed_async_save_is_raised_by_the_next_one_unless_somebody_asked(tmp_path, monkeypatch, is_asked: bool):
    run = Run()
    with monkeypatch.context() as patched:
        patched.setattr(saving, "_publish", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        save = async_save_checkpoint(run.actor, None, tmp_path / "lost")
        if is_asked:
            with pytest.raises(OSError, match="disk full"):
                save.result(timeout=60)
        wait([save])
    if not is_asked:
        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(run.actor, None, tmp_path / "next")
    save_checkpoint(run.actor, None, tmp_path / "next")
    assert [each.name for each in tmp_path.iterdir()] == ["next"]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "num_workers": 2}], ids=["plain", "workers"])
def test_torchdata_loader_goes_on_where_it_was(tmp_path, options):
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata's loader is not installed")

    def make():
        return loaders.StatefulDataLoader(list(range(40)), batch_size=4, **options)

    torch.manual_seed(0)
    loader = make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    save_checkpoint(Net(), None, tmp_path / "step", state={"data": PerRank(loader)})
    again = make()
    load_checkpoint(Net(), tmp_path / "step", state={"data": PerRank(again)})
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


# On ranks.


def mesh_of(world_size):
    from ckpt_tools.checkpoint.layout import parse_mesh
    from ckpt_tools.fsdp2 import build_device_mesh

    return build_device_mesh(parse_mesh(f"dp_shard={world_size}"))


def draws():
    return torch.rand(2).tolist(), random.random(), np.random.rand()


def save_on_ranks(rank, world_size, out):
    import torch.distributed as dist

    run = Run(mesh_of(world_size), rank=rank)
    seed(rank)
    for _ in range(2):
        run.step()
    run.progress["best"] = 0.0  # of this rank: they differ
    save = async_save_checkpoint(run.actor, run.optimizer, out / "async", state=run.state())
    run.save(out / "step")
    save.result(timeout=60)
    after = [run.step() for _ in range(2)], draws()
    seen = {}
    for name, state in {
        "value": {"loss": float(rank)},
        "object": {"data": run.loader if rank else Loader(5)},
        "names": {"a": 1} if rank else {"b": 1},
        "one rank": {"odd": b"x" if rank else 1},
    }.items():
        try:
            save_checkpoint(run.actor, None, out / name, state=state)
        except CkptError as error:
            seen[name] = type(error).__name__, error.what, error.where
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        async_save_checkpoint(run.actor, None, out / "gone").result(timeout=60)
    except CkptError as error:
        seen["gone"] = error.what
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    return after, seen, sorted(p.name for p in out.iterdir())


def load_on_ranks(rank, world_size, out):
    run = Run(mesh_of(world_size), rank=rank)
    seed(1234)
    report = run.load(out, strict=False)
    state = {"seen": run.loader.seen, "step": run.progress["step"], "missing": report.missing, "notes": report.notes}
    weights = {name: p.detach().full_tensor().clone() for name, p in run.critic.named_parameters()}
    moments = {name: p.full_tensor().clone() for name, p in run.ema.items()}
    before = draws()
    run.load(out, strict=False)
    losses = [run.step() for _ in range(2)]
    drawn = draws()
    if world_size == 2:
        plain = {name: tensor.tolist() for name, tensor in weights.items()}
        assert by_stock_load(rank, out) == (state["seen"], state["step"], before, plain)
    return state, weights, moments, losses, drawn, before


def by_stock_load(rank, out):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

    run = Run(mesh_of(2), rank=rank)
    model, optimizer = get_state_dict(run.actor, run.optimizer)
    state = {"model": model, "optimizer": optimizer, "critic": get_model_state_dict(run.critic), "ema": run.ema}
    state |= {"rng": RngState(), "data": PerRank(run.loader), "progress": run.progress}
    dcp.load(state, checkpoint_id=out)
    set_state_dict(run.actor, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    run.critic.load_state_dict(state["critic"])
    weights = {name: p.detach().full_tensor().tolist() for name, p in run.critic.named_parameters()}
    drawn = draws()
    return run.loader.seen, run.progress["step"], drawn, weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("state")
    return out, run_ranks(2, save_on_ranks, out, timeout=120)


@pytest.mark.full
def test_ranks_resume_bitwise_with_their_own_streams_and_places(saved):
    out, ran = saved
    for name in ("step", "async"):
        for (after, _, _), result in zip(ran, run_ranks(2, load_on_ranks, out / name), strict=True):
            state, _, _, losses, drawn, _ = result
            assert state == {"seen": 2, "step": 2, "missing": (), "notes": ()}
            assert (losses, drawn) == after
    assert ran[0][0] != ran[1][0]
    assert api.verify(out / "step", level="data").ok


@pytest.mark.full
def test_another_number_of_ranks_gets_the_same_weights_and_says_what_else(saved):
    out, _ = saved
    two = run_ranks(2, load_on_ranks, out / "step")
    for world_size in (1, 4):
        results = run_ranks(world_size, load_on_ranks, out / "step")
        for rank, (state, weights, moments, _, _, before) in enumerate(results):
            assert state["missing"] == ("data",)
            assert "each rank has its own" in " ".join(state["notes"])
            expected = "are not continued" if world_size == 1 else "ranks 2 to 3 start new random streams"
            assert expected in " ".join(state["notes"])
            assert all(torch.equal(weights[name], two[0][1][name]) for name in weights)
            assert all(torch.equal(moments[name], two[0][2][name]) for name in moments)
            if rank < 2:
                assert before == two[rank][5]
        streams = [result[5] for result in results]
        assert len(set(map(repr, streams))) == world_size


@pytest.mark.full
def test_values_that_differ_between_ranks_are_refused_on_all(saved):
    _, ran = saved
    for rank, (_, seen, listing) in enumerate(ran):
        assert "differ in loss, but only one copy is stored" in seen["value"][1]
        assert "data.seen" in seen["object"][1]
        assert "differ in" in seen["names"][1]
        assert seen["one rank"][0] == "UsageError"
        assert ("rank 1" in seen["one rank"][2]) == (rank == 0)
        assert "rank 1" in seen["gone"]
        assert listing == ["async", "step"]
