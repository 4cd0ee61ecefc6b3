"""Whole model into one process, then a one-rank DCP, as torchtitan converts. usage: HF_DIR DCP_DIR"""

import sys

import torch
import torch.distributed.checkpoint as dcp

source, destination = sys.argv[1:]
metadata = dcp.HuggingFaceStorageReader(source).read_metadata()
state = {
    name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.state_dict_metadata.items()
}
dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(source), no_dist=True)
dcp.save(state, checkpoint_id=destination, no_dist=True)
