"""Compare decoded weights with what transformers' operation makes of them, bit for bit. usage: FP8_DIR DECODED_DIR"""

import sys
from pathlib import Path

import torch
from peers.transformers_fp8 import decoded
from safetensors.torch import load_file

source, written = map(Path, sys.argv[1:])
found = {name: tensor for file in sorted(written.glob("*.safetensors")) for name, tensor in load_file(file).items()}
for _, tensors in decoded(source):
    for name, tensor in tensors.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found.pop(name), tensor):
            sys.exit(f"{name} is not what transformers makes of it")
if found:
    sys.exit(f"{len(found)} tensors too many")
