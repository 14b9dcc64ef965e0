"""Fixtures for tests of one node: its Redis, a scheduler that orders trials, and the node.

A test module imports those that it uses and names them in its ``__all__``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import Node, RedisServer, Scheduler


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.end()


@pytest.fixture
def scheduler(server: RedisServer, tmp_path: Path) -> Scheduler:
    return Scheduler(server, tmp_path)


@pytest.fixture
def node(server: RedisServer, scheduler: Scheduler, tmp_path: Path) -> Iterator[Node]:
    node = Node(server, scheduler, tmp_path / "node")
    yield node
    node.end()
