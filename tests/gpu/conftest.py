"""Tests here use the GPUs of this machine, which `tests/conftest.py` hides."""

from __future__ import annotations

import os

import pytest

from tests.support.fake_gpus import FOLDER


@pytest.fixture(autouse=True)
def _gpus_of_this_machine_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNEMQ_FAKE_NVML", raising=False)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(one for one in folders if one != FOLDER))
