"""A LoRA of every projection of a generated checkpoint: as PEFT saves it, and inside a training checkpoint.

usage: peft HF_DIR OUT_DIR | trained HF_DIR OUT_DIR NUM_FILES
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from generate import Shapes, write_checkpoint
from lora import ALPHA, RANK, is_adapted
from safetensors import safe_open
from safetensors.numpy import save_file


def shapes_of(hf: Path) -> Shapes:
    """Shapes of all tensors of an HF directory."""
    found: Shapes = {}
    for file in sorted(hf.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


def factors_of(name: str, shape: tuple[int, ...]) -> Shapes:
    """A and B of one weight, by their middle names."""
    path = name.removesuffix(".weight")
    return {f"base_model.model.{path}.lora_A": (RANK, shape[1]), f"base_model.model.{path}.lora_B": (shape[0], RANK)}


def write_adapter(hf: Path, directory: Path) -> None:
    """Write PEFT's two files, factors in float32."""
    random = np.random.default_rng(1)
    shapes = {
        k: v for name, shape in shapes_of(hf).items() if is_adapted(name) for k, v in factors_of(name, shape).items()
    }
    tensors = {f"{name}.weight": random.standard_normal(s, np.float32) * np.float32(0.02) for name, s in shapes.items()}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    leaves = sorted({name.split(".")[-2] for name in shapes_of(hf) if is_adapted(name)})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "bench/base"}
    config |= {"r": RANK, "lora_alpha": ALPHA, "target_modules": leaves, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def write_trained(hf: Path, directory: Path, num_files: int) -> None:
    """Write what a trainer's state dict of the model with its adapter holds: frozen weights and factors, bfloat16."""
    shapes: Shapes = {}
    for name, shape in shapes_of(hf).items():
        if not is_adapted(name):
            shapes[f"base_model.model.{name}"] = shape
            continue
        shapes[f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight"] = shape
        shapes |= {f"{factor}.default.weight": size for factor, size in factors_of(name, shape).items()}
    write_checkpoint(directory, shapes, num_files, seed=2)


if __name__ == "__main__":
    kind, source, out, *more = sys.argv[1:]
    if kind == "peft":
        write_adapter(Path(source), Path(out))
    else:
        write_trained(Path(source), Path(out), int(more[0]))
