"""F02: a farm's experiment process is stopped, and another process resumes the experiment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.farm_support import children_of, is_alive
from tests.support.farms.farm_service import Search, farm_service
from tests.support.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.slow]


def test_f02_search_whose_process_is_stopped_continues_in_another_one(tmp_path: Path) -> None:
    with farm_service(tmp_path) as farm:
        farm.add_worker("one")
        farm.has_nodes("one")
        farm.submit(Search(name="s", trials=2, steps=20, has_gate=True))
        farm.open_gate("s", 5)
        farm.wait_for_steps("s", 2, 5)
        processes = [pid for forks in children_of(farm.scheduler.pid) for pid in children_of(forks)]
        (stopped,) = [
            pid for pid in processes if Path(f"/proc/{pid}/comm").read_text().strip() == "s"
        ]
        os.kill(stopped, signal.SIGSTOP)
        farm.open_gate("s", 20)
        eventually(lambda: not is_alive(stopped), within=40, message=lambda: str(farm))
        farm.wait_for("s", "FINISHED")
        assert f"its process {stopped} is stopped (SIGSTOP or a debugger)" in str(farm)
        farm.check_results("s")
