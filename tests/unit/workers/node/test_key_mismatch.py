"""A worker warns when it and its farm's scheduler lack each other's keys."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tests.support.keys import key_folder, of_scheduler, of_worker
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.node.key_mismatch import KeyWatch
from tunemq_workers.node.terminal_log import format_log_event


@pytest.fixture
def watched(tmp_path, caplog):
    """Let a worker with or without keys check for some seconds; return its terminal's output."""

    def watched(signs, *, has_keys=True, has_scheduler=True, seconds=20):
        keys = of_worker(key_folder(tmp_path / "keys")) if has_keys else LiveKeys.none()
        clock = SimpleNamespace(now=100.0)
        watch = KeyWatch(NodeSigning("inc1", keys), lambda: clock.now)
        with caplog.at_level(logging.WARNING):
            for _ in range(seconds):
                assert not watch.look(has_scheduler=has_scheduler, signs=signs(tmp_path))
                clock.now += 1
        return [format_log_event(record) for record in caplog.records]

    return watched


def own(folder):
    return of_scheduler_at(folder / "keys")


def of_scheduler_at(path):
    made = key_folder(path) if not path.exists() else SimpleNamespace(path=path)
    return of_scheduler(made).orders.signer.hex().encode()


def test_same_keys_cause_no_warning(watched):
    assert watched(own) == []


def test_missing_keys_on_both_sides_or_a_missing_scheduler_cause_no_warning(watched):
    assert watched(lambda _: b"", has_keys=False) == []
    assert watched(lambda _: b"", has_scheduler=False) == []


def test_worker_without_keys_is_warned_once(watched):
    (told,) = watched(lambda _: b"00" * 8, has_keys=False)
    assert "--keys worker.toml" in told


def test_worker_with_keys_is_warned_that_its_scheduler_has_none(watched):
    (told,) = watched(lambda _: b"")
    assert "--keys scheduler.toml" in told


def test_scheduler_that_has_just_begun_causes_no_warning(watched):
    assert watched(lambda _: b"", seconds=4) == []


@pytest.mark.parametrize(
    ("has_keys", "has_scheduler", "signs", "agrees"),
    [
        (True, True, None, True),
        (True, True, b"", False),
        (True, True, b"00" * 8, False),
        (True, False, b"", True),
        (False, True, b"", True),
        (False, True, b"00" * 8, False),
    ],
)
def test_key_watch_agrees_only_with_scheduler_that_signs_with_a_known_key(
    tmp_path, has_keys, has_scheduler, signs, agrees
):
    keys = of_worker(key_folder(tmp_path / "keys")) if has_keys else LiveKeys.none()
    watch = KeyWatch(NodeSigning("inc1", keys))
    watch.look(has_scheduler=has_scheduler, signs=own(tmp_path) if signs is None else signs)
    assert watch.agrees is agrees


@pytest.mark.parametrize("signs", [b"00" * 8, b"no key \x1b[31m", b"\xff" * 10_000])
def test_worker_with_other_keys_is_told_the_key_of_the_scheduler(watched, signs):
    (told,) = watched(lambda _: signs)
    assert "is not in" in told
    assert told.isprintable()
    assert len(told) < 400
