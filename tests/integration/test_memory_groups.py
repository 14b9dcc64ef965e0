"""Memory limits of trials that the kernel enforces: real control groups, real allocators."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.farm_support import Node, RedisServer, Scheduler, is_alive, order
from tests.integration.node_fixtures import scheduler, server
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import (
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialFinished,
    TrialProcessDied,
    TrialStarted,
)
from tunemq_shared.protocol.trial_limits import TrialLimitSpec

__all__ = ["open_folder", "scheduler", "server"]

pytestmark = pytest.mark.integration

MIB = 2**20
LIMIT = TrialLimitSpec(memory=300 * MIB)
#: Pages that the kernel had already assigned to processors when the limit was reached.
SMALL = 2 * MIB


def is_v1() -> bool:
    """Return whether version 1 of control groups limits the memory."""
    return Path("/sys/fs/cgroup/memory/cgroup.procs").exists()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A control group as a service manager gives one to a node."""
    above = Path("/sys/fs/cgroup")
    if is_v1():
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        (own,) = [line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"]
        above = Path(f"/sys/fs/cgroup/memory{own}")
    group = above / f"tests-of-tunemq-{os.getpid()}"
    try:
        group.mkdir()
        if not is_v1():
            (above / "cgroup.subtree_control").write_text("+memory")
            os.setxattr(group, "user.delegate", b"1")
    except OSError as problem:  # a container, or not root
        pytest.skip(f"no control group can be made below {above}: {problem.strerror}")
    yield group
    eventually(lambda: not (group / "cgroup.procs").read_text(), message="processes are left")
    left = sorted(group.rglob("tunemq-*"))
    for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
        folder.rmdir()
    group.rmdir()
    assert left == []


class GroupedNode(Node):
    """A node that begins in a control group."""

    def __init__(
        self,
        server: RedisServer,
        scheduler: Scheduler,
        folder: Path,
        group: Path,
        *more: str,
        before: Sequence[str] = (),
    ) -> None:
        self.group = group
        entering = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        super().__init__(server, scheduler, folder, *more, before=[*entering, *before])

    def groups(self) -> list[Path]:
        """Return the control groups of its trials."""
        return sorted(self.group.glob(f"tunemq-{self.process.pid}-*/h*"))


@pytest.fixture
def node(
    server: RedisServer, scheduler: Scheduler, tmp_path: Path, group: Path
) -> Iterator[GroupedNode]:
    node = GroupedNode(server, scheduler, tmp_path / "node", group)
    yield node
    node.end()


def peak_of(group: Path) -> int:
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return 0


def run(node: GroupedNode, scheduler: Scheduler, trainable, trial="t1", **how):
    """Run a trial to its end; return its failure, if any, and its peak memory."""
    peaks = [0]
    scheduler.assign(node.instance_id, order(trial, scheduler.start(trainable, **how)))

    def is_over():
        for group in node.groups():
            try:
                peaks.append(peak_of(group))
            except OSError:
                continue  # it has just been removed
        return scheduler.said(SlotFreed)

    eventually(is_over, within=60, every=0.001, message=node.log)
    assert not scheduler.said(TrialProcessDied)
    failed = scheduler.said(TrialFailed)
    return (failed[0] if failed else None), max(peaks)


def takes_two_gib(config):
    import mmap

    from tunemq_shared.trial.session import report

    report({"x": 1})
    block = mmap.mmap(-1, 2 << 30)
    block.write(b"x" * (1 << 20) * 100)
    for at in range(0, len(block), mmap.PAGESIZE):
        block[at] = 1
    report({"x": 2})


def counts(config):
    import time

    from tunemq_shared.trial.session import report

    for n in range(100_000):
        report({"n": n})
        time.sleep(0.02)


def test_a_trial_that_allocates_fast_never_holds_more_than_its_limit(node, scheduler):
    failed, peak = run(node, scheduler, takes_two_gib, limits=LIMIT)

    assert failed.kind == "memory"
    assert "its limit is 300 MiB (TrialLimits(memory=...))" in failed.error
    assert 250 * MIB < peak <= LIMIT.memory + SMALL
    assert len(scheduler.said(ResultReported)) <= 1
    assert node.groups() == []
    assert "memory.grouped" in node.log()


def test_trial_over_its_memory_limit_does_not_disturb_its_neighbours(node, scheduler):
    start = {"limits": LIMIT, "trial_number": 2}
    neighbour = order("n", scheduler.start(counts, **start))
    scheduler.assign(node.instance_id, neighbour)
    eventually(lambda: scheduler.said(ResultReported), message=node.log)
    greedy = order("t1", scheduler.start(takes_two_gib, limits=LIMIT))
    scheduler.assign(node.instance_id, neighbour, greedy)
    eventually(lambda: scheduler.said(SlotFreed), within=60, message=node.log)

    (failed,) = scheduler.said(TrialFailed)
    assert (failed.trial, failed.kind) == ("t1", "memory")
    told = len(scheduler.said(ResultReported))
    eventually(lambda: len(scheduler.said(ResultReported)) > told + 20, message=node.log)
    assert len(node.groups()) == 1


def has_a_greedy_child(config):
    import multiprocessing
    import os
    import time
    from pathlib import Path

    def takes():
        os.setsid()
        bytearray(2 << 30)
        held = b"x" * (2 << 30)
        print(len(held))

    context = multiprocessing.get_context("fork")
    child = context.Process(target=takes)
    idle = context.Process(target=time.sleep, args=(600,))
    idle.start()
    Path("idle").write_text(str(idle.pid))
    child.start()
    child.join()
    if config["raises"]:
        raise RuntimeError(f"a child ended with {child.exitcode}")
    time.sleep(600)


@pytest.mark.parametrize("raises", [True, False])
def test_a_trial_whose_child_exceeds_the_memory_ends_with_all_its_processes(
    node, scheduler, raises
):
    config = {"raises": raises}
    failed, peak = run(node, scheduler, has_a_greedy_child, config=config, limits=LIMIT)

    assert failed.kind == "memory", failed
    assert "its limit is 300 MiB" in failed.error
    assert peak <= LIMIT.memory + SMALL
    folder = Path(scheduler.start(counts).folder)
    assert not is_alive(int((folder / "idle").read_text()))
    assert node.groups() == []


def where_am_i(config):
    from pathlib import Path

    from tunemq_shared.trial.session import report

    report({"groups": Path("/proc/self/cgroup").read_text()})


def test_a_trial_without_a_memory_limit_gets_no_group(node, scheduler):
    failed, _ = run(node, scheduler, where_am_i, limits=TrialLimitSpec(trial_s=500))
    assert failed is None
    assert "/h1" not in scheduler.said(ResultReported)[0].metrics["groups"]
    assert "memory." not in node.log()


def reports_thrice(config):
    from tunemq_shared.trial.session import report

    for n in range(3):
        report({"n": n})


def test_trial_within_its_limit_finishes_and_its_group_is_removed(node, scheduler):
    failed, _ = run(node, scheduler, reports_thrice, limits=LIMIT)
    assert failed is None
    assert scheduler.said(TrialFinished)
    assert node.groups() == []


def reads_and_writes_files(config):
    import os

    from tunemq_shared.trial.session import report

    for n in range(3):
        with open("data", "wb") as file:
            file.writelines(b"x" * (1 << 20) for _ in range(500))
            os.fsync(file.fileno())
        with open("data", "rb") as file:
            while file.read(1 << 20):
                pass
        report({"n": n})
    os.unlink("data")


def test_files_that_a_trial_reads_and_writes_do_not_count_against_its_memory(node, scheduler):
    failed, peak = run(node, scheduler, reads_and_writes_files, limits=LIMIT)
    assert failed is None
    assert peak <= LIMIT.memory + SMALL


def test_groups_of_a_killed_node_are_removed_when_the_next_node_starts_a_trial(
    server, scheduler, tmp_path, group
):
    first = GroupedNode(server, scheduler, tmp_path / "first", group)
    try:
        scheduler.assign(first.instance_id, order("t1", scheduler.start(counts, limits=LIMIT)))
        eventually(lambda: scheduler.said(ResultReported), message=first.log)
        first.process.send_signal(signal.SIGKILL)
    finally:
        first.end()
    (left,) = first.groups()
    (trial,) = {one.pid for one in scheduler.said(TrialStarted)}
    eventually(lambda: not is_alive(trial))
    if not is_v1():  # a service manager that restarts a service makes a new group
        eventually(lambda: not (left / "cgroup.procs").read_text())
        for folder in (left, left.parent / "node", left.parent):
            folder.rmdir()
        return
    second = GroupedNode(server, scheduler, tmp_path / "second", group)
    try:
        scheduler.assign(second.instance_id, order("t2", scheduler.start(counts, limits=LIMIT)))
        eventually(second.groups, message=second.log)
        assert not left.parent.exists()
    finally:
        second.end()


def raises_its_limit(config):
    from pathlib import Path

    from tunemq_shared.trial.session import report

    (line,) = [
        line
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.split(":")[1] in config["controllers"]
    ]
    group = Path(config["root"] + line.split(":", 2)[2])
    assert group.name == "h1", group
    rejected = {}
    limits = ("memory.limit_in_bytes", "memory.max", "memory.oom_control", "memory.oom.group")
    for file in [*(group / name for name in limits), group.parent / "cgroup.procs"]:
        if file.exists():
            for mode in ("w", "r+"):
                try:
                    with file.open(mode) as opened:
                        opened.write("0")
                    rejected[file.name] = "written"
                except OSError as error:
                    rejected.setdefault(file.name, error.strerror)
    try:
        (group / "own").mkdir()
        rejected["mkdir"] = "made"
    except OSError as error:
        rejected["mkdir"] = error.strerror
    report({"rejected": rejected})


@pytest.fixture
def guarded(
    server: RedisServer, scheduler: Scheduler, open_folder: Path, group: Path
) -> Iterator[GroupedNode]:
    user = ("--trial-user", f"{NOBODY}:{NOBODY}")
    folder = open_folder / "node"
    node = GroupedNode(server, scheduler, folder, group, *user, before=reachable())
    yield node
    node.end()


def test_a_trial_of_another_user_cannot_raise_its_limit(guarded, server, open_folder):
    scheduler = Scheduler(server, open_folder)
    config = {
        "root": "/sys/fs/cgroup/memory" if is_v1() else "/sys/fs/cgroup",
        "controllers": ["memory"] if is_v1() else [""],
    }
    folder = open_folder / "trial"
    folder.mkdir()
    start = scheduler.start(raises_its_limit, config, folder=str(folder), limits=LIMIT)
    code = Path(start.code.path)
    for path in (code, code.parent, folder):
        os.chown(path, NOBODY, NOBODY)
    scheduler.assign(guarded.instance_id, order("t1", start))
    eventually(lambda: scheduler.said(SlotFreed), within=60, message=guarded.log)

    assert not scheduler.said(TrialFailed), scheduler.said(TrialFailed)
    rejected = scheduler.said(ResultReported)[0].metrics["rejected"]
    assert len(rejected) >= 4
    assert set(rejected.values()) == {"Permission denied"}


def test_node_without_cgroup_rights_polls_memory_and_says_so_once(
    server, scheduler, tmp_path, group
):
    if is_v1():
        pytest.skip("who may write there may divide it")
    os.removexattr(group, "user.delegate")
    node = GroupedNode(server, scheduler, tmp_path / "node", group)
    try:
        failed, _ = run(node, scheduler, takes_two_gib, limits=LIMIT)
        assert failed.kind == "memory"
        assert node.log().count("memory.polled") == 1
        assert "is not delegated to the worker" in node.log()
    finally:
        node.end()
