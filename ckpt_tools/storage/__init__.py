"""Where bytes live: ranged reads, staged writes, publishing. Knows no tensors."""
