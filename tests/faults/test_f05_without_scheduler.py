"""F05, F06: Redis is killed, stopped or wiped while the farm's scheduler is dead."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.waiting import eventually
from tunemq_scheduler.storage.last_run import read_record
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.slow]

AOF = ("--appendonly", "yes", "--appendfsync", "everysec")
#: A new command runs on every node this soon after Redis *and* a scheduler are back; the second
#: limit is for a busy machine. The experiment process has to start, too.
BACK_WITHIN_S, BACK_AT_LAST_S = 5.0, 60.0
#: A stopper that checks every result makes every step wait for a command.
LOCK_STEP = "def stops_nothing(trial_id, result):\n    return False\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., FarmService]]:
    """Return a function that starts a farm of ``workers``, with one trial per worker.

    The trials wait for a command at each step. They stop behind step 6 until the test has prepared
    its fault and opens their gate.
    """
    with contextlib.ExitStack() as farms:

        def make(workers: int, steps: int, redis: tuple[str, ...] = ()) -> FarmService:
            farm = farms.enter_context(farm_service(tmp_path, redis_options=redis))
            for number in range(workers):
                farm.add_worker(f"w{number}", 1)
            farm.submit(
                Search(
                    name="search",
                    trials=workers,
                    steps=steps,
                    step_s=0.05,
                    save_every=1000,
                    failures=0,
                    has_gate=True,
                    code=LOCK_STEP,
                    run="stop=stops_nothing,",
                )
            )
            farm.open_gate("search", 6)
            farm.wait_for_steps("search", workers, 3)
            return farm

        yield make


def holds_the_farm(farm: FarmService) -> bool:
    """Return whether the newest scheduler process holds the lease."""
    about = farm.redis.client.get(redis_keys.SCHEDULER) or b""
    return about.startswith(b"%s:" % (farm.redis.client.get(redis_keys.TERM) or b"none")) and (
        f'"pid":{farm.scheduler.pid}'.encode() in about.replace(b" ", b"")
    )


def continues(farm: FarmService) -> float:
    """Start a scheduler; return the seconds until a command has run on every node.

    The time counts from when the scheduler holds the farm, because its interpreter loads our
    modules before that. The gate keeps the trials from finishing: an experiment can finish without
    the farm.
    """
    before = {number: len(done) for number, done in farm.steps("search").items()}
    farm.start_scheduler()
    eventually(lambda: holds_the_farm(farm), within=60, message=lambda: str(farm))
    since = time.monotonic()
    eventually(
        # A command from before the fault may have been under way.
        lambda: all(len(done) >= before[one] + 2 for one, done in farm.steps("search").items()),
        within=BACK_AT_LAST_S,
        message=lambda: f"{before} {farm.steps('search')}{farm}",
    )
    return time.monotonic() - since


def wait_for_silence(farm: FarmService, quiet_s: float = 0.5) -> None:
    """Wait until no trial has executed a step for this long."""
    last, since = farm.steps("search"), time.monotonic()

    def is_silent() -> bool:
        nonlocal last, since
        if (now := farm.steps("search")) != last:
            last, since = now, time.monotonic()
        return time.monotonic() > since + quiet_s

    eventually(is_silent, message=lambda: str(farm))


def kill(farm: FarmService) -> None:
    """Kill Redis."""
    farm.redis.client.close()
    farm.redis.process.kill()
    farm.redis.process.wait()


def fail(farm: FarmService, how: str, away_s: float) -> None:
    """Take Redis away for this many seconds."""
    redis = farm.redis
    if how == "wiped":
        redis.client.flushall()
        redis.process.send_signal(signal.SIGSTOP)
    else:
        kill(farm)
    time.sleep(away_s)  # the test is about the length of the outage
    if how == "wiped":
        redis.process.send_signal(signal.SIGCONT)
        redis.client.flushall()
        eventually(redis.answers)
    else:
        redis.start()


def ends_well(farm: FarmService, within: float = 60.0) -> None:
    """Wait for the end of the experiment; check that no result is missing, doubled or repeated."""
    farm.wait_for("search", "FINISHED", within)
    farm.check_results("search")
    farm.check_steps("search")
    strange = farm.events("search", m.TrialProcessDied) + farm.events("search", m.NodeLost)
    assert not strange, f"{strange}{farm}"


def test_f05_redis_killed_without_a_scheduler_loses_nothing(start):
    farm = start(workers=2, steps=30)
    farm.kill_scheduler()
    farm.open_gate("search", 12)
    fail(farm, "data lost", 0.5)
    print(f"a command ran after {continues(farm):.2f} s")
    farm.open_gate("search", 30)
    ends_well(farm)


def test_f05_redis_that_lost_its_last_second_without_a_scheduler_is_noticed(start):
    farm = start(workers=1, steps=25, redis=AOF)
    stream = read_record(str(farm.results / "search")).events_key
    farm.scheduler.send_signal(signal.SIGSTOP)
    farm.open_gate("search", 12)
    wait_for_silence(farm)  # no scheduler reads the last result or orders another step
    eventually(lambda: farm.redis.client.xlen(stream), message=lambda: str(farm))
    farm.kill_scheduler()
    kill(farm)
    kept = farm.folder / "appendonly.aof"
    os.truncate(kept, kept.read_bytes().rindex(b"XADD"))
    farm.redis.start()
    continues(farm)
    farm.open_gate("search", 25)
    ends_well(farm)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("away_s", [1.0, 5.0, 33.0])
@pytest.mark.parametrize("how", ["data lost", "data kept", "wiped"])
def test_f05_ten_outages_without_a_scheduler_lose_nothing(start, how, away_s):
    chance = random.Random(f"{how} {away_s}")
    farm = start(workers=3, steps=400, redis=AOF if how == "data kept" else ())
    took = []
    for _ in range(10):
        time.sleep(chance.uniform(0, 0.5))  # the fault comes at a random moment
        farm.kill_scheduler()
        # Limit the steps of each round, so that steps remain after ten rounds on a slow machine.
        farm.open_gate("search", max(map(len, farm.steps("search").values())) + 35)
        time.sleep(chance.uniform(0, 0.5))
        fail(farm, how, away_s)
        took.append(continues(farm))
    farm.open_gate("search", 400)
    print(f"{how}, away for {away_s} s: a command ran after {sorted(took)}")
    ends_well(farm, 300)
    assert max(took) < BACK_WITHIN_S, sorted(took)
