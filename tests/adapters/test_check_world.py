"""`check-lora --base` against the libraries themselves: what they load as it was trained is ok, and nothing else is.

Adapters of 33 kinds of models, healthy and damaged. The bulk is `full`; a few of every sort always run.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from adapters import world_adapters, world_pipelines
from adapters.world_oracle import Worlds, does_what_was_trained

from ckpt_tools.adapters.check import check_lora
from ckpt_tools.errors import UnreadableError

HARMLESS = frozenset({"mistral: names twice", "mistral: a module too many", "qwen-image: other targets"})
"""Damages behind which the library still finds the whole adapter: ckpt says them all the same."""
NOT_JUDGED = frozenset({"mistral: unknown type"})
"""Of a kind of which nothing is known: neither ok nor wrong."""
UNREADABLE = frozenset({"mistral: rank -2", "mistral: rank as text", "mistral: alpha as text", "mistral: names twice"})
QUICK = frozenset(
    {
        "phi3, fused qkv", "gpt2, Conv1D and all biases", "gpt-oss, experts", "bert, biases of its targets", "sd15",
        "wan", "phi3: prefix lost", "gpt-oss: experts lost", "mistral: targets too few", "t5: decoder lost",
        "wan: prefix lost", "whisper: a task that breaks it", "mistral: one B zero", "sd15: one B lost",
    }
)  # fmt: skip


def cases(names: Iterable[str]) -> list[object]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize("name", cases([*world_adapters.HEALTHY, *world_pipelines.HEALTHY]))
def test_healthy_adapter_is_ok(name: str, worlds: Worlds) -> None:
    trained = worlds.trained(name)
    assert does_what_was_trained(trained, trained.directory)
    result = check_lora(trained.directory, base=trained.base)
    assert result.verdict == "loads", (result.findings, result.not_checked)
    assert not [finding for finding in result.findings if finding.severity != "info"]


@pytest.mark.parametrize("name", cases([*world_adapters.DAMAGED, *world_pipelines.DAMAGED]))
def test_damaged_adapter_is_never_ok(name: str, worlds: Worlds, tmp_path: Path) -> None:
    trained = worlds.damaged(name, tmp_path)
    assert does_what_was_trained(trained, tmp_path) is (name in HARMLESS)
    try:
        result = check_lora(tmp_path, base=trained.base)
    except UnreadableError as error:  # a field of an impossible type, two tensors for one factor
        assert name in UNREADABLE, error  # noqa: PT017
        return
    wanted = "unknown" if name in NOT_JUDGED else "fails"
    assert result.verdict == wanted, (result.findings, result.not_checked)
