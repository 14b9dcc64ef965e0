"""What an experiment's process cannot be started with is told, and leaves nothing behind."""

from __future__ import annotations

import socket

import pytest

from tunemq_scheduler.farm.relay.process import ExperimentProcess
from tunemq_shared.errors import ConfigError


@pytest.mark.parametrize(
    "options",
    [
        {"variables": {"A=B": ""}},
        {"variables": {"A": "\0"}},
        {"variables": {"A": "\ud800"}},
        {"python": "/nowhere/python"},
        {"cwd": "/nowhere"},
        {"cwd": "\0"},
    ],
)
def test_what_it_cannot_be_started_with_is_told(tmp_path, options):
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(ConfigError, match="cannot be started"):
        ExperimentProcess(tmp_path / "search", theirs, **options)
    assert theirs.fileno() == -1


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(ConfigError, match="cannot be started"):
        ExperimentProcess(tmp_path / "file" / "search", theirs)
    assert theirs.fileno() == -1
