"""torch_checkpointing's directories, as its own CheckpointManager wrote them on four gloo ranks.

It is not among what the tests install, so its directories are kept: `samples/torch_checkpointing-0.1.1.tar.xz` is what
`python tests/formats/test_torch_checkpointing.py DIRECTORY` wrote with it on PYTHONPATH, and with what DCP's
`full_state_dict` gathers of the same model.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORLD = """
import os, sys, warnings
import torch, torch.distributed as dist, torch.nn as nn
warnings.simplefilter("ignore")
out, rank, world = sys.argv[1], int(sys.argv[2]), 4
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
torch.Tensor.cuda = lambda self: self  # its exchange of metadata knows nothing but CUDA
torch.tensor = (lambda tensor: lambda *args, device=None, **more: tensor(*args, **more))(torch.tensor)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x):
        return self.norm(self.down(self.up(x)))

torch.manual_seed(0)
model = Model()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 6)).square().sum().backward()
optimizer.step()
for kind in ("torch", "safetensors"):
    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization()) if kind == "safetensors" else None
    config = CheckpointManager.Config(
        items={"model": ItemSpec(resharder=DefaultResharder(), layout=layout),
               "optimizer": ItemSpec(resharder=DefaultResharder(), required=False)},
        save=SyncCheckpointSaverConfig(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    items = {"model": get_model_state_dict(model), "step": 3}
    if kind == "torch":
        items["optimizer"] = get_optimizer_state_dict(model, optimizer)
    config.build().save(f"{out}/{kind}", items)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
whole = {"model": get_model_state_dict(model, options=options)}
whole["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
if rank == 0:
    torch.save(whole, f"{out}/whole.pt")
dist.barrier()
dist.destroy_process_group()
"""

if __name__ == "__main__":
    out = sys.argv[1]
    ranks = [subprocess.Popen([sys.executable, "-c", WORLD, out, str(rank)]) for rank in range(4)]
    assert [rank.wait() for rank in ranks] == [0] * 4
    os.remove(f"{out}/store")
    sys.exit()

import pytest  # noqa: E402
import torch  # noqa: E402
from formats.saved import flat, read  # noqa: E402

from ckpt_tools import api  # noqa: E402
from ckpt_tools.errors import UnreadableError  # noqa: E402

SAMPLES = Path(__file__).parent / "samples" / "torch_checkpointing-0.1.1.tar.xz"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with tarfile.open(SAMPLES) as archive:
        archive.extractall(tmp_path / "saved", filter="data")
    return tmp_path / "saved"


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_parts_are_what_dcp_gathers(kind: str, saved: Path, tmp_path: Path) -> None:
    whole = torch.load(saved / "whole.pt", weights_only=True)
    del whole["optimizer"]["param_groups"]
    if kind == "safetensors":
        del whole["optimizer"]
    assert read(saved / kind) == flat(whole)
    checked = api.verify(saved / kind)
    assert checked.findings == ()
    assert any("checksum" in what for what in checked.not_checked) == (kind == "safetensors")
    api.gather(saved / kind, tmp_path / "hf")
    assert read(tmp_path / "hf") == flat(whole["model"])
    api.reshard(saved / kind, tmp_path / "dcp", mesh="dp_shard=3")
    assert read(tmp_path / "dcp") == flat(whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_tensor_comes_along(saved: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    api.reshard(saved / "torch", tmp_path / "dcp", mesh="dp_shard=2")
    state = {"step": 0, "optimizer": {"param_groups": [{"lr": 0.0, "betas": None, "params": []}]}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    group = torch.load(saved / "whole.pt", weights_only=True)["optimizer"]["param_groups"][0]
    assert state["step"] == 3
    assert state["optimizer"]["param_groups"] == [{key: group[key] for key in ("lr", "betas", "params")}]


def change(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Write metadata.pkl again, as its own writer would."""
    path = directory / "metadata.pkl"
    document = pickle.loads(path.read_bytes())
    edit(document)
    path.write_bytes(pickle.dumps(document))


def groups(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return document["metadata"]["model"]["nested_path_to_metadata"][f'["{name}"]']


def data(document: dict[str, Any], name: str) -> dict[str, Any]:
    return groups(document, name)[0]["sharding_metadata"]["data"]


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda d: d.update(version="1.0"), "its version is '1.0'"),
    "shape": (lambda d: data(d, "norm.weight").update(global_shape=[8]), "placement leaves|is not where"),
    "dtype": (lambda d: data(d, "norm.weight").update(dtype="torch.bfloat16"), "placement leaves|is not where"),
    "placement": (
        lambda d: data(d, "norm.weight").update(placements=[{"type": "Replicate"}]),
        "placement leaves|is not where",
    ),
    "mesh": (lambda d: data(d, "norm.weight")["mesh_spec"].update(mesh_data=(0, 0)), "has no sound place"),
    "dim": (lambda d: data(d, "norm.weight").update(placements=[{"type": "Shard", "dim": 9}]), "dim|is not where"),
    "huge": (lambda d: data(d, "norm.weight").update(global_shape=[1 << 40, 1 << 40]), "has no sound place"),
    "kind": (
        lambda d: groups(d, "norm.weight")[0]["sharding_metadata"].update(type="default_tensor_v1"),
        "is placed by default_tensor_v1, which is not read",
    ),
    "unplaced": (
        lambda d: d["metadata"]["model"]["nested_path_to_metadata"].pop('["norm.weight"]'),
        "has no place for tensor 'norm.weight'",
    ),
    "more": (
        lambda d: d["metadata"]["model"]["nested_path_to_metadata"].update({'["more"]': groups(d, "table")}),
        "no file has more",
    ),
    "ranks": (lambda d: d.update(world_size=5), "files of other ranks than 0 to 4"),
    "world": (lambda d: d.update(world_size=1 << 60, metadata={}), "not what torch_checkpointing writes"),
    "names": (
        lambda d: d["metadata"]["model"]["rank_to_layout_info"].update(a=None),
        "files of other ranks than 0 to 3",
    ),
    "members": (lambda d: groups(d, "norm.weight")[0].update(ranks=([],)), "has no sound place"),
    "path": (
        lambda d: d["metadata"]["model"]["rank_to_layout_info"].update(
            {1: {"file_path": "../x.pt", "serialization_format": {"type": "TorchSerialization"}}}
        ),
        "ranks have no file here: 1",
    ),
    "other": (lambda d: d.clear(), "not what torch_checkpointing writes"),
}


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_is_not_true_of_the_files_is_refused(lie: str, kind: str, saved: Path, tmp_path: Path) -> None:
    edit, words = LIES[lie]
    change(saved / kind, edit)
    with pytest.raises(UnreadableError, match=words):
        api.gather(saved / kind, tmp_path / "out")


def test_global_in_metadata_is_refused_unexecuted(saved: Path, tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> object:
            return os.mkdir, (str(tmp_path / "executed"),)

    (saved / "torch/metadata.pkl").write_bytes(pickle.dumps({"metadata": Bad(), "world_size": 4, "version": "2.0"}))
    with pytest.raises(UnreadableError, match=r"metadata\.pkl"):
        read(saved / "torch")
    assert not (tmp_path / "executed").exists()


def test_missing_and_exchanged_files_are_refused(saved: Path) -> None:
    shutil.copytree(saved / "torch", saved / "exchanged")
    shutil.copy(saved / "torch/model_1.pt", saved / "exchanged/model_2.pt")
    with pytest.raises(UnreadableError, match="the file of rank 2 says that it is of rank 1"):
        read(saved / "exchanged")
    for kind, suffix in (("torch", "pt"), ("safetensors", "safetensors")):
        (saved / kind / f"model_3.{suffix}").unlink()
        with pytest.raises(UnreadableError, match="1 of 4 ranks have no file here: 3"):
            read(saved / kind)


def test_items_of_other_kinds_are_said(saved: Path) -> None:
    def as_json(document: dict[str, Any]) -> None:
        for rank in range(4):
            layout = {
                "file_path": f"run_{rank}.json",
                "serialization_format": {"type": "JsonSerialization", "cls": None},
            }
            item = document["metadata"].setdefault("run", {"nested_path_to_metadata": {}, "rank_to_layout_info": {}})
            item["rank_to_layout_info"][rank] = layout

    change(saved / "torch", as_json)
    for rank in range(4):
        torch.save({"x": torch.ones(rank + 1)}, saved / f"torch/own_{rank}.pt")
        torch.save(rank, saved / f"torch/step_{rank}.pt")
    checked = api.verify(saved / "torch")
    assert checked.findings == ()
    for words in ("item 'run', of JsonSerialization", "item 'own', for which", "values of item 'step'"):
        assert any(words in what for what in checked.not_checked), words
