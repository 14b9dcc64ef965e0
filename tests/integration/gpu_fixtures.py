"""Fake GPUs that tests may lock; no machine has them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.support.fake_gpus import remove_locks


@pytest.fixture
def uuids() -> Iterator[list[str]]:
    """Yield the unique UUIDs of two fake GPUs."""
    uuids = [f"GPU-test-{secrets.token_hex(6)}" for _ in range(2)]
    yield uuids
    remove_locks(*uuids)
