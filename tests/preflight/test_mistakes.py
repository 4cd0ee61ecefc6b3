"""Injected mistakes: what people get wrong is found, with its key and its fix, and right configs are silent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from preflight.mistakes import BASES, MISTAKES, Mistake, findings_of

AT_LEAST = 0.97
"""The part of the mistakes that must be found."""


def serious(findings: object) -> list[str]:
    assert isinstance(findings, tuple)
    return [f"{found.code} {found.where}: {found.what}" for found in findings if found.severity != "info"]


@pytest.mark.parametrize("base", sorted(BASES))
def test_base_is_silent(base: str, tmp_path: Path) -> None:
    assert serious(findings_of(tmp_path, base, {})) == []


@pytest.mark.full
@pytest.mark.parametrize("mistake", [one for one in MISTAKES if one.near is not None], ids=lambda one: one.source)
def test_change_that_is_right_does_not_find_the_mistake(mistake: Mistake, tmp_path: Path) -> None:
    found = findings_of(tmp_path, mistake.base, mistake.near or {}, ranks=mistake.ranks, model=mistake.model)
    assert serious(found) == []


def test_mistakes_are_found_with_their_key_and_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missed: list[str] = []
    all_of, found_of = Counter[str](), Counter[str]()
    for mistake in MISTAKES:
        findings = findings_of(tmp_path, mistake.base, mistake.change, ranks=mistake.ranks, model=mistake.model)
        all_of[mistake.kind] += 1
        if mistake.is_found_in(findings):
            found_of[mistake.kind] += 1
        else:
            got = [f"{one.code} {one.where} -> {one.hint}" for one in findings]
            missed.append(f"{mistake.base} {dict(mistake.change)} ({mistake.code} {mistake.key} {mistake.fix}): {got}")
    with capsys.disabled():
        total = ", ".join(f"{kind} {found_of[kind]}/{count}" for kind, count in sorted(all_of.items()))
        print(f"\nmistakes found: {found_of.total()}/{all_of.total()} ({total})")
    assert found_of.total() >= AT_LEAST * all_of.total(), "\n".join(missed)


def test_corpus_is_as_large_as_promised() -> None:
    threads = [one for one in MISTAKES if "#" in one.source]
    assert len(threads) >= 60
    assert len(MISTAKES) - len(threads) >= 66
    assert len({(one.base, str(one.change), str(one.model), one.ranks) for one in MISTAKES}) == len(MISTAKES)
