"""Sizes with units, as users write them."""

from __future__ import annotations

import pytest

from tunemq_shared.base.byte_sizes import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("1234", 1234),
        ("10B", 10),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("1.5 GiB", 3 * 2**29),
        ("10gb", 10**10),
        ("1T", 10**12),
        ("20Gi", 20 * 2**30),
        ("1.5 PiB", 3 * 2**49),
        ("1E", 10**18),
    ],
)
def test_size_may_have_a_unit(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "much", "-1", "1e3", "1 ZB", "1iB", "GiB"])
def test_invalid_size_is_none(text):
    assert parse_bytes(text) is None


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 KiB"),
        (20 * 2**10, "20 KiB"),
        (1000 * 2**10, "1000 KiB"),
        (256 * 2**20, "256 MiB"),
        (int(2.31 * 2**30), "2.31 GiB"),
        (2 * 2**30, "2 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_number_of_bytes_is_shown_with_three_digits_or_whole(number, text):
    assert show_bytes(number) == text
