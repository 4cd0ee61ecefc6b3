"""Stock saves of two ranks: what trainers write of flat, nested, tied, replicated and upcycled state."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp2.ranks import run_ranks


def save_all(directory: Path) -> None:
    """Write every checkpoint below `directory`, with one launch of two processes."""
    run_ranks(2, _save, str(directory))


def _save(rank: int, world_size: int, directory: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def cut(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    def save(name: str, state: dict[str, object], **options: object) -> None:
        dcp.save(state, checkpoint_id=os.path.join(directory, name), **options)

    weight, expert = torch.randn(8, 4), torch.randn(4, 4)
    flat = {
        "layer.weight": cut(weight),
        "layer.bias": distribute_tensor(torch.randn(4), mesh, [Replicate()]),
        "layer.uneven": cut(torch.randn(5, 3)),
        "w": cut(torch.randn(4, 2)),
    }
    nested = {"model": flat, "step": 3, "more": {"lr": 0.1, "list": [torch.randn(2)]}}
    unflattened = DefaultSavePlanner(flatten_state_dict=False)
    save("flat", flat)
    save("nested", nested)
    save("unflattened", flat, planner=unflattened)
    save("unflattened-nested", flat | {"more": {"a": torch.randn(3)}}, planner=unflattened)
    dcp.async_save(nested, checkpoint_id=os.path.join(directory, "async")).result()
    save("tied", {"embed.weight": flat["layer.weight"], "head.weight": flat["layer.weight"]})
    save("tied-replicated", {"embed.weight": weight, "head.weight": weight})
    save("experts-by-name", {f"experts.{rank}.up": expert, f"experts.{rank}.down": expert * 2})
    save("experts-stacked", {"experts.up": cut(expert.repeat(4, 1, 1))})
    save("experts-and-more", {"experts.up": cut(expert.repeat(4, 1, 1)), "q.weight": cut(torch.randn(8, 4))})
    save("hsdp", {f"{i}.weight": distribute_tensor(weight * i, hybrid, [Replicate(), Shard(0)]) for i in (1, 2)})
    dcp.save(
        flat,
        storage_writer=FileSystemWriter(
            os.path.join(directory, "safetensors"), serialization_format=SerializationFormat.SAFETENSORS
        ),
    )
    dcp.save(
        flat,
        storage_writer=dcp.HuggingFaceStorageWriter(os.path.join(directory, "hugging-face"), save_distributed=True),
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for name, flatten in (("optimizer", False), ("optimizer-flattened", True)):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        weights, state = get_state_dict(model, optimizer, options=options)
        save(name, {"model": weights, "optim": state})
        save(f"{name}-alone", state)
