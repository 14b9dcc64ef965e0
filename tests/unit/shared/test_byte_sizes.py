"""Sizes as people write them."""

from __future__ import annotations

import pytest

from tunemq_shared.byte_sizes import parse_bytes


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
    ],
)
def test_a_size_may_have_a_unit(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "much", "-1", "1e3", "1 PB", "1iB", "GiB"])
def test_what_is_no_size_is_none(text):
    assert parse_bytes(text) is None
