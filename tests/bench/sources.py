"""The generated checkpoint as others keep it. usage: HF_DIR WORK_DIR NUM_RANKS bin|ranks|fp8|zero…"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard

Tensors = dict[str, torch.Tensor]


def files_of(hf: Path) -> Iterator[tuple[str, Tensors]]:
    """Name and tensors of each file, one after the other."""
    for file in sorted(hf.glob("*.safetensors")):
        yield file.name, load_file(file)


def state_of(hf: Path) -> Tensors:
    """All tensors."""
    return {name: tensor for _, tensors in files_of(hf) for name, tensor in tensors.items()}


def write_bin(hf: Path, out: Path) -> None:
    """One file of torch.save, as transformers saved models before safetensors."""
    torch.save(
        {name: tensor for _, tensors in files_of(hf) for name, tensor in tensors.items()}, out / "pytorch_model.bin"
    )


def write_ranks(hf: Path, out: Path, num_ranks: int) -> None:
    """One file of torch.save for each rank of FSDP2, as verl saves an actor."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from formats.saved import save_ranks

    save_ranks(out, state_of(hf), {"fsdp": num_ranks}, lambda _: [Shard(0)])


def write_fp8(hf: Path, out: Path) -> None:
    """Projections as 8-bit floats in blocks, as transformers' own quantiser writes them; the rest stays bfloat16."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = json.loads((hf / "config.json").read_text())
    side = 128 if config["hidden_size"] % 512 == 0 else 16  # what divides every matrix
    settings = {"quant_method": "fp8", "weight_block_size": [side, side], "activation_scheme": "dynamic"}
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=SimpleNamespace(**settings, scale_fmt="float")))
    index: dict[str, str] = {}
    for file, tensors in files_of(hf):
        made: Tensors = {}
        for name, tensor in tensors.items():
            made |= quantise.convert({name: tensor}) if name.endswith("_proj.weight") else {name: tensor}
        save_file(made, out / file, {"format": "pt"})
        index |= dict.fromkeys(made, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def write_zero(hf: Path, out: Path) -> None:
    """ZeRO-3 by DeepSpeed itself, bfloat16 with fp32 weights in its optimizer, which keeps nothing else."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    with tempfile.TemporaryDirectory() as meeting:
        # Each of them begins with the whole model.
        torch.multiprocessing.spawn(_be_zero_rank, (2, f"file://{meeting}/ranks", str(hf), str(out)), nprocs=2)


def _be_zero_rank(rank: int, num_ranks: int, rendezvous: str, hf: str, out: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    import deepspeed
    from transformers import AutoModelForCausalLM

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile C++
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.save_checkpoint(out, tag="global_step1")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    source, work, ranks, *kinds = sys.argv[1:]
    for kind in kinds:
        directory = Path(work, kind)
        companions = directory / "huggingface" if kind == "ranks" else directory
        companions.mkdir(parents=True)
        shutil.copy(Path(source, "config.json"), companions)
        if kind == "bin":
            write_bin(Path(source), directory)
        elif kind == "ranks":
            write_ranks(Path(source), directory, int(ranks))
        elif kind == "zero":
            write_zero(Path(source), directory)
        else:
            write_fp8(Path(source), directory)
