"""transformers' own operation on every tensor, file by file, and save_file. usage: FP8_DIR OUT_DIR"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize


def decoded(source: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Name and tensors of each file, as bfloat16."""
    operation = Fp8Dequantize(None)
    for file in sorted(source.glob("*.safetensors")):
        stored = load_file(file)
        scales = {name: stored.pop(name) for name in list(stored) if name.endswith("_scale_inv")}
        for name in stored:
            if (scale := scales.get(f"{name}_scale_inv")) is not None:
                stored[name] = operation._dequantize_one(stored[name], scale, torch.bfloat16)
        yield file.name, stored


if __name__ == "__main__":
    destination = Path(sys.argv[2])
    destination.mkdir()
    for file_name, tensors in decoded(Path(sys.argv[1])):
        save_file(tensors, destination / file_name, {"format": "pt"})
