"""`shard`, `gather`, `reshard`, `merge-lora`: what a destination should hold, checked, written and published.

`to_mesh` and `to_hf` make a `job` of an open source; `check_names` holds the names that it would write against the
model's architecture; `run` is the entry: it plans a job, moves the bytes, writes the manifest, proves the result and
publishes it. `dtensor` is the reference path, on which PyTorch writes the data files.
"""
