"""Trial processes that exceed their limits: the error messages, and the end of their trees."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

import tunemq as tune
from tests.integration.farm_support import is_alive, order
from tests.integration.node_fixtures import node, scheduler, server
from tests.support.journal_records import read_records
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit
from tests.support.waiting import eventually
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_shared.protocol.messages import (
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialProcessDied,
    TrialStarted,
)
from tunemq_shared.protocol.result_conditions import next_result
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_workers.processes.forkserver_messages import DUMP_SIGNAL

__all__ = ["ended_searches", "node", "scheduler", "server"]

pytestmark = pytest.mark.integration

#: The time to notice it, write the stacks, and kill processes that ignore SIGTERM; they would sleep
#: for longer.
ENDED_WITHIN_S = 120.0
#: The limit for trials that are to exceed it. Their first result has to come earlier, on a machine
#: with three other jobs.
SHORT_S = 4.0


def run(node, scheduler, trainable, **how):
    """Run a trial until it has failed and its process tree is gone; return the failure."""
    scheduler.assign(node.instance_id, order("t1", scheduler.start(trainable, **how)))
    eventually(lambda: scheduler.said(SlotFreed), within=ENDED_WITHIN_S, message=node.log)
    assert not scheduler.said(TrialProcessDied)
    (failed,) = scheduler.said(TrialFailed)
    return failed


def printed(scheduler, name="stderr"):
    return Path(scheduler.start(sleeps).folder, name).read_text()


def sleeps(config):
    import time

    from tunemq_shared.trial.session import report

    report({"x": 1})
    time.sleep(600)


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        (TrialLimitSpec(step_s=SHORT_S), "time_limit"),
        (TrialLimitSpec(stall_s=SHORT_S), "stalled"),
        (TrialLimitSpec(trial_s=SHORT_S), "trial_limit"),
    ],
)
def test_a_trial_that_takes_too_long_ends_and_its_stack_is_in_its_log(
    node, scheduler, limits, kind
):
    failed = run(node, scheduler, sleeps, limits=limits)

    assert failed.kind == kind
    assert "s, and its limit is" in failed.error
    assert len(scheduler.said(ResultReported)) == 1
    assert "most recent call first" in printed(scheduler)
    assert "in sleeps" in printed(scheduler)


def waits_in_a_call_that_a_signal_ends(config):
    import ctypes

    from tunemq_shared.trial.session import report

    report({"x": 1})
    ctypes.CDLL(None).sleep(600)  # returns early when any handler has run
    report({"x": 2})


def test_stalled_trial_whose_c_call_returns_at_the_signal_for_stacks_fails(node, scheduler):
    limits = TrialLimitSpec(stall_s=SHORT_S)
    failed = run(node, scheduler, waits_in_a_call_that_a_signal_ends, limits=limits)

    assert failed.kind == "stalled"
    assert len(scheduler.said(ResultReported)) == 1
    assert not scheduler.said(TrialFinished)
    assert "in waits_in_a_call_that_a_signal_ends" in printed(scheduler)


def holds_the_gil_and_every_signal(config):
    import contextlib
    import signal
    import threading

    from tunemq_shared.trial.session import report

    def waits():
        threading.Event().wait()

    threading.Thread(target=waits, daemon=True).start()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
        with contextlib.suppress(OSError):
            signal.signal(number, lambda *_: None)
    report({"x": 1})
    9 ** (9**9)


def test_stalled_trial_that_holds_the_gil_is_killed_with_all_its_stacks_logged(node, scheduler):
    failed = run(
        node, scheduler, holds_the_gil_and_every_signal, limits=TrialLimitSpec(stall_s=SHORT_S)
    )

    assert failed.kind == "stalled"
    stacks = printed(scheduler)
    assert "in holds_the_gil_and_every_signal" in stacks
    assert "in waits" in stacks


def takes_every_handler_there_is(config):
    import contextlib
    import signal
    import time

    from tunemq_shared.trial.session import report

    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, lambda *_: None)
    report({"x": 1})
    while True:
        time.sleep(600)


def test_stalled_trial_that_handles_the_stack_signal_is_killed_without_stacks(node, scheduler):
    limits = TrialLimitSpec(stall_s=SHORT_S)
    assert run(node, scheduler, takes_every_handler_there_is, limits=limits).kind == "stalled"


def ends_the_search(config):
    import signal
    import sys
    import time

    from tunemq_shared.trial.session import report

    def leave(*_):
        print("deregistration")
        sys.exit()

    signal.signal(signal.SIGTERM, leave)
    report({"x": 1})
    time.sleep(600)


def test_stalled_trial_that_cleans_up_at_sigterm_still_fails(node, scheduler):
    failed = run(
        node, scheduler, ends_the_search, limits=TrialLimitSpec(step_s=SHORT_S), reuse=True
    )

    assert failed.kind == "time_limit"
    assert printed(scheduler, "stdout") == "deregistration\n"
    assert not scheduler.said(TrialFinished)


def starts_a_process_tree_and_sleeps(config):
    import os
    import time

    from tunemq_shared.trial.session import report

    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, b"%d" % os.getpid())
        time.sleep(600)
    report({"grandchild": int(os.read(reading, 20))})
    time.sleep(600)


@pytest.mark.parity(128)
def test_process_tree_of_a_stalled_trial_is_gone_before_its_slot_is_free(node, scheduler):
    limits = TrialLimitSpec(step_s=SHORT_S)
    scheduler.assign(
        node.instance_id,
        order("t1", scheduler.start(starts_a_process_tree_and_sleeps, limits=limits)),
    )
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    grandchild = scheduler.said(ResultReported)[0].metrics["grandchild"]
    eventually(lambda: scheduler.said(SlotFreed), within=ENDED_WITHIN_S, message=node.log)
    assert not is_alive(grandchild)


def three_quick_steps(config):
    from tunemq_shared.trial.session import report

    for n in range(3):
        report({"x": n})


def test_time_that_a_trial_waits_at_its_horizon_does_not_count(node, scheduler):
    limits = TrialLimitSpec(step_s=SHORT_S, trial_s=SHORT_S + 2, stall_s=SHORT_S)
    start = scheduler.start(three_quick_steps, limits=limits)
    scheduler.assign(node.instance_id, order("t1", start, run_until=next_result(0)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    told_at = time.monotonic()
    eventually(lambda: time.monotonic() > told_at + SHORT_S + 1)
    scheduler.assign(node.instance_id, order("t1", start, run_until=next_result(1)))
    eventually(lambda: len(scheduler.said(ResultReported)) == 2, message=node.log)
    eventually(lambda: time.monotonic() > told_at + 2 * SHORT_S + 3)
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(SlotFreed), message=node.log)
    assert scheduler.said(TrialFinished)
    assert not scheduler.said(TrialFailed)


def stalls_behind_its_horizon(config):
    import time

    from tunemq_shared.trial.session import report

    report({"x": 1})
    time.sleep(600)


def test_time_limit_of_a_continued_trial_starts_at_the_order(node, scheduler):
    start = scheduler.start(stalls_behind_its_horizon, limits=TrialLimitSpec(step_s=SHORT_S))
    scheduler.assign(node.instance_id, order("t1", start, run_until=next_result(0)))
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    began = time.monotonic()
    eventually(lambda: time.monotonic() > began + SHORT_S + 1)
    assert not scheduler.said(TrialFailed)
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(SlotFreed), within=ENDED_WITHIN_S, message=node.log)
    (failed,) = scheduler.said(TrialFailed)
    assert failed.kind == "time_limit"


def test_time_spent_in_earlier_instances_counts(node, scheduler):
    limits = TrialLimitSpec(trial_s=1000.5)
    failed = run(node, scheduler, sleeps, limits=limits, time_spent_s=1000.0)
    assert failed.kind == "trial_limit"


MIB = 2**20


def children_hold_it_together(config):
    """Start three children in separate sessions, none of which holds too much memory."""
    import os
    import time

    from tunemq_shared.trial.session import report

    report({"x": 1})
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            held = b"x" * (80 << 20)
            time.sleep(600)
            print(len(held))
    time.sleep(600)


def test_memory_of_the_whole_process_tree_counts(node, scheduler):
    failed = run(
        node, scheduler, children_hold_it_together, limits=TrialLimitSpec(memory=200 * MIB)
    )
    assert failed.kind == "memory"
    assert "its limit is 200 MiB" in failed.error


def shares_what_it_holds(config):
    """Fork four children that share their parent's pages, and measure them once."""
    import os
    import time

    from tunemq_shared.trial.session import report

    held = b"x" * (100 << 20)
    for _ in range(4):
        if os.fork() == 0:
            time.sleep(600)
    for _ in range(30):
        time.sleep(0.05)
        report({"x": len(held)})


def maps_a_file(config):
    import mmap
    import os
    import time

    from tunemq_shared.trial.session import report

    with open("data", "wb") as file:
        file.writelines(b"x" * (1 << 20) for _ in range(300))
    with open("data", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        total = sum(data[at] for at in range(0, len(data), mmap.PAGESIZE))
        for _ in range(30):
            time.sleep(0.05)
            report({"x": total})
    os.unlink("data")


def shares_what_is_loaded(config):
    """Fork four children that fill a block of shared memory, as workers of a DataLoader do."""
    import multiprocessing
    import time
    from multiprocessing.shared_memory import SharedMemory

    from tunemq_shared.trial.session import report

    block = SharedMemory(create=True, size=120 << 20)

    def load(number):
        for at in range(0, block.size, 1 << 20):
            block.buf[at : at + (1 << 20)] = bytes([number]) * (1 << 20)
        time.sleep(600)

    context = multiprocessing.get_context("fork")
    for number in range(4):
        context.Process(target=load, args=(number,), daemon=True).start()
    for _ in range(30):
        time.sleep(0.05)
        report({"x": block.buf[0]})
    block.unlink()


def multiplies(config):
    """Fork children that fork children, sixty in all, in separate sessions."""
    import os
    import time

    from tunemq_shared.trial.session import report

    report({"x": 1})
    for _ in range(6):
        if os.fork() == 0:
            os.setsid()
            for _ in range(9):
                if os.fork() == 0:
                    os.setsid()
                    break
            break
    time.sleep(600)


def test_process_tree_with_too_many_processes_ends_with_its_limit_named(node, scheduler):
    failed = run(node, scheduler, multiplies, limits=TrialLimitSpec(processes=40))
    assert failed.kind == "processes"
    assert "processes, and its limit is 40 (TrialLimits(processes=...))" in failed.error


@pytest.mark.parametrize("trainable", [shares_what_it_holds, shares_what_is_loaded, maps_a_file])
def test_pages_that_are_shared_count_once_and_those_of_files_not_at_all(node, scheduler, trainable):
    start = scheduler.start(trainable, limits=TrialLimitSpec(memory=200 * MIB))
    scheduler.assign(node.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(SlotFreed), within=100, message=node.log)
    assert not scheduler.said(TrialFailed), scheduler.said(TrialFailed)
    assert scheduler.said(TrialFinished)


def test_stack_request_before_a_trial_process_is_ready_does_not_end_it(node, scheduler):
    scheduler.assign(
        node.instance_id,
        order("t1", scheduler.start(three_quick_steps)),
        order("t2", scheduler.start(sleeps, trial_number=2)),
    )
    eventually(lambda: len(scheduler.said(TrialStarted)) == 2, message=node.log)
    sleeper = next(one.pid for one in scheduler.said(TrialStarted) if one.trial == "t2")
    forkserver = Path(f"/proc/{node.forkserver_of(sleeper)}/status").read_text()
    ignored = int(forkserver.split("SigIgn:")[1].split()[0], 16)
    assert ignored & (1 << (DUMP_SIGNAL - 1))
    assert DUMP_SIGNAL not in {signal.SIGUSR1, signal.SIGUSR2}


class Struggles(tune.Trainable):
    """Fails in every sixth step of a process, and resumes from its last checkpoint."""

    def setup(self, config):
        self.steps = 0

    def step(self):
        time.sleep(0.1)
        self.steps += 1
        if self.steps > 5:
            raise ValueError("a bad day")
        return {"x": self.steps}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "x").touch()

    def load_checkpoint(self, checkpoint_dir):
        assert Path(checkpoint_dir, "x").exists()


def test_the_time_of_a_trial_runs_on_through_its_retries(ended_searches):
    (result,) = fit(
        Struggles, checkpoint_frequency=1, max_failures=-1, trial_limits=tune.TrialLimits(trial_s=6)
    )

    assert result.status == "ERROR"
    assert "its limit is 6 s (TrialLimits(trial_s=...))" in str(result.error)
    journal = Path(ended_searches[0].experiment.folder, FILE_NAME)
    events = [entry.event for entry in read_records(journal)]
    kinds = [event.kind for event in events if isinstance(event, TrialFailed)]
    assert kinds[-1] == "trial_limit"
    assert set(kinds[:-1]) == {"user"}  # earlier attempts failed, and their time counts
    # Each process before the last one did five steps, however many fitted into that time.
    assert result.metrics["time_total_s"] > 0.49 * (len(kinds) - 1)


def test_a_search_has_its_limits_from_tune_run_too():
    analysis = tune.run(
        sleeps,
        trial_limits=tune.TrialLimits(step_s=SHORT_S),
        raise_on_failed_trial=False,
        verbose=0,
    )

    (trial,) = analysis.trials
    assert trial.status == "ERROR"
