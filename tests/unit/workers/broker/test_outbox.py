"""The outbox: numbered events, kept until acknowledged, sent again, spooled to disk."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tunemq_shared.protocol.messages import SlotFreed, decode_node_events, encode
from tunemq_workers.broker.outbox import BLOCK_BYTES, BLOCK_EVENTS, MemoryBudget, Outbox
from tunemq_workers.broker.outbox_spool import Spool


class MemorySpool:
    """A spool that fails on request."""

    def __init__(self):
        self.pieces = {}
        self.made = 0
        self.is_full = False

    def write(self, data):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.made += 1
        self.pieces[self.made] = bytes(data)
        return self.made

    def read(self, place):
        return self.pieces[place]

    def free(self, place):
        del self.pieces[place]


@pytest.fixture
def spool():
    return MemorySpool()


def event(n):
    return encode(SlotFreed(f"t{n}", n))


def numbers(batches):
    """Return the numbers in batches; each event of these tests carries its own."""
    found = []
    for batch in batches:
        events = decode_node_events(batch.payload)
        assert [e.attempt for e in events] == list(range(batch.first, batch.first + batch.count))
        found += [e.attempt for e in events]
    return found


def fill(outbox, count):
    for _ in range(count):
        outbox.add(event(outbox.last + 1))


def test_events_are_numbered_from_one(spool):
    outbox = Outbox(MemoryBudget(spool))
    assert [outbox.add(event(n)) for n in (1, 2, 3)] == [1, 2, 3]


def test_events_that_were_taken_are_not_returned_again(spool):
    outbox = Outbox(MemoryBudget(spool))
    fill(outbox, 3)
    assert numbers(outbox.take(9)) == [1, 2, 3]
    assert not outbox.has_unsent
    assert outbox.take(9) == []
    fill(outbox, 2)
    assert numbers(outbox.take(9)) == [4, 5]


def test_single_event_is_sent_in_a_separate_batch(spool):
    outbox = Outbox(MemoryBudget(spool))
    for n in range(1, 6):
        fill(outbox, 1)
        assert numbers(outbox.take(1)) == [n]


def test_batches_end_at_their_size_limit(spool):
    outbox = Outbox(MemoryBudget(spool))
    fill(outbox, BLOCK_EVENTS + 1)
    assert [batch.count for batch in outbox.take(9)] == [BLOCK_EVENTS, 1]


def test_numbers_continue_after_those_of_an_earlier_outbox(spool):
    outbox = Outbox(MemoryBudget(spool), last=41)
    fill(outbox, 2)
    outbox.rewind()
    assert numbers(outbox.take(9)) == [42, 43]


def test_a_large_event_ends_its_batch(spool):
    outbox = Outbox(MemoryBudget(spool))
    outbox.add(encode("x" * BLOCK_BYTES))
    outbox.add(encode("y"))
    assert [batch.count for batch in outbox.take(9)] == [1, 1]


def test_rewind_returns_all_events_that_are_not_journalled(spool):
    outbox = Outbox(MemoryBudget(spool))
    fill(outbox, 3 * BLOCK_EVENTS)
    outbox.take(99)
    outbox.acknowledge(BLOCK_EVENTS)
    outbox.rewind()
    assert numbers(outbox.take(99)) == list(range(BLOCK_EVENTS + 1, 3 * BLOCK_EVENTS + 1))


def test_rewind_to_an_event_returns_it_again_and_never_goes_forward(spool):
    outbox = Outbox(MemoryBudget(spool))
    fill(outbox, 2 * BLOCK_EVENTS)
    outbox.rewind(BLOCK_EVENTS + 5)
    assert outbox.take(1)[0].first == 1
    outbox.take(1)
    outbox.rewind(BLOCK_EVENTS + 5)
    assert outbox.take(1)[0].first <= BLOCK_EVENTS + 5


def test_released_events_use_no_space(spool):
    budget = MemoryBudget(spool)
    outbox = Outbox(budget)
    fill(outbox, 5 * BLOCK_EVENTS)
    outbox.acknowledge(outbox.last)
    assert budget.size == 0
    assert outbox.is_empty
    assert not outbox.has_unsent
    fill(outbox, 1)
    assert numbers(outbox.take(1)) == [5 * BLOCK_EVENTS + 1]


def test_events_that_exceed_memory_go_to_disk_and_come_back(spool):
    budget = MemoryBudget(spool, memory_bytes=100_000)
    outbox = Outbox(budget)
    fill(outbox, 20 * BLOCK_EVENTS)
    assert spool.pieces
    assert sum(map(len, spool.pieces.values())) > budget.size - 200_000
    assert numbers(outbox.take(99)) == list(range(1, 20 * BLOCK_EVENTS + 1))
    outbox.acknowledge(outbox.last)
    assert not spool.pieces


def test_events_taken_and_not_journalled_are_bounded(spool):
    outbox = Outbox(MemoryBudget(spool), sent_bytes=50_000)
    fill(outbox, 20 * BLOCK_EVENTS)
    taken = numbers(outbox.take(99))
    assert taken == list(range(1, taken[-1] + 1))
    assert 50_000 <= outbox.sent < 50_000 + BLOCK_BYTES
    assert outbox.has_unsent
    assert (outbox.take(99), outbox.unsent) == ([], 0)
    outbox.acknowledge(taken[-1])
    assert outbox.unsent
    assert numbers(outbox.take(99))[0] == taken[-1] + 1


def test_full_outbox_reports_it_until_an_event_is_journalled(spool):
    budget = MemoryBudget(spool, memory_bytes=10_000, limit_bytes=100_000)
    outbox = Outbox(budget)
    while not budget.is_full_for(outbox):
        assert budget.size < 100_000
        fill(outbox, 100)
    assert 100_000 <= budget.size < 110_000
    fill(outbox, 1)  # an event that must be kept is kept nevertheless
    outbox.acknowledge(BLOCK_EVENTS)
    assert not budget.is_full_for(outbox)


def test_without_a_disk_the_outbox_is_full_when_memory_is(spool):
    spool.is_full = True
    budget = MemoryBudget(spool, memory_bytes=50_000)
    outbox = Outbox(budget)
    while not budget.is_full_for(outbox):
        fill(outbox, 100)
    assert budget.size < 50_000 + 2 * BLOCK_BYTES
    assert numbers(outbox.take(99)) == list(range(1, outbox.last + 1))
    spool.is_full = False
    fill(outbox, BLOCK_EVENTS)
    assert spool.pieces
    assert not budget.is_full_for(outbox)


def test_outboxes_share_memory_and_the_largest_moves_to_disk(spool):
    budget = MemoryBudget(spool, memory_bytes=100_000)
    large, small = Outbox(budget), Outbox(budget)
    fill(large, 4 * BLOCK_EVENTS)
    on_disk = len(spool.pieces)
    fill(small, 10)
    fill(large, BLOCK_EVENTS)
    assert small.held
    assert len(spool.pieces) > on_disk
    assert budget.in_memory < 100_000 + 2 * BLOCK_BYTES
    assert numbers(small.take(9)) == list(range(1, 11))
    assert numbers(large.take(99)) == list(range(1, large.last + 1))


@pytest.mark.parametrize("has_disk", [True, False], ids=["disk", "no disk"])
def test_only_outboxes_above_their_share_of_a_full_budget_wait(spool, has_disk):
    spool.is_full = not has_disk
    budget = MemoryBudget(
        spool,
        memory_bytes=10_000 if has_disk else 100_000,
        limit_bytes=100_000 if has_disk else 10**9,
    )
    large, small = Outbox(budget), Outbox(budget)
    while not budget.is_full_for(large):
        fill(large, 100)
    assert not budget.is_full_for(small)
    while not budget.is_full_for(small):
        fill(small, 100)
    assert 50_000 <= small.size < 55_000
    assert budget.is_full_for(large)
    large.acknowledge(large.last)
    assert not budget.is_full_for(small)


def test_closed_outbox_returns_its_share(spool):
    budget = MemoryBudget(spool, memory_bytes=10_000)
    one, other = Outbox(budget), Outbox(budget)
    fill(one, 3 * BLOCK_EVENTS)
    fill(other, 1)
    one.close()
    assert not spool.pieces
    other.acknowledge(1)
    assert (budget.size, budget.in_memory) == (0, 0)


class SentAndReleased(RuleBasedStateMachine):
    """In any order of calls, the outbox skips no event and keeps all that are not acknowledged."""

    def __init__(self):
        super().__init__()
        self.spool = MemorySpool()
        self.budget = MemoryBudget(self.spool, memory_bytes=3_000, limit_bytes=10**9)
        self.outbox, self.other = Outbox(self.budget), Outbox(self.budget)
        self.acknowledged_up_to = 0
        self.next = 1  # the next event for a receiver that has read all batches

    @rule(count=st.integers(1, 2_500))
    def add(self, count):
        fill(self.outbox, count)

    @rule(count=st.integers(1, 200))
    def add_to_another(self, count):
        fill(self.other, count)

    @rule()
    def release_the_other(self):
        self.other.acknowledge(self.other.last)

    @rule(most=st.integers(1, 4))
    def take(self, most):
        for batch in self.outbox.take(most):
            assert batch.first <= self.next, "a gap"
            numbers([batch])
            self.next = max(self.next, batch.first + batch.count)

    @rule(share=st.floats(0, 1))
    def acknowledge(self, share):
        reached = self.acknowledged_up_to + int(share * (self.next - 1 - self.acknowledged_up_to))
        self.acknowledged_up_to = max(self.acknowledged_up_to, reached)
        self.outbox.acknowledge(self.acknowledged_up_to)

    @rule(share=st.floats(0, 1))
    def rewind(self, share):
        self.outbox.rewind(
            self.acknowledged_up_to + 1 + int(share * (self.outbox.last - self.acknowledged_up_to))
        )

    @rule()
    def rewind_all(self):
        """Redis was wiped: the receiver has only the journalled events."""
        self.outbox.rewind()
        self.next = self.acknowledged_up_to + 1

    @rule(is_full=st.booleans())
    def disk(self, is_full):
        self.spool.is_full = is_full

    @invariant()
    def sizes_add_up(self):
        assert self.budget.size >= self.budget.in_memory >= self.outbox.held + self.other.held
        assert self.budget.size == self.outbox.size + self.other.size
        if self.outbox.is_empty and self.other.is_empty:
            assert self.budget.size == 0
            assert self.budget.in_memory == 0
        assert self.outbox.is_empty is (self.acknowledged_up_to == self.outbox.last)

    def teardown(self):
        self.outbox.rewind()
        self.next = self.acknowledged_up_to + 1
        while self.outbox.has_unsent:
            self.take(4)
        assert self.next == self.outbox.last + 1


TestSentAndReleased = SentAndReleased.TestCase
TestSentAndReleased.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=30))
def test_spool_returns_what_was_written(tmp_path_factory, pieces):
    spool = Spool(str(tmp_path_factory.mktemp("spool")), segment_bytes=100)
    places = [spool.write(piece) for piece in pieces]
    assert [spool.read(place) for place in places] == pieces
    for place in places:
        spool.free(place)
    assert spool._segments == []


def test_spool_leaves_no_file(tmp_path):
    spool = Spool(str(tmp_path))
    spool.write(b"something")
    assert list(tmp_path.iterdir()) == []
