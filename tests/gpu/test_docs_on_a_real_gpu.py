"""What `docs/gpus.md` says, on a real GPU and with real libraries; skipped where there is none."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers.nvml import NvmlDriver, open_driver

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

GIB = 2**30
#: Runs a search, and prints what its trials came to.
SEARCH = """
import json, os, subprocess, sys, time
import tunemq as tune

{train}

tuner = tune.Tuner(
    tune.with_resources(train, {resources!r}),
    param_space={{"n": tune.grid_search(list(range({trials})))}},
    run_config=tune.RunConfig(
        name="search", verbose=1, failure_config=tune.FailureConfig({failures})
    ),
)
if __name__ == "__main__":
    results = tuner.fit()
    trials = [
        {{
            "error": str(result.error or ""),
            "metrics": {{k: v for k, v in (result.metrics or {{}}).items() if k in ("x", "left")}},
            "used": [
                {{name: getattr(use, name) for name in use.__struct_fields__}}
                for use in result.devices_used
            ],
            "path": result.path,
        }}
        for result in results
    ]
    print("TRIALS " + json.dumps(trials), flush=True)
"""
HOLDER = (
    "import sys, time, torch;"
    "kept = torch.ones(int(sys.argv[1]), dtype=torch.uint8, device='cuda');"
    "print('ready', flush=True); time.sleep(3600)"
)
#: Requests for more memory than any GPU has.
TOO_MUCH = {
    "torch": "    import torch\n    torch.ones(2**42, dtype=torch.uint8, device='cuda')",
    "cupy": "    import cupy\n    cupy.ones(2**42, dtype=cupy.uint8)",
    "jax": "    import jax.numpy as jnp\n    jnp.ones(2**42, dtype=jnp.uint8).block_until_ready()",
    "child": (
        "    line = 'import torch; torch.ones(2**42, dtype=torch.uint8, device=\"cuda\")'\n"
        "    subprocess.run([sys.executable, '-c', line], check=True)"
    ),
}
#: Faults of a program, after each of which its process can no longer use CUDA.
FAULTS = {
    "assertion": "    torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')].cpu()",
    "address": (
        "    import cupy\n"
        "    code = 'extern \"C\" __global__ void f(float* p) { p[1ull << 40] = 1; }'\n"
        "    kernel = cupy.RawKernel(code, 'f')\n"
        "    kernel((1,), (1,), (cupy.zeros(4, dtype=cupy.float32),))\n"
        "    cupy.cuda.Device().synchronize()"
    ),
}


@pytest.fixture(scope="module")
def driver() -> NvmlDriver:
    driver = open_driver()
    if driver is None or not driver.physical():
        pytest.skip("there is no GPU here")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    return driver


@pytest.fixture
def device(driver: NvmlDriver) -> Gpu:
    return driver.physical()[0].gpu


@contextmanager
def holding(memory: int) -> Iterator[int]:
    """Hold ``memory`` bytes of the GPU in a process of no farm; yield its pid."""
    line = [sys.executable, "-c", HOLDER, str(memory)]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


class Search:
    """A script with a search, which runs."""

    def __init__(
        self, folder: Path, train: str, resources: dict[str, float], trials: int, failures: str = ""
    ) -> None:
        script, self._said = folder / "script.py", folder / "said"
        script.write_text(
            SEARCH.format(train=train, resources=resources, trials=trials, failures=failures)
        )
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, str(script)], cwd=folder, stdout=said, stderr=said
            )

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def trials(self) -> list[dict[str, Any]]:
        """Wait for its end; return what each trial came to."""
        self._process.wait(timeout=240)
        said = self.said()
        print(said)
        assert "TRIALS " in said, said
        return json.loads(said.partition("TRIALS ")[2].splitlines()[0])


@pytest.mark.parametrize("library", TOO_MUCH)
def test_trial_without_enough_gpu_memory_fails_as_that_and_is_not_retried(
    tmp_path, driver, library
):
    module = "torch" if library == "child" else library
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    train = f"def train(config):\n{TOO_MUCH[library]}\n    tune.report({{'x': 1}})"
    search = Search(tmp_path, train, {"gpu": 1}, 1, "max_failures=3")
    (trial,) = search.trials()
    assert "out of GPU memory" in trial["error"]
    errors = (Path(trial["path"]) / "error.txt").read_text()
    assert errors.count("out of GPU memory") == 1, errors


def test_trial_that_lacked_memory_beside_another_one_gets_the_gpu_alone(tmp_path, driver):
    train = """
def train(config):
    import torch
    total = torch.cuda.mem_get_info()[1]
    kept = torch.ones(int(total * 0.6), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    time.sleep(5)
    tune.report({"x": 1})
"""
    search = Search(tmp_path, train, {"gpu": 0.5}, 2, 'retry_cuda_memory="alone"')
    assert [trial["error"] for trial in search.trials()] == ["", ""]


def test_use_of_a_gpu_is_reported(tmp_path, device):
    train = """
def train(config):
    import torch
    kept = torch.ones(4 * 2**30, dtype=torch.uint8, device="cuda")
    one, until = torch.ones(8192, 8192, device="cuda"), time.monotonic() + 12
    while time.monotonic() < until:
        one = (one @ one).clamp(0, 1)
        torch.cuda.synchronize()
    tune.report({"x": 1})
"""
    (trial,) = Search(tmp_path, train, {"gpu": 1}, 1).trials()
    (use,) = trial["used"]
    assert (use["uuid"], use["model"], use["share"]) == (device.uuid, device.model, 1)
    assert use["seconds"] > 10
    assert 4 * GIB < use["memory_peak"] < 8 * GIB
    assert 0.3 < use["utilisation"] <= 1
    assert use["energy_j"] > 10 * 60  # at least 60 W


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_program_ends_its_trial_and_the_gpu_is_used_again(tmp_path, driver, fault):
    if fault == "address" and importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    train = f"""
def train(config):
    import torch
    if config["n"] == 0:
{textwrap.indent(FAULTS[fault], "    ")}
    assert float(torch.ones(4, device="cuda").sum()) == 4
    tune.report({{"x": 1}})
"""
    search = Search(tmp_path, train, {"gpu": 1}, 2)
    failed, other = search.trials()
    assert failed["error"]
    assert not other["error"]
    assert "set aside" not in search.said()


def test_gpu_that_another_program_fills_is_set_aside_until_it_is_free(tmp_path, device):
    train = "def train(config):\n    tune.report({'x': 1})"
    with holding(int(device.memory // 4)) as pid:
        search = Search(tmp_path, train, {"gpu": 1}, 1)
        eventually(lambda: f"not of this farm: process {pid}" in search.said(), within=60)
        assert "TRIALS" not in search.said()
    (trial,) = search.trials()
    assert not trial["error"]


def test_memory_that_a_trial_left_in_another_session_is_free_for_the_next_trial(tmp_path, device):
    train = f"""
def train(config):
    from tunemq_workers.gpu.drivers.nvml import open_driver
    left = open_driver().memory_used(os.environ["CUDA_VISIBLE_DEVICES"])
    line = [sys.executable, "-c", {HOLDER!r}, str(20 * 2**30)]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    tune.report({{"left": left}})
"""
    trials = Search(tmp_path, train, {"gpu": 1}, 3).trials()
    assert all(trial["metrics"]["left"] < 2 * GIB for trial in trials)


def test_trial_without_a_gpu_sees_none(tmp_path, driver):
    train = """
def train(config):
    import torch
    tune.report({"x": torch.cuda.device_count()})
"""
    (trial,) = Search(tmp_path, train, {"cpu": 1}, 1).trials()
    assert trial["metrics"]["x"] == 0


def test_driver_reports_a_program_that_computes_and_its_memory(device, driver):
    with holding(2 * GIB) as pid:
        (found,) = (one for one in driver.holders(device.uuid) if one.pid == pid)
        assert found.memory is None or 2 * GIB < found.memory < 4 * GIB
        assert driver.memory_used(device.uuid) > 2 * GIB


def test_driver_reports_a_programs_fault_as_an_xid_that_condemns_no_gpu(device, driver):
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    driver.xids(0.1)  # it reports what happens from here on
    line = textwrap.dedent(FAULTS["address"])
    subprocess.run([sys.executable, "-c", line], capture_output=True, check=False)
    found = driver.xids(5)
    print(found)
    assert {xid.number for xid in found} & {13, 31}
    assert {xid.uuid for xid in found} == {device.uuid}
    assert driver.health() == {}
