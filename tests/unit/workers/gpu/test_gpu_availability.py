"""When a GPU may be used again, and why it is withheld."""

from __future__ import annotations

import os

import pytest

from tests.unit.workers.fake_gpu_node import GIB, MIB, STRANGER, Gpus
from tunemq_workers.gpu.drivers.gpu_types import GpuProcess
from tunemq_workers.gpu.gpu_availability import GIVEN_BACK_WITHIN_S, SILENT_FOR_S
from tunemq_workers.gpu.gpu_snapshots import look_at


@pytest.fixture
def gpus():
    gpus = Gpus("A", "B")
    gpus.snapshot()
    return gpus


def test_no_process_is_forked_before_the_first_snapshot():
    gpus = Gpus("A")
    assert not gpus.is_clear("A")
    gpus.snapshot()
    assert gpus.is_clear("A")
    assert gpus.changes == 1


def test_devices_without_identity_are_ignored(gpus):
    gpus.end(gpus.process(10, "0", "1"))
    assert gpus.is_clear("0", "1")


# --- freed memory ---------------------------------------------------------------------------------


def test_device_is_clear_again_when_its_memory_is_free(gpus):
    process = gpus.process(10, "A")
    gpus.held["A"][10] = 40 * GIB
    gpus.clock.advance(5)
    gpus.snapshot()
    assert gpus.is_clear("A")  # the scheduler counts running trials
    gpus.end(process, keeps=True)
    assert gpus.looks_due[-1] == 0.0
    gpus.snapshot()
    assert gpus.why("A") == "GPU A: memory not released: process 10 (python) holds 40 GiB"
    assert gpus.is_clear("B")
    gpus.held["A"].clear()
    gpus.clock.advance(0.1)
    gpus.snapshot()
    assert gpus.is_clear("A", "B")
    assert gpus.withheld == []


def test_snapshot_that_began_before_the_process_ended_is_ignored(gpus):
    process = gpus.process(10, "A")
    asked_at = gpus.clock.now
    gpus.clock.advance(1)
    gpus.end(process)
    gpus.snapshot(asked_at=asked_at)
    assert not gpus.is_clear("A")
    gpus.snapshot()
    assert gpus.is_clear("A")


def test_small_increase_is_not_memory_that_is_kept(gpus):
    for more, is_clear in ((1.5 * GIB, True), (1.7 * GIB, False)):  # 2 % of it are 1.6 GiB
        process = gpus.process(10, "A")
        gpus.end(process)
        gpus.lost["A"] = more
        gpus.snapshot()
        assert gpus.is_clear("A") is is_clear
        gpus.lost["A"] = 0
        gpus.snapshot()
        assert gpus.is_clear("A")


def test_memory_kept_in_small_amounts_adds_up(gpus):
    for number in range(5):
        gpus.end(gpus.process(10 + number, "A"))
        gpus.lost["A"] += 500 * MIB
        gpus.snapshot()
    assert not gpus.is_clear("A")


def test_snapshots_are_frequent_at_first_and_then_rare(gpus):
    gpus.end(gpus.process(10, "A"))
    gpus.lost["A"] = 10 * GIB
    pauses = []
    while gpus.clock.now < GIVEN_BACK_WITHIN_S + 10:
        gpus.snapshot()
        pauses.append(gpus.looks_due[-1])
        gpus.clock.advance(pauses[-1])
    assert pauses[0] == 0.1
    assert pauses == sorted(pauses)
    assert set(pauses[-2:]) == {3.0}
    assert len(pauses) < 40


def test_device_whose_memory_is_not_freed_is_withheld_until_it_is(gpus):
    process = gpus.process(10, "A")
    gpus.held["A"] |= {10: 3 * GIB, 11: 512 * MIB}
    gpus.parents[11] = 10
    gpus.snapshot()
    del gpus.parents[11]
    gpus.end(process, keeps=True)
    gpus.snapshot()
    gpus.clock.advance(GIVEN_BACK_WITHIN_S - 0.1)
    assert gpus.withheld == []
    gpus.clock.advance(0.2)
    why = "memory not released: process 10 (python) holds 3 GiB, process 11 (python) holds 512 MiB"
    assert gpus.withheld == [{"A": why}]
    assert gpus.availability.obstacle(["A"]).is_withheld
    gpus.held["A"][10] = 2 * GIB
    gpus.snapshot()
    assert gpus.withheld == [{"A": why}]  # no update: every journal would record it
    gpus.held["A"].clear()
    before = gpus.changes
    gpus.snapshot()
    assert gpus.withheld == [{"A": why}, {}]
    assert gpus.changes == before + 1
    assert gpus.is_clear("A")


def test_driver_that_does_not_answer_frees_no_device(gpus):
    gpus.end(gpus.process(10, "A"))
    gpus.clock.advance(GIVEN_BACK_WITHIN_S)
    gpus.snapshot(says_memory=False)
    why = "the driver does not say whether its memory is given back"
    assert gpus.withheld == [{"A": why}]
    gpus.snapshot()
    assert gpus.is_clear("A")


def test_driver_without_memory_use_makes_the_node_search_for_processes():
    gpus = Gpus("A")
    for _ in range(int(SILENT_FOR_S)):
        gpus.snapshot(says_memory=False)
        assert not gpus.is_clear("A"), "it may only have been slow"
        gpus.clock.advance(1.0)
    gpus.snapshot(says_memory=False)
    assert gpus.is_clear("A")
    assert gpus.withheld == []
    process = gpus.process(10, "A")
    gpus.held["A"][10] = GIB
    gpus.snapshot(says_memory=False)
    gpus.end(process, keeps=True)
    gpus.snapshot(says_memory=False)
    assert not gpus.is_clear("A")
    gpus.held["A"].clear()
    gpus.snapshot(says_memory=False)
    assert gpus.is_clear("A")


def test_device_with_known_memory_use_is_not_clear_before_it_is_known_again():
    gpus = Gpus("A")
    gpus.snapshot(says_memory=False)
    gpus.lost["A"] = 70 * GIB
    gpus.snapshot()
    for _ in range(30):
        gpus.clock.advance(1.0)
        gpus.snapshot(says_memory=False)
    assert not gpus.is_clear("A")
    gpus.lost["A"] = 0
    gpus.snapshot()
    assert gpus.is_clear("A")


def test_memory_without_an_owner_at_the_start_of_a_worker_is_not_freed():
    gpus = Gpus("A", "B", "C")
    gpus.lost |= {"A": 70 * GIB, "B": 7 * GIB}
    gpus.held["C"][STRANGER] = None
    gpus.lost["C"] = 20 * GIB
    gpus.snapshot()
    why = "memory not released: 70 GiB is used by no visible process"
    assert gpus.why("A") == f"GPU A: {why}"
    assert gpus.is_clear("B", "C")
    gpus.clock.advance(GIVEN_BACK_WITHIN_S)
    assert gpus.withheld == [{"A": why}]
    gpus.lost["A"] = 0
    gpus.snapshot()
    assert gpus.is_clear("A")
    assert gpus.withheld == [{"A": why}, {}]


def test_memory_in_a_container_without_known_owners_is_that_of_its_process():
    gpus = Gpus("A")
    gpus.snapshot(says_memory=False)
    gpus.clock.advance(SILENT_FOR_S)
    gpus.snapshot(says_memory=False)
    gpus.process(10, "A")
    gpus.held["A"][90_010] = 40 * GIB  # the driver's name for it
    gpus.snapshot(says_memory=False)
    assert gpus.availability.foreign == {}
    assert gpus.withheld == []


def test_container_decides_by_memory_alone(gpus):
    process = gpus.process(10, "A")
    gpus.held["A"][90_010] = 3 * GIB  # the driver's name for it
    gpus.snapshot()
    assert gpus.availability.foreign == {}
    gpus.end(process)
    gpus.snapshot()
    assert not gpus.is_clear("A")
    gpus.held["A"].clear()
    gpus.snapshot()
    assert gpus.is_clear("A")


def test_leftovers_of_a_dead_process_are_found_while_others_share_a_device(gpus):
    stays, goes = gpus.process(10, "A"), gpus.process(20, "A")
    gpus.parents |= {11: 10, 21: 20}
    gpus.held["A"] |= {10: GIB, 11: GIB, 20: GIB, 21: GIB}
    gpus.snapshot()
    gpus.held["A"][10] = 30 * GIB  # the trial that stays may allocate freely
    del gpus.parents[21]
    gpus.end(goes, keeps=True)
    gpus.snapshot()
    assert gpus.why("A").startswith("GPU A: memory not released: process 20 (python) holds 1 GiB")
    del gpus.held["A"][20]
    gpus.snapshot()
    assert not gpus.is_clear("A")
    del gpus.held["A"][21]
    gpus.snapshot()
    assert gpus.is_clear("A")
    gpus.end(stays, keeps=True)
    gpus.snapshot()
    assert not gpus.is_clear("A")


def test_orphan_on_a_device_is_found_even_if_no_snapshot_showed_it_before(gpus):
    gpus.process(10, "A")
    goes = gpus.process(20, "A")
    gpus.parents[21] = 1000  # the node has adopted it
    gpus.held["A"][21] = GIB
    gpus.end(goes)
    gpus.snapshot()
    assert not gpus.is_clear("A")


# --- processes from outside the farm --------------------------------------------------------------


def test_foreign_process_is_reported_once_and_the_device_is_used(gpus):
    gpus.process(10, "A", key="one")
    gpus.held["A"][STRANGER] = GIB
    for _ in range(2):
        gpus.snapshot()
    text = "GPU A is used by a process that is not of this farm: process 7 (python) holds 1 GiB"
    assert gpus.warnings == [("one", text)]
    assert gpus.availability.foreign == {"A": "process 7 (python) holds 1 GiB"}
    gpus.process(20, "A", key="two")
    gpus.process(30, "B", key="three")
    assert gpus.warnings[1:] == [("two", text)]
    assert gpus.is_clear("A")
    assert gpus.withheld == []
    del gpus.held["A"][STRANGER]
    gpus.snapshot()
    assert gpus.availability.foreign == {}


def test_desktop_on_a_device_is_not_reported(gpus):
    gpus.process(10, "A")
    gpus.held["A"][STRANGER] = 200 * MIB
    gpus.snapshot()
    assert gpus.warnings == []
    assert gpus.availability.foreign == {}


def test_memory_of_a_foreign_process_is_not_attributed_to_a_trial_process(gpus):
    gpus.end(gpus.process(10, "A"))
    gpus.held["A"][STRANGER] = 5 * GIB
    gpus.snapshot()
    assert gpus.is_clear("A")
    gpus.end(gpus.process(20, "A"))
    gpus.held["A"][STRANGER] = GIB  # memory that it frees is not a trial's
    gpus.lost["A"] = 4 * GIB
    gpus.snapshot()
    assert not gpus.is_clear("A")


def test_device_largely_held_by_others_is_withheld_until_they_hold_less(gpus):
    gpus.held["A"][STRANGER] = 9 * GIB
    gpus.snapshot()
    why = "not of this farm: process 7 (python) holds 9 GiB"
    assert gpus.withheld == [{"A": why}]
    for held, is_withheld in ((20, True), (6, True), (3, False), (6, False), (9, True)):
        gpus.held["A"][STRANGER] = held * GIB
        gpus.snapshot()
        assert bool(gpus.availability.obstacle(["A"])) is is_withheld, held


def test_process_that_held_a_device_before_is_known_in_a_container(gpus):
    gpus = Gpus("A")
    gpus.held["A"][90_007] = GIB
    gpus.snapshot()
    assert gpus.availability.foreign == {"A": "process 90007 (python) holds 1 GiB"}
    process = gpus.process(10, "A")
    gpus.held["A"] |= {90_007: 5 * GIB, 90_010: GIB}
    gpus.snapshot()
    gpus.end(process)
    del gpus.held["A"][90_010]
    gpus.snapshot()
    assert gpus.is_clear("A")


# --- broken GPUs ----------------------------------------------------------------------------------


def test_device_that_must_not_be_used_is_withheld_for_good(gpus):
    gpus.snapshot(unusable={"A": "uncorrected memory errors"})
    gpus.snapshot()
    assert gpus.withheld == [{"A": "uncorrected memory errors"}]
    assert gpus.availability.obstacle(["B", "A"]).is_withheld
    assert gpus.is_clear("B")


def test_xid_of_the_device_withholds_it_and_one_of_the_application_does_not(gpus, caplog):
    gpus.process(10, "A", trial="guilty")
    gpus.process(20, "B", trial="unlucky")
    gpus.snapshot(("A", 31), ("B", 79), ("elsewhere", 79))
    assert list(gpus.withheld[0]) == ["B"]
    assert "XID 79" in gpus.withheld[0]["B"]
    lines = [record.getMessage() for record in caplog.records if "gpu.xid" in record.msg]
    assert "device=A" in lines[0]
    assert "trials=guilty/1" in lines[0]
    assert "XID 31" in lines[0]
    assert "trials=unlucky/1" in lines[1]


def test_process_killed_by_an_xid_is_not_followed_by_another(gpus):
    gpus.end(gpus.process(10, "A"))
    gpus.snapshot(("A", 79))  # its memory is back in the same snapshot
    assert gpus.availability.obstacle(["A"]).is_withheld


# --- the snapshot itself --------------------------------------------------------------------------


def test_snapshot_names_the_ancestor_of_a_process():
    class Driver:
        period_s = 1.0

        def memory_used(self, uuid):
            return 2.0

        def holders(self, uuid):
            return [GpuProcess(os.getpid(), 1024.0, "py\x1bthon"), GpuProcess(2**22 + 1, None, "")]

        def health(self):
            return {"A": "broken", "other": "broken"}

        def energy(self, uuid):
            return None

        def xids(self, timeout_s):
            assert timeout_s == 0
            return []

    snapshot = look_at(Driver(), frozenset("A"), 5.0)
    ours, nobody = snapshot.devices["A"].holdings
    assert ours.line[:2] == (os.getpid(), os.getppid())
    assert nobody.line == ()
    assert snapshot.unusable == {"A": "broken"}
    assert str(ours) == f"process {os.getpid()} (python) holds 1 KiB"
    assert str(nobody) == f"process {2**22 + 1} holds memory"
