"""Sizes and durations."""

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.units import format_device, format_duration, format_number, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1), ("1000", 1000), ("5GB", 5_000_000_000), ("5gb", 5_000_000_000), ("5GiB", 5 << 30),
        (" 512 MiB ", 512 << 20), ("1.5KB", 1500), ("0.5KiB", 512), ("2TB", 2 * 10**12), ("2TiB", 2 << 40), ("7B", 7),
    ],
)  # fmt: skip
def test_parse_size_of_a_size_is_bytes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "5 G B", "-1", "0", "0GB", "1e9", "5PB", "five", "5GB5", "٥GB", "0.1", "1_000"]
)
def test_parse_size_of_something_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (10240, "10.0 KiB"), (102400, "100 KiB"), (2e9, "1.86 GiB"),
     (5 << 50, "5120 TiB"), (-2048, "-2.00 KiB")],
)  # fmt: skip
def test_format_size_has_three_digits(nbytes: float, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.4, "0:00:59"), (59.6, "0:01:00"), (3661, "1:01:01"), (360000, "100:00:00")],
)
def test_format_duration_is_hours_minutes_seconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (0, 3, "0"), (1234.5, 3, "1,230"), (12345.6, 5, "12,346"), (999.96, 3, "1,000"), (123456, 3, "123,000"),
        (2.5e6, 2, "2.5e+06"), (1e-4, 3, "0.0001"), (1.234e-5, 2, "1.2e-05"), (-0.01234, 2, "-0.012"),
        (float("nan"), 3, "nan"), (float("-inf"), 3, "-inf"), (0.5, 2, "0.5"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_people(number, digits, text):
    assert format_number(number, digits) == text


def test_device_is_named_as_its_maker_does():
    assert format_device(80 * 10**9) == "80 GB (74.5 GiB)"
    assert format_device(10**13) == "10,000 GB (9.09 TiB)"
