"""How deep configurations may be nested."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.shared.hostile_values import Closed
from tunemq_shared.base.errors import CheckpointError, ConfigError
from tunemq_shared.base.nesting import MOST_LEVELS, too_deep
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.code.config_packing import pack_config, unpack_config


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"leaf": 1}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


def test_too_deep_at_the_limit_finds_nothing_and_beyond_it_names_the_place() -> None:
    assert too_deep(nested(MOST_LEVELS - 1), "x") is None
    assert too_deep(nested(MOST_LEVELS), "x") == (
        "x is nested more than 64 levels deep, or holds itself, below x['a']['a']['a']; "
        "make it flatter"
    )


def test_too_deep_with_a_list_that_holds_itself_twice_ends_at_once() -> None:
    itself: list[Any] = []
    itself += [itself, (itself,)]
    assert "holds itself, below x['b'][0][0]" in str(too_deep({"a": 1, "b": itself}, "x"))


def test_too_deep_with_a_container_that_cannot_be_read_names_it() -> None:
    found = str(too_deep({"a": {"b": Closed()}}, "x"))
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
        Checkpoint.from_dict(nested(2_000))
