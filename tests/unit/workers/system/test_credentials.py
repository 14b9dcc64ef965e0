from __future__ import annotations

import os
import socket

import pytest

from tunemq_workers.system import credentials
from tunemq_workers.system.credentials import is_for_trials, send_keys, split, take_keys

KEYS = {
    "TUNEMQ_REDIS": "redis://:secret@host/0",
    "AWS_SESSION_TOKEN": "token",
    "AWS_SECRET_ACCESS_KEY": "ke=y",
    "MINIO_ROOT_PASSWORD": "",
}


@pytest.fixture
def pair():
    one, two = socket.socketpair()
    with one, two:
        yield one, two


@pytest.fixture
def hidden(monkeypatch):
    """Record calls that would make this process's memory private, without doing so."""
    calls = []
    monkeypatch.setattr(credentials, "keep_memory_private", lambda: calls.append(len(os.environ)))
    return calls


def test_keys_are_distinguished_from_public_variables():
    shown = {"PATH": "/bin", "TUNEMQ_FAILPOINTS": "x", "AWS_REGION": "here"}
    assert split(shown | KEYS) == (shown, KEYS)


@pytest.mark.parametrize("name", [*KEYS, "MINIO_SECRET_KEY", "TUNEMQ_X"])
def test_trials_get_no_key_and_no_variable_of_ours(name):
    assert not is_for_trials(name)


@pytest.mark.parametrize("name", ["PATH", "AWS_REGION", "MINIONS", "MY_TUNEMQ_X"])
def test_trials_get_all_other_variables(name):
    assert is_for_trials(name)


def test_child_receives_keys_over_its_socket_after_hiding_its_memory(pair, hidden, monkeypatch):
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    before = len(os.environ)
    node, child = pair
    send_keys(node, KEYS, is_hidden=True)
    node.sendall(b"further")
    take_keys(child)
    try:
        assert {name: os.environ[name] for name in KEYS} == KEYS
        assert child.recv(100) == b"further"
        assert hidden == [before]
    finally:
        for name in KEYS:
            os.environ.pop(name, None)


def test_child_of_a_node_that_hides_nothing_hides_nothing(pair, hidden):
    node, child = pair
    send_keys(node, {}, is_hidden=False)
    take_keys(child)
    assert hidden == []


def test_child_of_an_ended_node_has_no_keys(pair, hidden):
    node, child = pair
    node.close()
    before = dict(os.environ)
    take_keys(child)
    assert os.environ == before
    assert child.recv(1) == b""
