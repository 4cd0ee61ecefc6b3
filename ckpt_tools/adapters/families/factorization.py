"""How PEFT divides the dims of a weight between the two factors of a LoKr.

Source: peft 0.21, tuners/lokr/layer.py, `factorization` (LyCORIS 4.1 has the same).
"""

from __future__ import annotations


def factorise(size: int, factor: int) -> tuple[int, int]:
    """Split a size into two: by `factor` where it divides, else as evenly as `factor` (-1: no bound) allows.

    Returns:
        The smaller one first, unless `factor` divides.
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    bound = size if factor == -1 else factor
    low, high = 1, size
    for divisor in (number for number in range(2, size + 1) if size % number == 0):
        if low >= high or divisor > bound:
            break
        low, high = divisor, size // divisor
    return min(low, high), max(low, high)
