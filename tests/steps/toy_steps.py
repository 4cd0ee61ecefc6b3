"""Toy steps, saved by stock `torch.distributed.checkpoint` the way the trainers' own code does it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

SHAPES = {"model.embed_tokens.weight": (12, 4), "model.layers.0.up.weight": (8, 4), "lm_head.weight": (12, 4)}


def state_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {fqn: torch.randn(shape, generator=generator) for fqn, shape in SHAPES.items()}


def optimizer_of(seed: int, prefix: str = "", step: int = 3) -> dict[str, object]:
    moments = {
        prefix + fqn: {"step": torch.tensor(float(step)), "exp_avg": tensor, "exp_avg_sq": tensor**2}
        for fqn, tensor in state_of(seed).items()
    }
    return {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": list(moments)}]}


def save(state: dict[str, object], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ")
        dcp.save(state, checkpoint_id=directory)


def save_accelerate(directory: Path, *, seed: int = 0, models: int = 1, step: int = 3) -> Path:
    """As `save_fsdp_model`, `save_fsdp_optimizer` and `save_accelerator_state` do, on two ranks' RNG."""
    for number in range(models):
        save({"model": state_of(seed + number)}, directory / f"pytorch_model_fsdp_{number}")
        save({"optimizer": optimizer_of(seed + number + 100, step=step)}, directory / f"optimizer_{number}")
    torch.save({"last_epoch": step}, directory / "scheduler.bin")
    for rank in range(2):
        torch.save({"step": step, "torch_manual_seed": torch.arange(rank + 1)}, directory / f"random_states_{rank}.pkl")
    return directory


def save_trainer(directory: Path, *, seed: int = 0, step: int = 3) -> Path:
    """As the Trainer does with FSDP2 and SHARDED_STATE_DICT, on two ranks."""
    save_accelerate(directory, seed=seed, step=step)
    for rank in range(2):
        (directory / f"random_states_{rank}.pkl").rename(directory / f"rng_state_{rank}.pth")
    (directory / "scheduler.bin").rename(directory / "scheduler.pt")
    (directory / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    return directory


def is_equal(one: object, other: object) -> bool:
    """Nested state dicts, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(is_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return type(one) is type(other) and one == other
