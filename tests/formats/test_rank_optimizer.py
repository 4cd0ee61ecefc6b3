"""The optimizer's state that every rank saved beside its part of the model; all are made by torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from formats.saved import fake_rank, flat, read
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_tools import api
from ckpt_tools.errors import UnreadableError, UsageError

NAMES = ("embed.weight", "up.weight", "up.bias", "down.weight", "norm.weight")
SHAPES = ((10, 6), (8, 6), (8,), (6, 8), (6,))
Make = Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer]
MESHES: dict[str, tuple[dict[str, int], list[object]]] = {
    "fsdp": ({"fsdp": 2}, [Shard(0)]),
    "hsdp": ({"ddp": 2, "fsdp": 2}, [Replicate(), Shard(0)]),
}


def save(directory: Path, make: Make, mesh: str = "fsdp", *, ties: bool = True, skipped: str = "") -> dict[str, object]:
    """Save a step as verl does: the model, and an optimizer that has stepped twice; return what one rank would have."""
    sizes, placements = MESHES[mesh]
    world = 2 if mesh == "fsdp" else 4
    directory.mkdir(parents=True, exist_ok=True)
    whole: dict[str, object] = {}
    for rank in (*range(world), None):
        with fake_rank(rank or 0, world):
            torch.manual_seed(0)
            axes = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

            def place(tensor: torch.Tensor, axes=axes, rank=rank) -> torch.Tensor:
                return tensor if rank is None else distribute_tensor(tensor, axes, placements, src_data_rank=None)

            values = {name: torch.randn(shape) for name, shape in zip(NAMES, SHAPES, strict=True)}
            model = {name: torch.nn.Parameter(place(value)) for name, value in values.items()}
            optimizer = make(model)
            for _ in range(2):
                for name, parameter in model.items():
                    if name != skipped:
                        parameter.grad = place(torch.randn(parameter.shape))
                optimizer.step()
            state = {name: parameter.detach() for name, parameter in model.items()}
            state["table"] = torch.arange(8.0)
            if ties:
                state["lm_head.weight"] = state["embed.weight"]
            if rank is None:
                whole = {"model": state, "optimizer": optimizer.state_dict()}
            else:
                for name, value in (("model", state), ("optim", optimizer.state_dict())):
                    torch.save(of_rank(value, axes), directory / f"{name}_world_size_{world}_rank_{rank}.pt")
    return whole


def of_rank(value: object, mesh: object) -> object:
    """A state whose DTensors are of this rank: what operations make has the mesh of the rank that was first."""
    if isinstance(value, dict):
        return {key: of_rank(inner, mesh) for key, inner in value.items()}
    if isinstance(value, list):
        return [of_rank(inner, mesh) for inner in value]
    if not isinstance(value, DTensor):
        return value
    own = {"shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(value.to_local(), mesh, value.placements, run_check=False, **own)


def adamw(model: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.values(), lr=0.1, foreach=False)


def two_groups(model: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    wide = [p for p in model.values() if p.ndim == 2]
    return torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.5}, {"params": [p for p in model.values() if p.ndim == 1]}],
        lr=0.1,
        foreach=False,
    )


def named(model: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.items())[::-1], lr=0.1, foreach=False)


def order(make: Make) -> list[str]:
    """The names of the parameters by their numbers."""
    if make is named:
        return list(NAMES[::-1])
    return list(NAMES) if make is adamw else ["embed.weight", "up.weight", "down.weight", "up.bias", "norm.weight"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [adamw, two_groups, named])
def test_reshard_carries_what_dcp_load_reads(make: Make, mesh: str, tmp_path: Path) -> None:
    whole = save(tmp_path / "step", make, mesh)
    assert api.verify(tmp_path / "step").findings == ()
    result = api.reshard(tmp_path / "step", tmp_path / "dcp", mesh="dp_shard=3")
    assert not any("optim" in note for note in result.notes if "left out" in note), result.notes
    assert any("numbered" in note for note in result.notes)
    names = order(make)
    expected = whole["optimizer"]
    state = {
        **{name: torch.zeros_like(tensor) for name, tensor in whole["model"].items()},
        "optimizer": {
            "state": {
                names[number]: {key: torch.zeros_like(value) for key, value in inner.items()}
                for number, inner in expected["state"].items()
            },
            "param_groups": [
                {key: [] if key == "params" else None for key in group} for group in expected["param_groups"]
            ],
        },
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, tensor in whole["model"].items():
        assert torch.equal(state[name], tensor)
    for number, inner in expected["state"].items():
        assert all(torch.equal(state["optimizer"]["state"][names[number]][key], inner[key]) for key in inner)
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in expected["param_groups"]]
    assert state["optimizer"]["param_groups"] == groups


class Model(torch.nn.Module):
    """What has the names of the toy, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = torch.nn.Embedding(10, 6), torch.nn.Linear(6, 8)
        self.down, self.norm = torch.nn.Linear(8, 6, bias=False), torch.nn.LayerNorm(6, bias=False)
        self.lm_head = torch.nn.Linear(6, 10, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(8))


def test_load_checkpoint_takes_model_and_optimizer(tmp_path: Path) -> None:
    from ckpt_tools.fsdp2 import load_checkpoint

    whole = save(tmp_path / "step", adamw)
    api.reshard(tmp_path / "step", tmp_path / "dcp", mesh="dp_shard=3")
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    load_checkpoint(model, tmp_path / "dcp", optimizer=optimizer)
    assert all(torch.equal(value, whole["model"][name]) for name, value in model.state_dict().items())
    assert [name for name, _ in model.named_parameters()] == list(NAMES)
    found = optimizer.state_dict()
    assert found["param_groups"] == whole["optimizer"]["param_groups"]
    for number, inner in whole["optimizer"]["state"].items():
        assert all(torch.equal(found["state"][number][key], value) for key, value in inner.items())


def test_other_names_are_for_weights_alone(tmp_path: Path) -> None:
    save(tmp_path / "step", adamw)
    with pytest.raises(UsageError, match="only a model's weights can be renamed") as caught:
        api.reshard(tmp_path / "step", tmp_path / "dcp", mesh="dp_shard=2", names="hub")
    assert "--exclude 'optimizer**'" in str(caught.value.hint)


def test_parameter_without_state_keeps_its_number(tmp_path: Path) -> None:
    save(tmp_path / "step", adamw, skipped="up.weight")
    api.reshard(tmp_path / "step", tmp_path / "dcp", mesh="dp_shard=2")
    found = {name.removeprefix("optimizer.state.") for name in read(tmp_path / "dcp") if "optim" in name}
    names = set(NAMES) - {"up.weight"}
    assert found == {f"{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}


def test_gather_leaves_it_out_and_verify_reads_it(tmp_path: Path) -> None:
    whole = save(tmp_path / "step", adamw)
    result = api.gather(tmp_path / "step", tmp_path / "hf")
    assert set(read(tmp_path / "hf")) == set(whole["model"])
    assert any("15 tensors of optimizer state" in note for note in result.notes)
    path = tmp_path / "step" / "optim_world_size_2_rank_1.pt"
    content = bytearray(path.read_bytes())
    value = whole["optimizer"]["state"][1]["exp_avg"][4:].numpy().tobytes()
    content[content.index(value)] ^= 1
    path.write_bytes(content)
    found = api.verify(tmp_path / "step").findings
    assert [finding.code for finding in found] == ["damaged-data"]
    assert "optimizer.state.up.weight.exp_avg" in found[0].what


def only_two(model: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([model["up.weight"], model["down.weight"]], foreach=False)


def one_of_a_shape(model: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    model["twin"] = torch.nn.Parameter(model["up.weight"].detach().clone())
    return torch.optim.AdamW([model["twin"]], foreach=False)


def backwards(model: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.values())[::-1], foreach=False)


def sgd_over_all(model: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.values(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (backwards, "their shapes and order do not match the model"),
        (one_of_a_shape, "more than one choice of the model's fits"),
    ],
)
def test_numbers_that_say_nothing_are_not_guessed(make: Make, words: str, tmp_path: Path) -> None:
    save(tmp_path / "step", make)
    checked = api.verify(tmp_path / "step")
    assert checked.findings == ()
    assert any(words in what for what in checked.not_checked)
    result = api.reshard(tmp_path / "step", tmp_path / "dcp", mesh="dp_shard=2")
    assert any(words in note and "left out" in note for note in result.notes)
    assert not any("optimizer" in name for name in read(tmp_path / "dcp"))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda state: [state, state], "not have the form of a torch optimizer"),
        (lambda state: {"main": state}, "not have the form of a torch optimizer"),
        (lambda state: "pickled", "not have the form of a torch optimizer"),
        (lambda state: {"state": state["state"]}, "do not list the same parameters"),
        (lambda state: state | {"owner": torch.optim.AdamW}, "optimizer.owner holds an object"),
        (lambda state: state | {"extra": (torch.ones(3),)}, "optimizer.extra holds an object, or a tensor in a tuple"),
    ],
)
def test_other_forms_are_said_and_not_carried(form: Callable[[Any], object], words: str, tmp_path: Path) -> None:
    save(tmp_path / "step", adamw)
    rewrite(tmp_path / "step", form)
    checked = api.verify(tmp_path / "step")
    assert checked.findings == ()
    assert any(words in what for what in checked.not_checked)
    api.reshard(tmp_path / "step", tmp_path / "dcp", mesh="dp_shard=2")
    assert not any("optimizer" in name for name in read(tmp_path / "dcp"))


def rewrite(directory: Path, form: Callable[[Any], object]) -> None:
    """Save the optimizer's files of both ranks in another form."""
    for rank in range(2):
        with fake_rank(rank, 2):
            path = directory / f"optim_world_size_2_rank_{rank}.pt"
            torch.save(form(torch.load(path, weights_only=False)), path)


@pytest.mark.parametrize("is_flat", [False, True])
def test_states_with_names_need_no_guess(is_flat: bool, tmp_path: Path) -> None:
    """As accelerate saves them, and as VeOmni does, with one key for every value."""

    def form(state: dict[str, Any]) -> object:
        owners = {name: state["state"][number] for number, name in enumerate(NAMES)}
        if is_flat:
            return {f"state.{name}.{key}": value for name, inner in owners.items() for key, value in inner.items()}
        return {"state": {f"other.{name}": inner for name, inner in owners.items()}, "param_groups": []}

    whole = save(tmp_path / "step", adamw)
    rewrite(tmp_path / "step", form)
    notes = api.reshard(tmp_path / "step", tmp_path / "dcp", mesh="dp_shard=2").notes
    found = {name: value for name, value in read(tmp_path / "dcp").items() if name.startswith("optimizer.")}
    root = "optimizer.state." if is_flat else "optimizer.state.other."
    state = whole["optimizer"]["state"]
    assert found == flat({root + name: state[number] for number, name in enumerate(NAMES)})
    assert not any("numbered" in note for note in notes)
    assert any("that the model's files do not have: other.embed.weight" in note for note in notes) != is_flat


@pytest.mark.parametrize("make", [only_two, sgd_over_all])
def test_some_parameters_and_no_state_are_named_where_one_way_is_left(make: Make, tmp_path: Path) -> None:
    save(tmp_path / "step", make)
    api.reshard(tmp_path / "step", tmp_path / "dcp", mesh="dp_shard=2")
    found = {name.split(".exp")[0] for name in read(tmp_path / "dcp") if "exp_avg" in name}
    assert found == ({"optimizer.state.up.weight", "optimizer.state.down.weight"} if make is only_two else set())


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.unlink(), "1 of 2 ranks have no file here: 1"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "zip"),
        (
            lambda path: path.write_bytes(path.with_name("optim_world_size_2_rank_0.pt").read_bytes()),
            "records rank 0 instead",
        ),
    ],
)
def test_state_that_is_not_whole_is_a_finding_and_never_resharded(harm, words: str, tmp_path: Path) -> None:
    save(tmp_path / "step", adamw)
    harm(tmp_path / "step" / "optim_world_size_2_rank_1.pt")
    (finding,) = api.verify(tmp_path / "step").findings
    assert (finding.code, finding.severity) == ("unreadable-part", "error")
    assert words in finding.what
    with pytest.raises(UnreadableError, match="the optimizer's state is incomplete"):
        api.reshard(tmp_path / "step", tmp_path / "dcp", mesh="dp_shard=2")
    api.gather(tmp_path / "step", tmp_path / "hf")


def test_ranks_with_other_options_are_of_other_saves(tmp_path: Path) -> None:
    save(tmp_path / "step", adamw)
    path = tmp_path / "step" / "optim_world_size_2_rank_1.pt"
    with fake_rank(1, 2):
        state = torch.load(path, weights_only=False)
        state["param_groups"][0]["lr"] = 0.2
        torch.save(state, path)
    finding, mixed = api.verify(tmp_path / "step").findings
    assert (mixed.code, mixed.where) == ("mixed-steps", "optim_world_size_2_rank_0.pt")
    assert "different optimizer options" in finding.what
