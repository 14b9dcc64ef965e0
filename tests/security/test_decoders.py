"""Every decoder survives malformed input.

`make fuzz` runs the same checks for five minutes, with new input each time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.fuzz.decoder import Bench, Decoder
from tests.fuzz.decoder_places import decoding_places, places_in
from tests.fuzz.decoders import EXCUSED, all_decoders
from tests.fuzz.fuzzing import Fuzzer
from tests.fuzz.mutations import Mutator
from tunemq_shared.base.errors import TransportError

pytestmark = pytest.mark.security

#: Inputs per decoder in this suite; fewer for those that open connections or archives.
STEPS = 150


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Decoder]]:
    before = logging.root.manager.disable
    logging.disable()
    with Bench(tmp_path_factory.mktemp("decoders")) as bench:
        yield {one.name: one for one in all_decoders(bench)}
    logging.disable(before)


def test_every_decoder_is_listed(decoders: dict[str, Decoder]) -> None:
    there = decoding_places()
    known = {place for one in decoders.values() for place in one.covers} | set(EXCUSED)
    assert there - known == set(), "add them to tests/fuzz/decoders.py"
    assert known - there == set(), "these are not there any more"
    assert len(there) > 90


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("import json\ndef f(text):\n    return json.loads(text)", "f"),
        ("from json import loads as read\nclass A:\n    def f(self, t): return read(t)", "A.f"),
        ("import msgspec\nread = msgspec.msgpack.Decoder(int).decode", "read"),
        ("import msgspec as m\nF = m.json.decode", "F"),
        ("import struct\n_HEAD = struct.Struct('>I')\ndef f(d): return _HEAD.unpack(d)", "f"),
        ("def f(anything, data): return anything.unpack_from(data)", "f"),
        ("import tomllib\ndef f(t):\n    found = tomllib.loads(t)\n    return found", "f"),
        ("def f(t):\n    import base64\n    return base64.b64decode(t)", "f"),
        ("import zipfile\ndef f(p):\n    with zipfile.ZipFile(p) as z: return z", "f"),
    ],
)
def test_decoding_call_is_found_in_source(source: str, place: str) -> None:
    assert places_in(source) == {place}


def test_encoding_call_is_not_taken_for_a_decoding_call() -> None:
    assert places_in("import json\ndef f(o): return json.dumps(o)\nx = 'json.loads(t)'") == set()


@pytest.mark.timeout(600)
def test_each_decoder_accepts_or_rejects_every_input(decoders: dict[str, Decoder]) -> None:
    failures, tried = [], 0
    for decoder in decoders.values():
        fuzzer = Fuzzer(decoder, seed=1)
        fuzzer.begin()
        is_costly = any(word in decoder.name for word in ("store", "bundle", "YAML"))
        for _ in range(STEPS // 5 if is_costly else STEPS):
            fuzzer.step()
        tried += fuzzer.tally.tried
        failures += [(one.kind, one.data[:60]) for one in fuzzer.tally.failures]
    assert failures == []
    assert tried > 100 * len(decoders)


def test_each_decoder_accepts_some_of_its_samples(decoders: dict[str, Decoder]) -> None:
    """Otherwise the fuzzer would never reach the decoder's deeper code."""

    def takes(decoder: Decoder, data: bytes) -> bool:
        try:
            decoder.read(data)
        except decoder.refuses:
            return False
        return True

    assert [
        name for name, one in decoders.items() if not any(takes(one, data) for data in one.seeds)
    ] == []


def test_a_decoder_that_raises_something_else_or_hangs_is_found() -> None:
    def fragile(data: bytes) -> object:
        if len(data) > 40:
            raise KeyError("too long")
        if data[:1] == b"\xff":
            raise TransportError("not so")
        return data.decode("latin-1")

    fuzzer = Fuzzer(Decoder("fragile", fragile, (TransportError,), (b"abcdef" * 4,), ()), seed=3)
    for _ in range(500):
        fuzzer.step()
    assert [one.problem for one in fuzzer.tally.failures] == ["KeyError: 'too long'"]
    assert fuzzer.tally.taken
    assert fuzzer.tally.rejected


def test_the_same_seed_makes_the_same_input() -> None:
    def made(seed: int) -> list[bytes]:
        mutator = Mutator(seed)
        return [mutator.mutated(b'{"a": [1, 2]}', [b"x" * 9]) for _ in range(200)]

    assert made(5) == made(5)
    assert made(5) != made(6)
    assert len(set(made(5))) > 150
