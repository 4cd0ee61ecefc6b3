"""LoRA and its family: read from any training checkpoint, written for any ecosystem, merged, checked. No torch."""
