"""Load all, write HF shards, consolidate, as torchtitan exports. usage: DCP_DIR OUT_DIR INDEX_JSON"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

source, destination, index = sys.argv[1:]
metadata = dcp.FileSystemReader(source).read_metadata()
state = {
    name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.state_dict_metadata.items()
}
dcp.load(state, checkpoint_id=source, no_dist=True)
# "model-00002-of-00004.safetensors" → 2
weight_map = json.loads(Path(index).read_text())["weight_map"]
writer = dcp.HuggingFaceStorageWriter(
    destination,
    fqn_to_index_mapping={name: int(file.split("-")[1]) for name, file in weight_map.items()},
    save_distributed=True,
    enable_consolidation=True,
    thread_count_consolidation=5,
)
dcp.save(state, storage_writer=writer, no_dist=True)
