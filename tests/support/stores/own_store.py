"""Fixtures: a MinIO that a test may stop, freeze and damage, and chain searches that use it.

A test module imports the fixtures that it uses and names them in its ``__all__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.searches.chain_searches import ChainSearch, chain_searches
from tests.support.stores.object_servers import ObjectServer, running_minio

#: Starts a chain search; see `tests.support.searches.chain_searches.chain_searches`.
Start = Callable[..., ChainSearch]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A MinIO whose credentials are in the environment."""
    with running_minio(tmp_path / "minio") as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def own_bucket(server: ObjectServer) -> str:
    return server.create_bucket("shelf")


@pytest.fixture
def start(tmp_path: Path, server: ObjectServer, own_bucket: str) -> Iterator[Start]:
    yield from chain_searches(tmp_path, server, own_bucket)
