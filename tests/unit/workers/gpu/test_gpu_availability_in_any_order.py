"""In any order of events no trial process is forked on a device that is not clear."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.workers.fake_gpu_node import GIB, NODE, STRANGER, Gpus

UUIDS = ("A", "B")
HALF, WHOLE = 0.5, 1.0

uuids = st.sampled_from(UUIDS)
# More than the tolerance, so that memory that stays used must be noticed.
sizes = st.sampled_from((2 * GIB, 4 * GIB, 30 * GIB))


class Machine(RuleBasedStateMachine):
    """Compares the answers of `GpuAvailability` with the state that the driver would report."""

    def __init__(self):
        super().__init__()
        self.gpus = Gpus(*UUIDS)
        self.processes = {}
        self.shares = dict.fromkeys(UUIDS, 0.0)
        #: The end of each process whose memory stays used.
        self.dead = {}
        self.broken = set()
        self.pids = 100

    @rule(uuid=uuids, share=st.sampled_from((HALF, WHOLE)), size=sizes, is_seen=st.booleans())
    def a_trial_is_placed(self, uuid, share, size, is_seen):
        if self.shares[uuid] + share > 1 or not self.gpus.is_clear(uuid):
            return
        kept = [pid for pid in self.gpus.held[uuid] if pid in self.dead]
        assert not kept, "its memory is back"
        assert uuid not in self.broken
        self.pids += 1
        process = self.gpus.process(self.pids, uuid)
        self.processes[process] = (uuid, share)
        self.shares[uuid] += share
        self.gpus.held[uuid][process.pid] = size
        if is_seen:
            self.gpus.snapshot()

    @rule(data=st.data(), keeps=st.booleans())
    def a_process_is_gone(self, data, keeps):
        if not self.processes:
            return
        process = data.draw(st.sampled_from(sorted(self.processes, key=lambda one: one.pid)))
        uuid, share = self.processes.pop(process)
        self.shares[uuid] -= share
        # The driver's list shows nothing of a process that was never seen on a shared device.
        was_seen = process.pid in self.gpus.availability._pids[process.name]
        is_alone = self.shares[uuid] == 0
        if keeps and (was_seen or is_alone):
            self.dead[process.pid] = self.gpus.clock.now
            self.gpus.end(process, keeps=True)
        else:
            self.gpus.end(process)

    @rule()
    def memory_comes_back(self):
        for held in self.gpus.held.values():
            for pid in self.dead.keys() & held.keys():
                del held[pid]
        self.dead.clear()

    @rule(uuid=uuids, size=st.sampled_from((0, GIB, 7 * GIB, 20 * GIB)))
    def somebody_else_takes_memory(self, uuid, size):
        self.gpus.held[uuid][STRANGER] = size

    @rule(seconds=st.sampled_from((0.1, 1.0, 20.0)))
    def time_passes(self, seconds):
        self.gpus.clock.advance(seconds)

    @rule()
    def somebody_looks(self):
        self.gpus.snapshot()

    @rule(ago=st.sampled_from((0.1, 5.0)))
    def a_late_look_is_told(self, ago):
        held = {uuid: dict(held) for uuid, held in self.gpus.held.items()}
        asked_at = self.gpus.clock.now - ago
        for one in self.gpus.held.values():  # then only ended processes held memory
            for pid in [pid for pid in one if self.dead.get(pid, math.inf) > asked_at]:
                del one[pid]
        self.gpus.snapshot(asked_at=asked_at)
        for uuid, one in held.items():
            self.gpus.held[uuid] = one

    @rule(uuid=uuids)
    def a_device_breaks(self, uuid):
        self.broken.add(uuid)
        self.gpus.snapshot((uuid, 79))

    @invariant()
    def what_is_broken_is_withheld(self):
        assert all(self.gpus.availability.obstacle([uuid]).is_withheld for uuid in self.broken)

    def teardown(self):
        for process in list(self.processes):
            self.gpus.end(process)
        self.memory_comes_back()
        for held in self.gpus.held.values():
            held.clear()
        self.gpus.parents = {NODE: 1}
        self.gpus.clock.advance(0.1)
        self.gpus.snapshot()
        for uuid in UUIDS:
            assert self.gpus.is_clear(uuid) is (uuid not in self.broken), "else it would be lost"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
