"""Plain values of `torch.save`: read as they are, or refused by name."""

import io
import warnings

import pytest
import torch

from ckpt_tools.checkpoint.formats.torch_value import parse_value
from ckpt_tools.errors import CkptError, UnreadableError


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("value", [3, True, None, 1e-4, "adamw", (0.9, 0.999), [0, 1], {"lr": 0.1, "names": ["a"]}])
def test_parse_value_of_torch_save_gives_the_value(value: object) -> None:
    assert parse_value(saved(value), where="item") == value


@pytest.mark.parametrize("value", [torch.zeros(2), torch.float32, io.BytesIO])
def test_parse_value_of_an_object_is_refused(value: object) -> None:
    with pytest.raises(UnreadableError):
        parse_value(saved(value), where="item")


def test_parse_value_with_a_flipped_byte_is_the_same_or_refused() -> None:
    content, refused = saved([1, "two", 3.0]), 0
    for at in range(len(content)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[at] ^= mask
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # zipfile on doubled names
                try:
                    assert parse_value(bytes(damaged), where="item") == [1, "two", 3.0], at
                except CkptError:
                    refused += 1
    assert refused > 100


def test_parse_value_cut_short_is_refused() -> None:
    content = saved([1, "two", 3.0])
    for length in range(0, len(content), 7):
        with pytest.raises(UnreadableError):
            parse_value(content[:length], where="item")


def test_parse_value_with_a_lying_extra_field_is_refused() -> None:
    """zipfile unpacks a zip64 field without looking at its length: struct.error."""
    content = saved(1)
    at = content.rindex(b"PK\x01\x02")
    name_length = int.from_bytes(content[at + 28 : at + 30], "little")
    extra = b"\x01\x00\x01\x00\x00"
    entry = bytearray(content[at : at + 46 + name_length])
    entry[20:28] = b"\xff" * 8
    entry[30:32] = len(extra).to_bytes(2, "little")
    with pytest.raises(UnreadableError):
        parse_value(content[:at] + bytes(entry) + extra + content[at + 46 + name_length :], where="item")
