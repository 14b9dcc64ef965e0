"""Trials on a real GPU; to run them by hand: ``python benchmarks/scripts/gpu.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "scripts" / "gpu.py"


@pytest.mark.timeout(900)
def test_each_trial_finds_the_memory_of_the_one_before_given_back():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.partition("MEASURED ")[2])
    if figures["why_not"]:
        pytest.skip(figures["why_not"])
    assert figures["left_mib"] < 300
    assert figures["halves"] == 2
    assert figures["cuda_s"] < figures["fresh_s"]
