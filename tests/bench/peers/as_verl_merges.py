"""As verl's merger does it, without verl: torch loads every rank, cat, save_file. usage: RANKS_DIR OUT_DIR

Its merger also casts to bfloat16, which these weights are.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.tensor
from safetensors.torch import save_file


def load(path: Path) -> dict[str, torch.Tensor]:
    # The mesh inside a DTensor is not rebuilt without this; verl passes it for all.
    return torch.load(path, map_location="cpu", weights_only=False)


source, destination = map(Path, sys.argv[1:])
destination.mkdir()
files = sorted(source.glob("model_world_size_*_rank_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
with ThreadPoolExecutor() as threads:
    ranks = list(threads.map(load, files))
whole = {name: torch.cat([rank[name]._local_tensor for rank in ranks]) for name in ranks[0]}
save_file(whole, destination / "model.safetensors", {"format": "pt"})
