"""`shard`, `gather`, `reshard`, `merge-lora`: what a destination should hold, checked, written and published.

`dtensor` is the reference path, on which PyTorch writes the data files.
"""
