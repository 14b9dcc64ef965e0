"""GPUs that several nodes of a machine offer; each node holds one only while it uses it."""

from __future__ import annotations

import fcntl
import os
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.leases import leased
from tests.unit.workers.fake_gpu_node import GIB, Gpus
from tests.unit.workers.gpu.test_gpu_admission import GpuNode, on
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.messages import Gpu, SlotFreed, TrialPaused
from tunemq_workers.gpu import gpu_locks
from tunemq_workers.gpu.gpu_admission import GIVE_BACK_AFTER_S
from tunemq_workers.gpu.gpu_availability import GIVE_BACK_IDLE_AFTER_S
from tunemq_workers.gpu.gpu_locks import GpuLocks, take_gpus

USED = f"used by process {os.getpid()} (other)"


@pytest.fixture
def other(tmp_path):
    """The locks of another node."""
    return GpuLocks("other", str(tmp_path))


@pytest.fixture
def locks(tmp_path):
    return GpuLocks("me", str(tmp_path))


@pytest.fixture
def gpus(locks):
    gpus = Gpus("A", "B", locks=locks)
    gpus.snapshot()
    return gpus


def starts_on(gpus, *uuids):
    """Claim devices, take a snapshot and return whether a trial process may be forked there."""
    gpus.availability.claim(uuids)
    gpus.snapshot()
    return gpus.is_clear(*uuids)


def pass_time(gpus, seconds):
    for _ in range(round(seconds * 10)):
        gpus.clock.advance(0.1)
        gpus.snapshot()


# --- locks ----------------------------------------------------------------------------------------


def test_device_belongs_to_one_node_until_it_gives_it_back(locks, other):
    assert other.take("A") == ""
    assert (other.has("A"), locks.has("A")) == (True, False)
    assert locks.take("A") == locks.user("A") == USED
    assert other.user("A") == other.take("A") == ""
    other.give_back("A")
    assert locks.user("A") == ""
    assert locks.take("A") == ""
    assert other.user("A") == f"used by process {os.getpid()} (me)"


def test_worker_is_told_which_process_uses_the_device_to_offer(tmp_path, other):
    other.take("B")
    with pytest.raises(
        ConfigError, match=r"GPU B cannot be offered: used by process \d+ \(other\)"
    ):
        take_gpus([Gpu("A"), Gpu("B")], "worker me", str(tmp_path))
    other.give_back("B")
    take_gpus([Gpu("A"), Gpu("B")], "worker me", str(tmp_path)).give_back_all()


def test_node_that_only_checks_a_lock_is_waited_for(locks, other, tmp_path, monkeypatch):
    other.take("A")
    other.give_back("A")
    looking = os.open(tmp_path / "tunemq-gpu-A.lock", os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_SH)
    assert other.user("A") == ""
    monkeypatch.setattr(gpu_locks.time, "sleep", lambda _: os.close(looking))
    assert locks.take("A") == ""


def test_device_that_cannot_be_locked_belongs_to_no_node(locks, tmp_path):
    (tmp_path / "tunemq-gpu-A.lock").symlink_to(tmp_path / "precious")
    assert "cannot be locked" in locks.user("A")
    assert "cannot be locked" in locks.take("A")
    assert not locks.has("A")


def test_gpu_whose_lock_file_has_a_lease_cannot_be_locked(locks, tmp_path):
    with leased(tmp_path / "tunemq-gpu-A.lock"):
        assert "cannot be locked" in locks.user("A")
        assert "cannot be locked" in locks.take("A")
    assert locks.take("A") == ""


def folder_of(*folders):
    """Return the folder for locks, given these candidates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_locks, "FOLDERS", tuple(map(str, folders)))
        return gpu_locks._folder()


def test_locks_are_in_a_folder_for_all_users(tmp_path, monkeypatch):
    one, two, last = (tmp_path / name for name in ("one", "two", "last"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert folder_of(one, two, last) == str(last), "none is there"
    two.mkdir()
    two.chmod(0o755)  # root may write there, other users may not
    assert folder_of(one, two, last) == str(last)
    two.chmod(0o777)  # any user could remove another one's lock
    assert folder_of(one, two, last) == str(last)
    two.chmod(0o1777)
    assert folder_of(one, two, last) == str(two)
    one.mkdir()
    one.chmod(0o1777)
    assert folder_of(one, two, last) == str(one)


# --- availability ---------------------------------------------------------------------------------


def test_device_is_locked_from_a_trials_start_until_it_was_idle_for_a_while(gpus, other):
    assert other.user("A") == ""
    gpus.availability.claim(["A"])
    assert other.user("A")
    assert not gpus.is_clear("A"), "no snapshot has shown the remaining memory"
    gpus.snapshot()
    process = gpus.process(100, "A")
    pass_time(gpus, 5)
    gpus.end(process)
    pass_time(gpus, GIVE_BACK_IDLE_AFTER_S - 0.2)
    assert other.user("A")
    pass_time(gpus, 0.4)
    assert (other.user("A"), other.user("B")) == ("", "")
    assert gpus.withheld == []


def test_trial_that_comes_soon_finds_the_device_still_locked(gpus, other):
    assert starts_on(gpus, "A")
    gpus.end(gpus.process(100, "A"))
    gpus.snapshot()
    assert gpus.is_clear("A")
    gpus.process(101, "A")
    pass_time(gpus, 3 * GIVE_BACK_IDLE_AFTER_S)
    assert other.user("A")


def test_device_whose_memory_is_not_free_is_not_given_back(gpus, other):
    assert starts_on(gpus, "A")
    process = gpus.process(100, "A")
    gpus.held["A"][100] = 30 * GIB
    gpus.snapshot()
    gpus.end(process, keeps=True)
    pass_time(gpus, 3 * GIVE_BACK_IDLE_AFTER_S)
    assert other.user("A")
    gpus.held["A"].clear()
    pass_time(gpus, GIVE_BACK_IDLE_AFTER_S + 0.2)
    assert other.user("A") == ""


def test_trial_on_two_devices_starts_even_if_snapshots_are_slow(gpus, locks):
    def ask():  # as the admission does after each change
        gpus.availability.claim(["A", "B"])

    gpus.lost["B"] = 20 * GIB
    gpus.availability.on_change = ask
    ask()
    for number in range(6):
        gpus.lost["B"] = 20 * GIB if number == 0 else 0
        asked_at = gpus.clock.now
        for _ in range(15):
            gpus.clock.advance(0.1)
        gpus.snapshot(asked_at=asked_at)
        if gpus.is_clear("A", "B"):
            break
        for _ in range(round(gpus.looks_due[-1] * 10)):
            gpus.clock.advance(0.1)
    assert gpus.is_clear("A", "B")
    assert (locks.has("A"), locks.has("B")) == (True, True)


def test_device_in_use_by_another_node_is_withheld_until_it_is_free(gpus, other):
    other.take("A")
    gpus.held["A"][7] = 60 * GIB
    gpus.snapshot()
    assert gpus.withheld == [{"A": USED}]
    assert gpus.availability.obstacle(["A"]).is_withheld
    assert starts_on(gpus, "B")
    gpus.held["A"].clear()
    other.give_back("A")
    gpus.clock.advance(1.0)
    assert gpus.withheld == [{"A": USED}, {}]
    assert starts_on(gpus, "A")
    assert gpus.availability.foreign == {}


def test_device_taken_unseen_by_another_node_is_withheld_when_a_trial_starts_there(gpus, other):
    other.take("A")
    gpus.availability.claim(["A"])
    assert gpus.withheld == [{"A": USED}]
    assert gpus.why("A") == f"GPU A: {USED}"


def test_node_takes_all_or_none_of_several_devices(gpus, locks, other):
    other.take("B")
    gpus.availability.claim(["A", "B"])
    assert other.user("A") == ""
    other.give_back("B")
    gpus.clock.advance(1.0)
    assert starts_on(gpus, "A", "B")
    assert (locks.has("A"), locks.has("B")) == (True, True)


def test_leftover_memory_of_a_process_is_waited_for(gpus, other):
    other.take("A")
    gpus.snapshot()
    other.give_back("A")
    gpus.lost["A"] = 20 * GIB
    gpus.clock.advance(1.0)
    assert not starts_on(gpus, "A")
    assert "memory not released" in gpus.why("A")
    gpus.lost["A"] = 0
    assert starts_on(gpus, "A")


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from((("A",), ("B",), ("A", "B"), None)),
            st.sampled_from((0.0, 0.5, 1.5)),
        ),
        max_size=25,
    )
)
@settings(max_examples=25, deadline=None)
def test_no_device_ever_has_processes_of_two_nodes_and_no_trial_waits_for_ever(steps):
    with tempfile.TemporaryDirectory() as folder:
        nodes = [Gpus("A", "B", locks=GpuLocks(name, folder)) for name in ("one", "two")]
        processes = [[], []]
        for number, (which, uuids, seconds) in enumerate(steps):
            gpus, mine = nodes[which], processes[which]
            if uuids is None:
                if mine:
                    gpus.end(mine.pop())
            elif starts_on(gpus, *uuids):
                theirs = {
                    uuid for process in processes[1 - which] for uuid in process.start.devices
                }
                assert theirs.isdisjoint(uuids)
                mine.append(gpus.process(100 + number, *uuids))
            for one in nodes:
                pass_time(one, seconds)
        for gpus, mine in zip(nodes, processes, strict=True):
            while mine:
                gpus.end(mine.pop())
            pass_time(gpus, GIVE_BACK_IDLE_AFTER_S + 0.2)
        for gpus in nodes:
            pass_time(gpus, 1.2)  # it takes another snapshot
            assert starts_on(gpus, "A", "B")
            pass_time(gpus, GIVE_BACK_IDLE_AFTER_S + 0.2)


# --- admission ------------------------------------------------------------------------------------


def test_trial_on_a_device_taken_unseen_by_another_node_is_given_back(locks, other):
    node = GpuNode(locks)
    node.gpus.snapshot()
    other.take("A")
    node.want(on("t1", "A"))
    node.pass_time(GIVE_BACK_AFTER_S + 0.2)
    assert [type(event) for event in node.events][-2:] == [TrialPaused, SlotFreed]
    assert node.started == []
    other.give_back("A")
    node.pass_time(1.2)
    node.want(on("t2", "A"))
    node.gpus.snapshot()
    assert other.user("A")
    assert node.started == ["t2"]
