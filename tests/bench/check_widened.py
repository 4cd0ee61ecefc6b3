"""Compare float32 weights with the bfloat16 ones that they were made of. usage: HF_DIR FLOAT32_DIR"""

import sys
from pathlib import Path

import torch
from sources import state_of

narrow, wide = map(state_of, map(Path, sys.argv[1:]))
if narrow.keys() != wide.keys():
    sys.exit(f"other tensors: {sorted(narrow.keys() ^ wide.keys())}")
for name, tensor in narrow.items():
    if wide[name].dtype != torch.float32 or not torch.equal(wide[name], tensor.float()):
        sys.exit(f"{name} has other values")
