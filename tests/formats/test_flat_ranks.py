"""FSDP1's local state dicts, made by FSDP1 on gloo ranks, against what it gathers itself."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from formats.saved import Flat, flat
from fsdp2.ranks import execute, run_ranks
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.errors import CkptError, PartError, UnreadableError, UsageError
from ckpt_tools.transfer.box_reader import BytesReader

pytestmark = pytest.mark.full

WORLD = """
import os, sys, warnings
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, torch.nn as nn
warnings.simplefilter("ignore")
rank, world, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 7), nn.Linear(7, 5, bias=False), nn.LayerNorm(5)
        self.register_buffer("table", torch.arange(3.0))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(5)
        self.kernel = nn.Parameter(torch.randn(3, 2, 3))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

if rank == 0:
    torch.save(Model().state_dict(), f"{out}/shapes.bin")
for mode in ("flat-one", "flat-units", "orig-one", "orig-units", "orig-bf16"):
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16) if mode.endswith("bf16") else Model()
    more = {} if mode.endswith("one") else {"auto_wrap_policy": ModuleWrapPolicy({Block})}
    model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=mode.startswith("orig"), **more)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        own = model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        whole = model.state_dict()
    os.makedirs(f"{out}/{mode}", exist_ok=True)
    torch.save(own, f"{out}/{mode}/pytorch_model_fsdp_rank{rank}.bin")
    if rank == 0:
        torch.save(whole, f"{out}/{mode}.pt")
    if mode == "flat-units":  # the way on, from a DCP
        dcp.save({"model": own}, checkpoint_id=f"{out}/dcp")
        with torch.no_grad():
            [each.zero_() for each in model.parameters()]
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            own = {"model": model.state_dict()}
            dcp.load(own, checkpoint_id=f"{out}/dcp")
            model.load_state_dict(own["model"])
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            torch.save(model.state_dict(), f"{out}/dcp-{rank}.pt")
    dist.barrier()
dist.destroy_process_group()
"""
MODES = ("flat-one", "flat-units", "orig-one", "orig-units", "orig-bf16")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks saved."""
    out = tmp_path_factory.mktemp("local")
    run_ranks(4, execute, WORLD, out, backend=None, timeout=240)
    shapes = torch.load(out / "shapes.bin", weights_only=True)
    del shapes["head.weight"]
    save_file(shapes, out / "model.safetensors")
    return out


def read(path: Path, shapes: Path) -> Flat:
    with open_path(str(path), shapes_from=shapes) as opened:
        reader = BytesReader(opened)
        return {
            entry.fqn: (getattr(torch, str(entry.dtype.torch_name)), entry.shape, bytes(reader.read(entry)))
            for entry in opened.checkpoint.tensors
        }


@pytest.mark.parametrize("mode", MODES)
def test_pieces_are_what_fsdp_gathers(mode: str, saved: Path, tmp_path: Path) -> None:
    whole = flat(torch.load(saved / f"{mode}.pt", weights_only=True))
    if mode.startswith("flat"):  # a model without names says a tied weight once
        del whole["head.weight"]
    assert read(saved / mode, saved / "shapes.bin") == whole
    assert api.verify(saved / mode, shapes_from=saved / "shapes.bin").findings == ()
    if mode.startswith("orig"):
        assert read(saved / mode, saved / "model.safetensors") == whole
        api.gather(saved / mode, tmp_path / "hf", shapes_from=saved / "model.safetensors")
        api.reshard(saved / mode, tmp_path / "dcp", mesh="dp_shard=3", shapes_from=saved / "shapes.bin")
        assert api.diff(tmp_path / "hf", tmp_path / "dcp").equal


def test_dcp_of_flat_parameters_is_never_written_as_weights_and_fsdp1_itself_is_the_way_on(saved: Path, tmp_path: Path):
    for options in ({}, {"as_part": True}):
        for convert in (api.gather, partial(api.reshard, mesh="dp_shard=2")):
            with pytest.raises(PartError, match="FSDP1 flat parameters, whose original names and shapes") as caught:
                convert(saved / "dcp", tmp_path / "out", **options)
            assert "FULL_STATE_DICT" in caught.value.hint
            assert "--as-part" not in caught.value.hint
    (finding,) = api.verify(saved / "dcp").errors
    assert (finding.code, finding.hint) == ("part-of-a-model", caught.value.hint)
    api.gather(saved / "dcp-0.pt", tmp_path / "out")  # what that way on gives
    whole = flat(torch.load(saved / "flat-units.pt", weights_only=True))
    assert flat(load_file(tmp_path / "out" / "model.safetensors")) == whole


def test_without_shapes_or_with_others_it_is_refused(saved: Path, tmp_path: Path) -> None:
    def refused(words: str, mode: str, shapes: Path | None, kind: type[CkptError] = UnreadableError) -> None:
        with pytest.raises(kind, match=words):
            api.gather(saved / mode, tmp_path / "out", shapes_from=shapes)

    refused("without their shapes", "orig-units", None)
    refused("the order of the parameters must be known", "flat-units", saved / "model.safetensors")
    state = torch.load(saved / "shapes.bin", weights_only=True)
    for name, change in {
        "lacks": {"norm.weight": None},
        "longer": {"norm.weight": torch.ones(6)},
        "buffer": {"layers.0.table": torch.ones(4)},
    }.items():
        other = {key: value for key, value in (state | change).items() if value is not None}
        torch.save(other, tmp_path / f"{name}.bin")
    refused("'norm.weight' has 5 elements, which does not have it", "orig-one", tmp_path / "lacks.bin")
    refused("'norm.weight' has 5 elements, where it has the shape", "orig-one", tmp_path / "longer.bin")
    refused("'layers.0.table' has the shape", "orig-one", tmp_path / "buffer.bin")
    refused("'_flat_param' has", "flat-units", tmp_path / "longer.bin")
    refused("not a checkpoint|no such file", "orig-one", tmp_path / "nowhere")
    with pytest.raises(UsageError, match="--shapes-from needs rank files"):
        api.gather(saved / "orig-one.pt", tmp_path / "out", shapes_from=saved / "shapes.bin")


def test_missing_and_exchanged_ranks_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "orig-units", tmp_path / "missing")
    (tmp_path / "missing" / "pytorch_model_fsdp_rank2.bin").unlink()
    with pytest.raises(UnreadableError, match="1 of 4 ranks have no file here: 2"):
        read(tmp_path / "missing", saved / "shapes.bin")
    shutil.copytree(saved / "orig-units", tmp_path / "exchanged")
    shutil.copy(saved / "orig-units/pytorch_model_fsdp_rank1.bin", tmp_path / "exchanged/pytorch_model_fsdp_rank2.bin")
    with pytest.raises(UnreadableError, match="the file of rank 2 records rank 1 instead"):
        read(tmp_path / "exchanged", saved / "shapes.bin")


@pytest.mark.filterwarnings("ignore:Please use DTensor")
def test_parameter_without_a_name_is_noticed(saved: Path, tmp_path: Path) -> None:
    """A row of which some elements are nobody's: a rank's names were taken away."""
    directory = tmp_path / "ranks"
    shutil.copytree(saved / "orig-one", directory)
    from formats.saved import fake_rank

    for rank in range(4):
        with fake_rank(rank, 4):
            path = directory / f"pytorch_model_fsdp_rank{rank}.bin"
            state = torch.load(path, weights_only=False)
            del state["layers.0.down.weight"]
            torch.save(state, path)
    with pytest.raises(UnreadableError, match="belong to no parameter, or to two"):
        read(directory, saved / "shapes.bin")
