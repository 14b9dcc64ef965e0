"""Limits of configurations: depth, and size of integers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.shared.hostile_values import Closed
from tunemq_scheduler.search.space import read_space
from tunemq_shared.base.depth_and_integer_limits import MOST_LEVELS, beyond_limits
from tunemq_shared.base.errors import CheckpointError, ConfigError, SearchSpaceError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.code.config_packing import pack_config, unpack_config


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"leaf": 1}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


def test_beyond_limits_at_the_limit_finds_nothing_and_beyond_it_names_the_place() -> None:
    assert beyond_limits(nested(MOST_LEVELS - 1), "x") is None
    assert beyond_limits(nested(MOST_LEVELS), "x") == (
        "x is nested more than 64 levels deep, or holds itself, below x['a']['a']['a']; "
        "make it flatter"
    )


def test_beyond_limits_with_a_list_that_holds_itself_twice_ends_at_once() -> None:
    itself: list[Any] = []
    itself += [itself, (itself,)]
    assert "holds itself, below x['b'][0][0]" in str(beyond_limits({"a": 1, "b": itself}, "x"))


def test_beyond_limits_with_a_container_that_cannot_be_read_names_it() -> None:
    found = str(beyond_limits({"a": {"b": Closed()}}, "x"))
    assert "x cannot be read at x['a']['b']: ValueError" in found


@pytest.mark.parametrize("levels", [MOST_LEVELS, 2_000, 100_000])
def test_pack_config_with_a_deep_configuration_names_the_limit(levels: int) -> None:
    with pytest.raises(ConfigError, match=r"more than 64 levels.*the configuration\['a'\]"):
        pack_config(nested(levels))


def test_pack_config_at_the_limit_round_trips() -> None:
    deepest = nested(MOST_LEVELS - 1)
    assert unpack_config(pack_config(deepest)) == deepest


def test_checkpoint_of_a_deep_dict_names_the_reason() -> None:
    with pytest.raises(CheckpointError, match=r"the dict is a dict that is nested too deeply"):
        Checkpoint.from_dict(nested(100_000))  # 3.12 pickles some 10,000 levels


@pytest.mark.parametrize("number", [2**1023 - 1, -(2**1023) + 1], ids=["most", "least"])
def test_pack_config_with_the_largest_integer_keeps_it(number: int) -> None:
    assert unpack_config(pack_config({"seed": number})) == {"seed": number}


@pytest.mark.parametrize(
    "number", [2**1023, -(2**1023), 10**5_000], ids=["most", "least", "digits"]
)
def test_pack_config_with_a_larger_integer_names_place_and_limit(number: int) -> None:
    with pytest.raises(ConfigError, match=r"\['seeds'\]\[1\] is an integer of [\d,]+ bits; use"):
        pack_config({"seeds": [1, number]})


def test_search_space_with_too_large_an_integer_is_rejected() -> None:
    with pytest.raises(SearchSpaceError, match=r"\['seed'\] is an integer of 1,024 bits"):
        read_space({"seed": 2**1023})
