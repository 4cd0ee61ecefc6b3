"""Real checkpoints of DeepSpeed's, on CPU and gloo.

DeepSpeed is no dependency: DS_BUILD_OPS=0 pip install --no-deps --target SITE deepspeed hjson py-cpuinfo ninja msgpack
einops, and SITE in PYTHONPATH. In `tests`, `python -m formats.deepspeed_ranks` trains all cases (1 minute) and writes
`deepspeed.tar.xz`, which tests read where DeepSpeed is not installed: made by 0.19.8 with torch 2.13.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from formats.saved import raw
from torch import nn

TAG = "global_step2"
SAMPLES = Path(__file__).with_name("deepspeed.tar.xz")
WANTED = "wanted.json"
"""Kind (fp32, exp_avg, …) → name → digest: what DeepSpeed itself has, live or by its own tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way of training."""

    stage: int
    world_size: int = 2
    dtype: str = "bf16"
    zero: dict[str, object] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    groups: int = 1
    is_frozen: bool = False


CASES = {
    "zero1-bf16": Case(stage=1),
    "zero1-fp32": Case(stage=1, dtype="fp32", groups=2, world_size=3),
    "zero1-bf16-optimizer": Case(stage=1, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2-bf16": Case(stage=2, groups=2, is_frozen=True),
    "zero2-round-robin": Case(stage=2, zero={"round_robin_gradients": True}),
    "zero3-bf16": Case(stage=3, is_frozen=True, world_size=3),
    "zero3-fp32": Case(stage=3, dtype="fp32", zero={"sub_group_size": 60}, groups=2),
    "zero0-bf16": Case(stage=0),
}
UNIVERSAL = ("zero2-bf16", "zero3-bf16")
"""Converted too, into `TAG_universal`."""


class Toy(nn.Module):
    """Odd sizes, tied weights, a buffer, a bias, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 9)
        self.frozen = nn.Linear(9, 9, bias=False)
        self.down = nn.Linear(9, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(5.0) / 3)
        self.register_buffer("count", torch.tensor(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.table.to(x.dtype)
        return self.head(self.down(torch.tanh(self.frozen(self.up(x))))).float().square().mean()


def train(rank: int, case: Case, store: str, out: str) -> None:
    """Take two steps as one rank, and save."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.world_size), DS_ACCELERATOR="cpu")
    os.environ.update(DS_BUILD_OPS="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.set_num_threads(1)
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile C++
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.world_size)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    torch.manual_seed(0)
    model = Toy()
    model.frozen.weight.requires_grad_(not case.is_frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = [trained] if case.groups == 1 else [trained[::2], trained[1::2]]
    groups = [{"params": part, "weight_decay": 0.1 * i} for i, part in enumerate(parts)]
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": case.stage, **case.zero},
        "zero_allow_untested_optimizer": True,
        **case.config,
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config)
    for step in range(2):
        loss = engine(torch.randint(0, 7, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank)))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(out, tag=TAG)
    has_tools = case.stage and "data_types" not in case.config  # they fail for BF16_Optimizer
    is_linked = case.groups == 1 or case.stage == 3  # otherwise it does not find its own state
    is_linked = is_linked and not case.zero.get("round_robin_gradients")  # gives wrong elements then
    wanted = states(engine) if has_tools and is_linked else {}
    if rank == 0 and has_tools:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        wanted["fp32"] = {k: digest(v) for k, v in get_fp32_state_dict_from_zero_checkpoint(out).items()}
    if rank == 0:
        (Path(out) / WANTED).write_text(json.dumps(wanted))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and elements."""
    content = f"{tensor.dtype}{tuple(tensor.shape)}".encode() + raw(tensor)
    return hashlib.sha256(content).hexdigest()[:12]


def states(engine: object) -> dict[str, dict[str, str]]:
    """What the live optimizer has, gathered from all ranks; collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, dict[str, str]] = {}
    for name, parameter in engine.module.named_parameters():
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            value = None
            if parameter.requires_grad and key == "fp32":
                value = safe_get_full_fp32_param(parameter)
            elif parameter.requires_grad:
                value = safe_get_full_optimizer_state(parameter, key)
            if value is not None:
                found.setdefault(key, {})[name] = digest(value)
    return found


def save(directory: Path, name: str) -> Path:
    """Train in processes of their own, and return the directory that DeepSpeed saved into."""
    out = directory / name
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(
            train, (CASES[name], f"{scratch}/store", str(out)), nprocs=CASES[name].world_size, join=True
        )
    if name in UNIVERSAL:
        tool = ["deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--num_extract_workers", "1"]
        paths = ["--input_folder", str(out / TAG), "--output_folder", str(out / f"{TAG}_universal")]
        env = os.environ | {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
        subprocess.run([sys.executable, "-m", *tool, *paths, "--num_merge_workers", "1"], check=True, env=env)
    return out


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, tarfile.open(SAMPLES, "w:xz") as archive:
        for each in CASES:
            out = save(Path(made), each)
            for path in sorted(out.rglob("*")):
                if path.is_file() and path.suffix != ".py":
                    info = archive.gettarinfo(path, f"{each}/{path.relative_to(out)}")
                    info.mtime = info.uid = info.gid = 0
                    info.uname = info.gname = ""
                    archive.addfile(info, path.open("rb"))
    print(SAMPLES, SAMPLES.stat().st_size, "bytes")
