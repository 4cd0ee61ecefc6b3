"""Stock saves of two ranks are no damage, and `not_checked` says which of their names stand only once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from corrupt.two_ranks import save_all

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.dcp_metadata import parse_metadata
from ckpt_tools.errors import UnreadableError

pytestmark = pytest.mark.full


SOUND = (
    *("flat", "nested", "unflattened", "unflattened-nested", "async", "tied", "hsdp", "experts-and-more"),
    *("hugging-face", "optimizer", "optimizer-alone", "optimizer-flattened", "optimizer-flattened-alone"),
)
MEANT_TO_BE_EQUAL = ("tied-replicated", "experts-by-name", "experts-stacked")
ONE_LETTER = {"flat": "1 name", "unflattened": "1 name", "unflattened-nested": "1 name"}
"""Of several ranks each sends its own copy of a name, but Python makes every one-letter string only once."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two-ranks")
    save_all(directory)
    return directory


@pytest.mark.parametrize("name", SOUND)
def test_stock_save_is_sound(saved: Path, name: str) -> None:
    assert api.verify(saved / name).findings == ()


@pytest.mark.parametrize("name", MEANT_TO_BE_EQUAL)
def test_files_that_are_meant_to_be_equal_are_no_error(saved: Path, name: str) -> None:
    result = api.verify(saved / name)
    assert [(finding.code, finding.severity) for finding in result.findings] == [("copied-file", "warning")]
    assert result.ok


def test_file_copied_over_another_is_an_error_where_parts_of_a_matrix_are_equal(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved / "experts-and-more", run)
    shutil.copyfile(run / "__1_0.distcp", run / "__0_0.distcp")
    assert [finding.severity for finding in api.verify(run).findings] == ["error"]


@pytest.mark.parametrize("name", [*SOUND, *MEANT_TO_BE_EQUAL])
def test_names_that_stand_once_are_said(saved: Path, name: str) -> None:
    said = [text.partition(" that")[0] for text in api.verify(saved / name).not_checked if "stores only once" in text]
    assert said == [ONE_LETTER[name]] if name in ONE_LETTER else said == []


def test_no_changed_name_passes_but_one_of_one_letter(saved: Path) -> None:
    intact = (saved / "flat" / ".metadata").read_bytes()
    for name, places in (("layer.weight", 4), ("layer.bias", 3), ("layer.uneven", 4)):
        assert intact.count(name.encode()) == places
        at = -1
        for _ in range(places):
            at = intact.index(name.encode(), at + 1)
            for byte in range(len(name)):
                damaged = bytearray(intact)
                damaged[at + byte] ^= 1
                with pytest.raises(UnreadableError):
                    parse_metadata(bytes(damaged))


def test_safetensors_of_dcp_are_read_as_the_refusal_says(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="SAFETENSORS") as caught:
        api.verify(saved / "safetensors")
    assert "--from hf-sharded" in str(caught.value.hint)
    api.reshard(saved / "safetensors", tmp_path / "items", mesh="dp_shard=2", format="hf-sharded")
    assert api.diff(tmp_path / "items", saved / "flat").equal
