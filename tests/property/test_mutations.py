"""Mutations of valid files, for every parser: accepted and sound, or refused by name; quickly, in little memory.

What "sound" means is said in `fuzz/targets.py`, which `bin/fuzz` runs for as long as one likes.
"""

from __future__ import annotations

import random

import pytest
from fuzz.mutate import mutate, random_operations
from fuzz.run import guarded
from fuzz.targets import TARGETS
from hypothesis import given, settings, strategies as st

NUMBERS = st.integers(0, 2**32 - 1)
OPERATIONS = st.lists(st.tuples(st.integers(0, 2**16 - 1), NUMBERS, NUMBERS), min_size=1, max_size=5)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_of_every_parser_are_accepted(name: str) -> None:
    accepted = [TARGETS[name].check(seed) for seed in TARGETS[name].seeds]
    # The last item is an object, of which only the records' checksums are looked at.
    assert accepted == [True] * (len(accepted) - 1) + [name != "item"]


@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=900, deadline=None)
@given(which=st.integers(0, 99), operations=OPERATIONS)
def test_mutation_is_accepted_soundly_or_refused(name: str, which: int, operations: list[tuple[int, int, int]]) -> None:
    target = TARGETS[name]
    seed = target.seeds[which % len(target.seeds)]
    guarded(target.check, mutate(seed, operations, tokens=target.tokens, others=target.seeds))


@pytest.mark.parametrize("name", TARGETS)
def test_every_truncation_is_accepted_soundly_or_refused(name: str) -> None:
    """A JSON text or a rule may end earlier and still be one; what has a length or a checksum may not."""
    target = TARGETS[name]
    for seed in target.seeds:
        accepted = [target.check(seed[:nbytes]) for nbytes in range(0, len(seed), 1 + len(seed) // 150)]
        if name in ("safetensors", "metadata", "item", "saved", "manifest"):
            assert not any(accepted)


@pytest.mark.full
@pytest.mark.parametrize("name", ["safetensors", "metadata", "item"])
def test_every_bit_flipped_is_accepted_soundly_or_refused(name: str) -> None:
    """What passes, stock torch and safetensors read as we do: zip attributes, dates, memory formats and all."""
    target = TARGETS[name]
    for seed in target.seeds:
        damaged = bytearray(seed)
        for bit in range(8 * len(seed)):
            damaged[bit // 8] ^= 1 << bit % 8
            target.check(bytes(damaged))
            damaged[bit // 8] ^= 1 << bit % 8


def test_operations_change_almost_every_file() -> None:
    """The mutators do something: a fuzzer that tries the same file again and again finds nothing."""
    rng = random.Random(1)
    for target in TARGETS.values():
        made = {
            mutate(rng.choice(target.seeds), random_operations(rng), tokens=target.tokens, others=target.seeds)
            for _ in range(300)
        }
        assert len(made) > 200
