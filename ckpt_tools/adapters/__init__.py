"""LoRA and its family: read out of any training checkpoint, written for any ecosystem, merged, checked.

Importing this package imports no torch.
"""
