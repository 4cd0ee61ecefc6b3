"""torch.load of the whole file, and safetensors' save_file. usage: BIN_DIR OUT_DIR"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

source, destination = map(Path, sys.argv[1:])
destination.mkdir()
state = torch.load(source / "pytorch_model.bin", weights_only=True)
save_file(state, destination / "model.safetensors", {"format": "pt"})
