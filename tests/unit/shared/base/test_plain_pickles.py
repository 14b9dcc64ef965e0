"""Pickles of plain values load without running code; all others are refused."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import enum
import os
import pathlib
import pickle
import random
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from tunemq_shared.base.pickling import dump
from tunemq_shared.base.unpickling import UnsafePickle, load_plain
from tunemq_shared.code.config_packing import PickledValue, pack_config, unpack_plain_config

PLAIN: list[Any] = [
    (1, 2.5, "x", None, True),
    {1, 2},
    frozenset({"a"}),
    b"\x00\xff",
    bytearray(b"ab"),
    1 + 2j,
    10**40,
    -(2**70),
    range(1, 9, 2),
    slice(None, 3),
    "\ud800",
    {5: "five", (1, 2): [3, {"a": ()}]},
    np.float64(0.1),
    np.float32(0.25),
    np.int64(-3),
    np.uint8(200),
    np.bool_(True),
    np.complex128(1 + 2j),
]


class Colour(enum.Enum):
    RED = 1


class Runs:
    """Runs a command when it is loaded."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


class Builds:
    """Calls ``__setstate__`` of a foreign object when it is loaded."""

    def __reduce__(self) -> Any:
        return np.dtype, ("f8", False, True), (3, "<", None, None, None, -1, -1, 0)


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_value_keeps_its_type(value: Any) -> None:
    found = load_plain(dump(value))
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize(
    "value",
    [
        print,
        Colour.RED,
        Colour,
        lambda x: x,
        dt.date(2026, 1, 1),
        decimal.Decimal("1.5"),
        pathlib.PurePosixPath("/x"),
        np.zeros(3),
        np.datetime64("2026-01-01"),
        np.str_("x"),
        np.void(b"abc"),
        Builds(),
        Runs(os.system, "exit 1"),
        Runs(eval, "1"),
        Runs(getattr, "x", "upper"),
        Runs(np.dtype, "O"),
        Runs(np.dtype, [("a", "f8")]),
        Runs(complex, "x" * 10),
    ],
)
def test_value_that_could_run_code_is_refused_or_harmless(value: Any) -> None:
    pickled = cloudpickle.dumps(value)
    try:
        found = load_plain(pickled)
    except UnsafePickle:
        return
    # A type of numpy alone is read into an object of ours.
    assert type(found).__module__ == "tunemq_shared.base.unpickling", found


def test_code_hidden_in_a_number_of_numpy_does_not_run(tmp_path: Path) -> None:
    """numpy itself would load objects from the bytes of such a number."""
    mark = tmp_path / "ran"
    scalar = np.float64(1).__reduce__()[0]
    inner = pickle.dumps(Runs(os.system, f"touch {mark}"))
    for kind in (np.dtype("O"), np.dtype("f8"), "O", None):
        with pytest.raises(UnsafePickle):
            load_plain(pickle.dumps(Runs(scalar, kind, inner)))
    assert not mark.exists()


def test_damaged_pickles_are_refused() -> None:
    rng = random.Random(5)
    whole = [dump(value) for value in PLAIN]
    for _ in range(20_000):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(UnsafePickle):
            load_plain(bytes(data[: rng.randint(1, len(data))]))


def test_few_bytes_do_not_fill_the_memory() -> None:
    for memo in (b"r" + (2**31).to_bytes(4, "little"), b"p2147483648\n", b"q\x05"):
        with pytest.raises(UnsafePickle, match="memo"):
            load_plain(b"\x80\x04N" + memo + b".")


def test_configuration_shows_what_it_does_not_load() -> None:
    config = {"lr": 0.1, "betas": (0.9, 0.999), "layers": [1, {"act": print}], "n": np.int64(3)}
    found = unpack_plain_config(pack_config(config))
    assert found["betas"] == (0.9, 0.999)
    assert (found["n"], type(found["n"])) == (3, np.int64)
    assert isinstance(found["layers"][1]["act"], PickledValue)
    assert repr(found["layers"][1]["act"]).startswith("<pickled, ")
