"""Text of values whose own methods fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.shared.hostile_values import NoText, Real, Silent, Text, Whole, all_hostile
from tunemq_shared.base.safe_text import plain_number, repr_of, text_of


@pytest.mark.parametrize("value", all_hostile(), ids=lambda one: type(one).__name__)
def test_safe_text_of_a_hostile_value_is_a_string(value: Any) -> None:
    assert type(text_of(value)) is str
    assert type(repr_of(value)) is str


def test_safe_text_of_a_value_without_one_names_its_type() -> None:
    assert text_of(Silent()) == "<tests.unit.shared.hostile_values.Silent without a text>"
    assert repr_of(NoText()) == "<tests.unit.shared.hostile_values.NoText without a text>"


@pytest.mark.parametrize("value", [None, 1, 0.1, "a\nb", True, np.float64(0.1), [1, "a"], {"a": 1}])
def test_safe_text_of_an_ordinary_value_is_its_own(value: Any) -> None:
    assert text_of(value) == str(value)
    assert repr_of(value) == repr(value)


def test_safe_text_of_a_string_subclass_is_its_content() -> None:
    assert (text_of(Text("a")), repr_of(Text("a"))) == ("a", "'a'")


@pytest.mark.parametrize(
    ("value", "plain"),
    [(Real(2.5), 2.5), (Whole(7), 7), (np.float64(0.5), 0.5), (True, True)],
    ids=["float", "int", "numpy", "bool"],
)
def test_plain_number_of_a_subclass_is_of_a_plain_type(value: Any, plain: Any) -> None:
    assert plain_number(value) == plain
    assert type(plain_number(value)) is type(plain)
