"""Checkpoints for PyTorch FSDP2: shard, gather, reshard, inspect, verify, diff."""
