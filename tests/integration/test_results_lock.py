"""Two schedulers that are given one results folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.farms.farm_service import farm_service
from tunemq_scheduler.farm.common.results_lock import hold_results
from tunemq_shared.base.errors import ConfigError

pytestmark = pytest.mark.integration


def test_folder_of_another_farm_is_rejected_until_that_one_ends(tmp_path: Path) -> None:
    own = tmp_path / "results" / ".farm"
    held = hold_results(own, "redis://one:6379/0")
    os.close(hold_results(own, "redis://one:6379/0"))  # the lease decides between these
    with pytest.raises(ConfigError, match=r"another farm uses .*results: redis://one.*process"):
        hold_results(own, "redis://two:6379/0")
    os.close(held)
    os.close(hold_results(own, "redis://two:6379/0"))


def test_scheduler_with_the_results_of_another_farm_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with (
        farm_service(tmp_path, starts=False) as first,
        farm_service(tmp_path / "b", starts=False) as second,
    ):
        first.start_scheduler()
        first.add_worker("one")
        first.has_nodes("one")
        assert second.start_scheduler("--results", str(first.results)).wait(60) == 64, second
        assert "tunemq scheduler --results DIR" in second.said()
