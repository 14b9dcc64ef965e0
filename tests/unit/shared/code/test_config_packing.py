"""Configurations arrive with their original types."""

from __future__ import annotations

import enum
import math
import subprocess
import sys
import threading
import timeit
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_shared.base.errors import ConfigError, TransportError, TuneError
from tunemq_shared.code.config_packing import PickledValue, pack_config, peek_config, unpack_config

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


class Point(NamedTuple):
    x: int


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


def round_trip(value: Any) -> Any:
    return unpack_config(pack_config({"value": value}))["value"]


@given(st.dictionaries(st.text(), plain))
def test_plain_data_round_trips_without_unpickling(config: dict[str, Any]) -> None:
    packed = pack_config(config)
    assert unpack_config(packed) == config
    assert peek_config(packed) == config


@pytest.mark.parametrize(
    "value",
    [
        (1, 2),
        (),
        [(1, 2)],
        {"layers": [(64, "relu")]},
        {1: "one"},
        {1, 2},
        b"bytes",
        np.float64(0.5),
        np.float32(0.5),
        np.int64(3),
        np.bool_(True),
        2**80,
        -(2**63) - 1,
        2**64 - 1,
        True,
        1.0,
        1,
        "\ud800",
        {"\ud800": 1},
        ["\ud800", 2**70],
        1 + 2j,
        math.inf,
        Point(3),
        Colour.RED,
        Text("x"),
        int,
        round_trip,
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],  # the same in every process
)
def test_every_value_keeps_its_exact_type(value: Any) -> None:
    back = round_trip(value)
    assert type(back) is type(value)
    assert back == value or callable(value)
    if isinstance(value, list):
        assert list(map(type, back)) == list(map(type, value))


def test_nan_round_trips() -> None:
    assert math.isnan(round_trip(math.nan))


def test_array_round_trips() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(round_trip(array), array)


def test_lambda_round_trips_callable() -> None:
    offset = 2
    assert round_trip(lambda x: x + offset)(1) == 3


def test_peeking_shows_the_plain_part_and_unpickles_nothing() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was unpickled",))

    shown = peek_config(pack_config({"lr": 0.1, "model": {"depth": 3, "net": Bomb()}}))
    assert shown["lr"] == 0.1
    assert shown["model"]["depth"] == 3
    assert isinstance(shown["model"]["net"], PickledValue)
    assert "pickled" in repr(shown["model"]["net"])


def test_value_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"model\['lock'\].*_thread\.lock.*create it in the train"
    ):
        pack_config({"model": {"lock": threading.Lock()}})


def test_configuration_that_contains_itself_is_rejected() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(ConfigError, match="holds itself"):
        pack_config(loop)


@pytest.mark.parametrize("config", [{1: 2}, {None: 2}, [1], "lr"])
def test_configuration_must_be_a_dict_with_string_keys(config: Any) -> None:
    with pytest.raises(ConfigError, match="must be"):
        pack_config(config)


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x01", msgspec.msgpack.encode([1])])
def test_damaged_bytes_are_rejected(packed: bytes) -> None:
    with pytest.raises(TransportError, match="packed configuration"):
        unpack_config(packed)


def test_unknown_extension_is_rejected() -> None:
    packed = msgspec.msgpack.encode({"a": msgspec.msgpack.Ext(9, b"")})
    with pytest.raises(TuneError, match="unknown extension 9"):
        unpack_config(packed)


def test_packing_six_scalars_takes_microseconds() -> None:
    config = {
        "lr": 0.1,
        "momentum": 0.9,
        "batch": 32,
        "name": "adam",
        "nesterov": True,
        "seed": None,
    }
    # Many short runs, because a busy machine interrupts most long ones.
    best = min(timeit.repeat(lambda: pack_config(config), number=50, repeat=200))
    assert best / 50 < 5e-6


def test_imports_of_scripts_load_no_heavy_library() -> None:
    modules = [
        "code.config_packing",
        "trainable.resources",
        "trainable.parameters",
        "checkpoints.checkpoint",
        "trainable.trainable_blobs",
        "checkpoints.local_store",
        "checkpoints.open_store",
        "checkpoints.store_sink",
    ]
    imports = "; ".join(f"import tunemq_shared.{module}" for module in modules)
    heavy = "{'numpy', 'cloudpickle', 'celery', 'redis', 'minio', 'pandas'}"
    code = f"import sys; {imports}; print({heavy} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "set()"
