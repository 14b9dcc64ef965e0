"""`SortedValues` behaves like a sorted list."""

from __future__ import annotations

import bisect
import random

import pytest

from tunemq_scheduler.schedulers import sorted_values
from tunemq_scheduler.schedulers.sorted_values import SortedValues


@pytest.mark.parametrize("seed", range(20))
def test_sorted_values_after_random_changes_equal_a_sorted_list(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_values, "_MOST", 8)
    rng = random.Random(seed)
    plain = sorted(rng.randrange(50) for _ in range(rng.randrange(30)))
    values = SortedValues(rng.sample(plain, len(plain)))
    for _ in range(500):
        value = rng.randrange(50)
        if rng.random() < 0.55:
            values.add(value)
            bisect.insort(plain, value)
        else:
            assert values.remove(value) is (value in plain)
            if value in plain:
                plain.remove(value)
        assert list(values) == plain
        assert len(values) == len(plain)
        assert values.below(value) == bisect.bisect_left(plain, value)
        assert values.up_to(value) == bisect.bisect_right(plain, value)
        if plain:
            place = rng.randrange(len(plain))
            assert (values[place], values[-1]) == (plain[place], plain[-1])


def test_sorted_values_have_no_value_beyond_the_last() -> None:
    with pytest.raises(IndexError):
        SortedValues([1.0, 2.0])[2]
