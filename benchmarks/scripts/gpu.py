"""Trials on a real GPU: what each leaves behind for the next, and how soon CUDA is ready.

    python gpu.py

Trials run one after another on the whole GPU, so that each sees the remains of the one before: one
leaves a process in a separate session with GPU memory, one kills itself while its kernels run, one
has DataLoader workers. Then two trials request half a GPU each, and run at the same time or not at
all. PyTorch is preloaded. Needs PyTorch with CUDA, and a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from measured import tell
from served_farm import ServedFarm, served_farm, wait_until

from tunemq_workers.gpu.drivers.nvml import open_driver

SEARCH = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import tunemq as tune

FOLDER, KINDS, SHARE = Path({folder!r}), {kinds!r}, {share!r}
LEFT_BEHIND = (
    "import sys, time, torch; kept = torch.ones(2**28, device='cuda');"
    "print('ready', flush=True); time.sleep(3600)"
)

def age():
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")

def left_by_others():
    from tunemq_workers.gpu.drivers.nvml import open_driver
    return open_driver().memory_used(os.environ["CUDA_VISIBLE_DEVICES"])

def tell(config, **said):
    (FOLDER / ("trial_%02d" % config["n"])).write_text(json.dumps(said))

def train(config):
    kind, asked = KINDS[config["n"]], age()
    left = left_by_others()
    asking = age() - asked
    ones = torch.ones(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    tell(config, left=left, cuda_s=age() - asking)
    if kind == "leaks":
        line = [sys.executable, "-c", LEFT_BEHIND]
        child = subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
    elif kind == "killed":
        big = torch.ones(8192, 8192, device="cuda")
        for _ in range(200):
            big = big @ big
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "loads":
        data = DataLoader(TensorDataset(torch.ones(64, 1024)), batch_size=8, num_workers=2)
        assert sum(float((batch.to("cuda") @ ones).sum()) for (batch,) in data) > 0
    elif kind == "half":
        (FOLDER / ("met_%d" % config["n"])).touch()
        while len(list(FOLDER.glob("met_*"))) < 2:  # the other one, at the same time
            time.sleep(0.01)
        kept = torch.ones(2**28, device="cuda")
    torch.cuda.synchronize()
    tune.report({{"loss": 1.0}})

tuner = tune.Tuner(
    tune.with_resources(train, {{"cpu": 1, "gpu": SHARE}}),
    param_space={{"n": tune.grid_search(list(range(len(KINDS))))}},
    run_config=tune.RunConfig(preload=["torch"], verbose=1),
)
"""
FRESH = (
    "import torch, time; torch.ones(1024, 1024, device='cuda'); torch.cuda.synchronize();"
    "print(time.time())"
)
KINDS = ("plain", "leaks", "plain", "killed", "plain", "loads", "plain")
_TIMEOUT_S = 300.0


def why_not() -> str:
    """Why nothing can be measured here; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    driver = open_driver()
    if driver is None or not driver.physical():
        return "there is no GPU here"
    return ""


def fresh_interpreter() -> float:
    """Seconds from the start of an interpreter until CUDA is there."""
    began = time.time()
    said = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    return float(said.stdout) - began


def search(farm: ServedFarm, name: str, kinds: tuple[str, ...], share: float) -> list[Any]:
    """Run a search to its end; return its trials' results, in their order."""
    told = farm.folder / f"told-{name}"
    told.mkdir()
    code = farm.code(name, SEARCH.format(folder=str(told), kinds=kinds, share=share))
    farm.submit(name, code)
    wait_until(lambda: farm.rows()[name].state.is_over, _TIMEOUT_S)
    found = [json.loads(path.read_text()) for path in sorted(told.glob("trial_*"))]
    if len(found) != len(kinds):
        raise RuntimeError(f"{len(found)} of {len(kinds)} trials began: {farm.said()}")
    return found


def measure() -> dict[str, Any]:
    with served_farm() as farm:
        farm.start(4, worker=("--gpus", "1"))
        wholes = search(farm, "wholes", KINDS, 1.0)
        halves = search(farm, "halves", ("half", "half"), 0.5)
    first = wholes[0]["left"]
    return {
        "cuda_s": statistics.median(one["cuda_s"] for one in wholes[1:]),
        "fresh_s": statistics.median(fresh_interpreter() for _ in range(3)),
        "left_mib": max(one["left"] - first for one in wholes[1:]) / 2**20,
        "halves": len(halves),
        "why_not": "",
    }


if __name__ == "__main__":
    reason = why_not()
    if reason:
        tell({"why_not": reason})
    else:
        tell(measure())
