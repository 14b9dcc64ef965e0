"""Fake GPUs that tests may lock; no machine has them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

import pytest

from tunemq_workers.gpu.gpu_locks import FOLDERS


@pytest.fixture
def uuids() -> Iterator[list[str]]:
    """Yield the unique UUIDs of two fake GPUs."""
    uuids = [f"GPU-test-{secrets.token_hex(6)}" for _ in range(2)]
    yield uuids
    for folder in FOLDERS:
        for uuid in uuids:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, f"tunemq-gpu-{uuid}.lock"))
