from __future__ import annotations

import msgspec
import pytest

from tunemq_scheduler.transport import desired_state as desired_state_module
from tunemq_scheduler.transport.desired_state import DesiredState, DesiredTrials
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.message_limits import COMMAND_BYTES, ORDERS_BYTES, START_BYTES
from tunemq_shared.protocol.messages import (
    Assignment,
    BlobRef,
    Environment,
    TrialOrder,
    TrialSpec,
    encode,
)
from tunemq_shared.protocol.result_conditions import TO_THE_END, Condition, next_result

START = TrialSpec(
    experiment="e",
    events_key="k",
    trial_name="t",
    trial_number=0,
    folder="/f",
    code=BlobRef("0", 1, "/c"),
    config=b"",
    resources={"cpu": 1.0},
    environment=Environment("python", (), {}, ()),
    store="/s",
)


def desired_state_with_one_trial() -> tuple[DesiredState, DesiredTrials]:
    desired_state = DesiredState("inc", term=3)
    orders = desired_state.orders("k")
    orders.put(TrialOrder("t1", 1, next_result(0), start=START))
    return desired_state, orders


def started(assignment: Assignment) -> list[str]:
    return [order.trial for order in assignment.orders if order.start is not None]


def test_order_includes_the_start_until_a_version_with_it_is_confirmed():
    desired_state, orders = desired_state_with_one_trial()
    first = desired_state.next_assignment()
    orders.put(TrialOrder("t1", 1, next_result(1)))
    second = desired_state.next_assignment()
    desired_state.confirm(3, first.version)
    third = desired_state.next_assignment()

    assert (first.term, first.version, second.version, third.version) == (3, 1, 2, 3)
    assert started(first) == started(second) == ["t1"]
    assert started(third) == []
    assert third.orders[0].run_until == next_result(1)


def test_later_trial_is_started_though_older_versions_are_confirmed():
    desired_state, orders = desired_state_with_one_trial()
    desired_state.confirm(3, desired_state.next_assignment().version)
    orders.put(TrialOrder("t2", 1, TO_THE_END, start=START))

    assert started(desired_state.next_assignment()) == ["t2"]


def test_confirmation_of_another_term_does_not_count():
    desired_state, _ = desired_state_with_one_trial()
    desired_state.next_assignment()
    desired_state.confirm(2, 99)

    assert not desired_state.is_confirmed
    assert started(desired_state.same_assignment()) == ["t1"]


def test_versions_continue_from_the_nodes_version_of_an_earlier_scheduler():
    desired_state = DesiredState("inc", term=3, confirmed=41)

    assert desired_state.is_confirmed
    assert desired_state.next_assignment().version == 42


def test_orders_about_an_older_attempt_of_a_trial_change_nothing():
    desired_state, orders = desired_state_with_one_trial()
    orders.put(TrialOrder("t1", 2, TO_THE_END, start=START))
    desired_state.next_assignment()
    orders.put(TrialOrder("t1", 1, next_result(7), stop=True))
    orders.release("t1", 1)
    orders.put(TrialOrder("t2", 1, TO_THE_END, stop=True))

    assert not desired_state.is_changed
    assert not desired_state.is_outdated
    (order,) = desired_state.same_assignment().orders
    assert (order.attempt, order.run_until, order.stop) == (2, TO_THE_END, False)


def test_released_trial_is_left_out_but_causes_no_write():
    desired_state, orders = desired_state_with_one_trial()
    desired_state.next_assignment()
    orders.release("t1", 1)

    assert (desired_state.is_changed, desired_state.is_outdated, desired_state.is_empty) == (
        False,
        True,
        True,
    )
    assert desired_state.next_assignment().orders == ()


def test_reset_of_the_connection_sends_everything_again():
    desired_state, _ = desired_state_with_one_trial()
    desired_state.confirm(3, desired_state.next_assignment().version)
    desired_state.lose_confirmation()

    assert desired_state.is_changed
    again = desired_state.next_assignment()
    assert again.version == 2
    assert started(again) == ["t1"]


def test_repeated_send_keeps_the_version_and_restarts_the_timer():
    desired_state, _ = desired_state_with_one_trial()
    first = desired_state.next_assignment()
    desired_state.renewals_unconfirmed = 5

    assert desired_state.same_assignment() == first
    assert desired_state.renewals_unconfirmed == 0


def test_trial_to_be_paused_is_listed_so_until_it_is_released():
    desired_state, orders = desired_state_with_one_trial()
    desired_state.confirm(3, desired_state.next_assignment().version)
    orders.put(TrialOrder("t1", 2, next_result(0), pause=True))
    assert not desired_state.is_changed, "of another attempt"
    orders.put(TrialOrder("t1", 1, next_result(0), pause=True))

    assert desired_state.is_changed
    (order,) = desired_state.next_assignment().orders
    assert (order.pause, order.stop, order.start) == (True, False, None)
    orders.release("t1", 1)
    assert desired_state.next_assignment().orders == ()


def test_preempted_trial_may_run_to_its_next_checkpoint_until_it_is_to_pause_at_once():
    order = TrialOrder("t1", 1, TO_THE_END).paused(at_checkpoint=True)
    assert (order.pause, order.at_checkpoint) == (True, True)
    order = order.paused().paused(at_checkpoint=True)
    assert (order.pause, order.at_checkpoint) == (True, False)


def test_node_heard_again_is_sent_everything_and_versions_continue():
    desired_state, orders = desired_state_with_one_trial()
    desired_state.confirm(3, desired_state.next_assignment().version)
    desired_state.start_over()
    orders.put(TrialOrder("t1", 1, next_result(4), start=START, pause=True))
    orders.settle()

    assignment = desired_state.next_assignment()
    (order,) = assignment.orders
    assert assignment.version == 2
    assert (order.attempt, order.run_until, order.pause, order.start) == (
        1,
        next_result(4),
        True,
        START,
    )


def test_trial_to_be_killed_is_listed_beside_its_next_attempt_until_it_is_released():
    desired_state, orders = desired_state_with_one_trial()
    orders.put(TrialOrder("t1", 1, TO_THE_END, start=START, kill=True))
    orders.put(TrialOrder("t1", 3, TO_THE_END, start=START))
    listed = desired_state.next_assignment().orders
    assert [(order.attempt, order.kill) for order in listed] == [(3, False), (1, True)]
    assert not desired_state.is_empty

    orders.release("t1", 1)
    assert desired_state.is_outdated
    assert [order.attempt for order in desired_state.next_assignment().orders] == [3]


def test_trials_of_two_experiments_are_distinct_whatever_their_names():
    desired_state, orders = desired_state_with_one_trial()
    another = desired_state.orders("another")
    another.put(TrialOrder("t1", 1, TO_THE_END, start=START))
    another.release("t1", 1)

    assert not orders.is_empty
    assert [order.run_until for order in desired_state.next_assignment().orders] == [next_result(0)]


def test_trials_of_an_experiment_without_stated_orders_are_left_alone():
    desired_state = DesiredState("inc", term=3, confirmed=1, absent=["k"])
    assert desired_state.says_nothing
    assert desired_state.orders("another").is_empty
    assert not desired_state.says_nothing
    assert desired_state.next_assignment().untouched == ("k",)

    desired_state.orders("k").settle()
    assert desired_state.is_changed
    assert desired_state.next_assignment().untouched == ()
    desired_state.orders("k").settle()
    assert not desired_state.is_changed, "it was sent already"


def test_dropped_experiment_is_sent_to_nodes_with_trials_of_it():
    desired_state, _ = desired_state_with_one_trial()
    desired_state.orders("unused")
    desired_state.next_assignment()
    assert not desired_state.drop("unused")
    assert not desired_state.drop("never heard of")
    assert not desired_state.is_changed

    assert desired_state.drop("k")
    assert desired_state.is_changed
    assert desired_state.next_assignment().orders == ()


def start_of(size: int) -> TrialSpec:
    """Start data of about ``size`` bytes."""
    return msgspec.structs.replace(START, config=bytes(size - 1000))


def put_large(orders: DesiredTrials, *trials: str) -> None:
    for trial in trials:
        orders.put(TrialOrder(trial, 1, TO_THE_END, start=start_of(START_BYTES)))


def test_starts_that_do_not_fit_are_sent_once_earlier_ones_are_confirmed():
    desired_state = DesiredState("inc", term=3)
    names = [f"t{number}" for number in range(10)]
    put_large(desired_state.orders("k"), *names)
    sent: list[str] = []
    for _ in range(5):
        assignment = desired_state.next_assignment()
        assert len(encode(assignment)) < COMMAND_BYTES
        assert [order.trial for order in assignment.orders] == names, "else the node kills them"
        assert started(desired_state.next_assignment()) == started(assignment), "unconfirmed"
        assert not desired_state.is_changed, "there is no room yet"
        sent += started(assignment)
        desired_state.confirm(3, assignment.version)
        assert desired_state.is_changed is (len(sent) < len(names))
    assert sorted(sent) == names
    assert started(desired_state.next_assignment()) == []


def test_too_long_order_is_refused():
    orders = DesiredState("inc", term=3).orders("k")
    too_long = msgspec.structs.replace(START, config=bytes(START_BYTES))
    with pytest.raises(ConfigError, match=r"the start of trial t1 has .* bytes, and 4,194"):
        orders.put(TrialOrder("t1", 1, TO_THE_END, start=too_long))
    with pytest.raises(ConfigError, match="the orders of this search to one node have"):
        orders.put(TrialOrder("t" * ORDERS_BYTES, 1, TO_THE_END, start=START))
    assert orders.is_empty


@pytest.mark.parametrize("kill", [False, True])
def test_orders_that_would_fill_an_assignment_are_refused(kill: bool):
    desired_state = DesiredState("inc", term=3)
    for search in range(16):
        orders = desired_state.orders(f"search {search}")
        possible = [
            TrialOrder(f"{number}".zfill(60_000), 1, TO_THE_END, start=START, kill=kill)
            for number in range(ORDERS_BYTES // 60_100)
        ]
        for order in (*possible, *possible):  # those of the second round replace the first
            orders.put(order)
        one_more = msgspec.structs.replace(possible[0], trial="t" * 60_000)
        with pytest.raises(ConfigError, match="fewer of its trials may run there at once"):
            orders.put(one_more)
    put_large(desired_state.orders("large"), "t1", "t2", "t3")
    assert len(encode(desired_state.next_assignment())) < COMMAND_BYTES


def test_start_data_beyond_a_limit_is_refused_and_released_data_leaves_room(monkeypatch):
    monkeypatch.setattr(desired_state_module, "_KEPT_BYTES", 3 * START_BYTES)
    orders = DesiredState("inc", term=3).orders("k")
    put_large(orders, "t1", "t2", "t2", "t3")
    with pytest.raises(ConfigError, match="the configurations of this search's trials on one"):
        put_large(orders, "t4")
    assert orders.trial_count == 3
    orders.release("t1", 1)
    put_large(orders, "t4")
    orders.start_over()
    put_large(orders, "t5", "t6", "t7")


def test_longer_order_is_refused_and_released_ones_leave_room():
    desired_state = DesiredState("inc", term=3)
    orders = desired_state.orders("k")
    for trial in ("t1", "t2"):
        orders.put(TrialOrder(trial, 1, TO_THE_END, start=START))
    half = (Condition("m" * (ORDERS_BYTES // 2), 1),)
    orders.put(TrialOrder("t1", 1, half))
    with pytest.raises(ConfigError, match="the orders of this search to one node have"):
        orders.put(TrialOrder("t2", 1, half))
    orders.put(TrialOrder("t1", 1, half))
    orders.release("t1", 1)
    orders.put(TrialOrder("t2", 1, half))
    orders.start_over()
    orders.put(TrialOrder("t1", 1, half, start=START))


def test_large_starts_are_not_repeated_with_each_change_until_they_are_confirmed_or_lost():
    desired_state = DesiredState("inc", term=3)
    orders = desired_state.orders("k")
    put_large(orders, "t0")
    assert desired_state.is_due
    assignment = desired_state.next_assignment()
    orders.put(TrialOrder("t0", 1, TO_THE_END, stop=True))
    assert desired_state.is_changed
    for desired_state.renewals_unconfirmed in range(3):
        assert not desired_state.is_due
        assert not desired_state.is_lost
    desired_state.renewals_unconfirmed = 3
    assert desired_state.is_due
    assert desired_state.is_lost
    desired_state.renewals_unconfirmed = 1
    desired_state.confirm(3, assignment.version)
    assert desired_state.is_due
    assert not desired_state.is_lost

    desired_state.next_assignment()
    orders.put(TrialOrder("small", 1, TO_THE_END, start=START))
    desired_state.next_assignment()
    orders.put(TrialOrder("small", 1, TO_THE_END, stop=True))
    assert desired_state.is_due
    desired_state.renewals_unconfirmed = 1
    assert desired_state.is_lost


def test_after_a_reset_large_starts_are_sent_again_in_parts():
    desired_state = DesiredState("inc", term=3)
    orders = desired_state.orders("k")
    for number in range(6):
        put_large(orders, f"t{number}")
        desired_state.confirm(3, desired_state.next_assignment().version)
    desired_state.lose_confirmation()
    sent: set[str] = set()
    for _ in range(3):
        assignment = desired_state.next_assignment()
        assert len(encode(assignment)) < COMMAND_BYTES
        sent |= {*started(assignment)}
        desired_state.confirm(3, assignment.version)
    assert len(sent) == 6


def test_stop_of_a_trial_and_start_of_a_small_one_pass_large_starts():
    desired_state = DesiredState("inc", term=3)
    put_large(desired_state.orders("k"), *(f"t{number}" for number in range(10)))
    desired_state.next_assignment()
    desired_state.orders("k").put(TrialOrder("t9", 1, TO_THE_END, stop=True))
    desired_state.orders("other").put(TrialOrder("small", 1, TO_THE_END, start=START))

    assignment = desired_state.next_assignment()
    assert "small" in started(assignment)
    assert [(one.trial, one.start) for one in assignment.orders if one.stop] == [("t9", None)]


def test_small_starts_do_not_delay_a_large_one_without_end():
    desired_state = DesiredState("inc", term=3)
    orders = desired_state.orders("k")
    put_large(orders, *(f"t{number}" for number in range(4)))
    put_large(desired_state.orders("large"), "large")
    sent, version = [], 0
    for number in range(16):
        for part in range(20):
            small = TrialOrder(f"s{number}.{part}", 1, TO_THE_END, start=start_of(START_BYTES // 4))
            orders.put(small)
        assignment = desired_state.next_assignment()
        desired_state.confirm(3, version)
        version = assignment.version
        sent += started(assignment)
    assert "large" in sent
