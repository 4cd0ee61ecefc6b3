"""What bin/mutate makes of a text."""

from __future__ import annotations

import ast

from mutate.mutate import ROOMS, ROOT, make_mutants

TEXT = '''\
def f(a: int = 3) -> int:
    """Not 1 and 2."""
    if a < 1 or not a:
        raise ValueError(f"{a + 1}")
    sync("é", a)
    return a + 1
'''
MADE = {
    "def f(a: int = (4)) -> int:", "def f(a: int = (2)) -> int:",
    "    if (a <= 1) or not a:", "    if a < (2) or not a:", "    if a < (0) or not a:", "    if (a < 1 and (not a)):",
    "    if a < 1 or (a):", "    if (False):", "    if (not (a < 1 or not a)):",
    "    pass", "    return None", "    return (a - 1)", "    return a + (2)", "    return a + (0)",
}  # fmt: skip


def test_each_mutant_is_one_change_and_still_python() -> None:
    made = [mutant.content for mutant in make_mutants("x.py", TEXT, ())]
    assert {line for text in made for line in text.splitlines()} - set(TEXT.splitlines()) == MADE
    assert len(made) == len(set(made)) == len(MADE)
    for text in made:
        ast.parse(text)
        assert len(text.splitlines()) == len(TEXT.splitlines())


def test_rooms_and_their_tests_are_there() -> None:
    for room, tests in ROOMS.items():
        assert list((ROOT / "ckpt_tools" / room).glob("*.py"))
        assert [each for each in tests.split() if not (ROOT / "tests" / each).exists()] == []
