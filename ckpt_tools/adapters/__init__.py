"""LoRA and its family: read out of any training checkpoint, written for any ecosystem, merged, checked.

Nothing here imports torch: arithmetic is numpy's, on the types of `ckpt_tools.moving.arrays`.
"""
