"""Checkpoints without a disk to hold them: safetensors files with real headers and holes for data.

python sparse.py DIRECTORY NUM_TENSORS NUM_FILES TOTAL_BYTES
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

_HIDDEN = 64
"""Columns of every matrix; rows follow from the size."""
_KINDS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm")


def make_sparse(directory: Path, *, num_tensors: int, num_files: int, total_bytes: int) -> None:
    """Write an indexed HF directory of bf16 tensors whose data are holes.

    Args:
        directory: To create.
        num_tensors: Tensors, named like a decoder's; every fifth is a vector.
        num_files: Files that share them.
        total_bytes: Apparent size of all data, about.
    """
    directory.mkdir(parents=True)
    rows = max(1, total_bytes // (2 * _HIDDEN * num_tensors) * 5 // 4)
    names = [f"model.layers.{i // len(_KINDS)}.{_KINDS[i % len(_KINDS)]}.weight" for i in range(num_tensors)]
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        document: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for fqn in names[number * num_tensors // num_files : (number + 1) * num_tensors // num_files]:
            shape = [_HIDDEN] if "norm" in fqn else [rows, _HIDDEN]
            nbytes = 2 * _HIDDEN * (1 if len(shape) == 1 else rows)
            document[fqn] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + nbytes]}
            position += nbytes
            weight_map[fqn] = file
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
        os.truncate(directory / file, 8 + len(text) + position)
        total += position
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    make_sparse(
        Path(sys.argv[1]), num_tensors=int(sys.argv[2]), num_files=int(sys.argv[3]), total_bytes=int(sys.argv[4])
    )
