"""The adapter of the bench: which weights have one, and its numbers."""

RANK, ALPHA = 16, 32


def is_adapted(name: str) -> bool:
    """Is it a weight with an adapter?"""
    return name.endswith("_proj.weight")
