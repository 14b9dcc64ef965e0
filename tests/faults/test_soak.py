"""A small `make soak`: the parts of a farm die one after another, at a higher rate."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from tests.soak.__main__ import soak

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.timeout(400)]


def test_farm_whose_parts_die_twenty_times_gets_the_same_results(tmp_path, record_property):
    # `make soak` measures the time; here a busy machine may be slow.
    with mock.patch.dict(os.environ):  # its checks go to its store, and no later test does
        told = soak(tmp_path, kills=20, seed=20, every_s=1.5, longest_s=3.0, patience=4.0)
    record_property("soak", told)
    assert "20 faults" in told
