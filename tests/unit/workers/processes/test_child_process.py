"""Which of a node's keys its child processes receive."""

from __future__ import annotations

import argparse
import os

import pytest

from tunemq_workers.broker.consumer_launcher import start_forkserver
from tunemq_workers.node import node_setup
from tunemq_workers.processes import child_process
from tunemq_workers.system.credentials import REDIS_KEYS, STORE_KEYS

KEYS = {name: f"the {name}" for name in REDIS_KEYS | STORE_KEYS}


@pytest.fixture
def sent(monkeypatch):
    """The keys that the last child of a farm's node received; no process is started."""
    sent = {}

    def send(child, keys, *, is_hidden):
        child.close()
        assert is_hidden
        sent.clear()
        sent.update(keys)

    def spawn(path, line, variables, **_):
        assert not KEYS.keys() & variables.keys()
        return os.getpid()

    monkeypatch.setattr(child_process, "is_memory_private", lambda: True)
    monkeypatch.setattr(child_process, "send_keys", send)
    monkeypatch.setattr(child_process.os, "posix_spawn", spawn)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    return sent


def test_consumers_get_the_address_of_redis_and_no_key_of_a_store(sent):
    start_forkserver("redis://:secret@host/0", "attempt", os.devnull)
    assert sent == {"TUNEMQ_REDIS": "redis://:secret@host/0"}


def test_other_children_get_only_the_keys_that_they_need(sent, tmp_path):
    options = argparse.Namespace(trial_user=None, workdir=str(tmp_path))
    node_setup._start(options, "transfers", "log", STORE_KEYS)
    assert sent == {name: KEYS[name] for name in STORE_KEYS}
    assert "TUNEMQ_REDIS" not in sent
    node_setup._start(options, "log_scanner", "log")
    assert sent == {}
