"""Scheduler and worker of a parent that ignores or blocks signals, and of an odd environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.farms.farm_service import Here, Search, farm_service

pytestmark = [pytest.mark.faults]

#: Runs the program behind it, as a careless supervisor would.
CARELESS = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, "PYTHONOPTIMIZE": "2"})
"""


def test_farm_of_a_careless_supervisor_runs_a_search_and_ends_when_asked_to(tmp_path: Path):
    machine = Here((sys.executable, "-c", CARELESS))
    with farm_service(tmp_path, head=machine) as farm:
        farm.add_worker("one", machine=machine)
        farm.has_nodes("one")
        farm.submit(Search(name="search", failures=0))
        farm.wait_for("search", "FINISHED")
        farm.check_results("search")
        for process in (farm.workers["one"], farm.scheduler):
            process.terminate()
            assert process.wait(60) == 0
