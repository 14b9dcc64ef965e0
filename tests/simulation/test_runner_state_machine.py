"""The pure runner, with nodes that keep the protocol: hypothesis draws what happens next.

Messages stay in flight until they are drawn: orders are lost, duplicated and reordered, events come
late, repeatedly, and interleaved between nodes. After each step all invariants hold; once the
faults end, every trial ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.searches.plans import PLAN
from tunemq.testing.journal_auditor import JournalAuditor
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_scheduler.transport.celery_executor import CeleryTrialExecutor
from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_scheduler.transport.desired_state_executor import DesiredStateExecutor
from tunemq_shared.protocol import messages as m

LAST_STEP = 6
NODES = 2
MOST_TRIALS = 5
PICK = st.integers(0, 1000)


def pick(among: Sequence[Any], place: int) -> Any:
    return among[place % len(among)]


@dataclass
class SimulatedTrialProcess:
    step: int
    last_step: int
    run_until: Any
    is_pausing: bool = False
    #: It pauses as soon as it has saved, which is not done when it is asked to.
    at_checkpoint: bool = False
    #: It has ended, and is not quite gone.
    is_over: bool = False

    @property
    def waits(self) -> bool:
        reached = any(self.step >= one.bound for one in self.run_until)
        return reached and self.step > self.last_step


@dataclass
class Node:
    name: str
    instance_id: str
    desired_state: DesiredState
    confirmed: tuple[int, int] = (0, 0)
    offers: int = 0
    processes: dict[tuple[str, int], SimulatedTrialProcess] = field(default_factory=dict)
    over: set[tuple[str, int]] = field(default_factory=set)
    starts: dict[tuple[str, int], m.TrialSpec] = field(default_factory=dict)
    said: list[m.NodeEvent] = field(default_factory=list)
    uploads: list[m.CheckpointWritten] = field(default_factory=list)
    #: Orders on their way.
    in_flight: list[m.Assignment] = field(default_factory=list)

    def obey(self, assignment: m.Assignment) -> None:
        if (assignment.term, assignment.version) <= self.confirmed:
            return
        self.confirmed = assignment.term, assignment.version
        wanted = {(order.trial, order.attempt): order for order in assignment.orders}
        self.over &= wanted.keys()
        for key in self.processes.keys() - wanted.keys():
            self.processes[key].is_over = True
        for key, order in wanted.items():
            if order.start is not None:
                self.starts[key] = order.start
            process = self.processes.get(key)
            if process is not None:
                process.run_until = order.run_until
                process.is_pausing, process.at_checkpoint = order.pause, order.at_checkpoint
                process.is_over = process.is_over or order.stop or order.kill
            elif key not in self.over and (order.stop or order.kill):
                self.over.add(key)
                self.said.append(m.SlotFreed(*key))
            elif key not in self.over and key in self.starts:
                self.start(key, order)

    def start(self, key: tuple[str, int], order: m.TrialOrder) -> None:
        assert sum(1 for _ in self.processes) < 2, "more trial processes than slots"
        start = self.starts[key]
        step = start.restore[0].step if start.restore else 0
        self.processes[key] = SimulatedTrialProcess(
            step, start.last_step, order.run_until, order.pause, order.at_checkpoint
        )
        self.said.append(m.TrialStarted(*key, 1, "process", "127.0.0.1", 0.0))

    def end(self, key: tuple[str, int], *events: m.NodeEvent) -> None:
        self.processes[key].is_over = True
        self.said += events


class QueueingExecutor(CeleryTrialExecutor):
    """Puts orders into the command queues of these nodes; others send them."""

    def __init__(self, nodes: list[Node]) -> None:
        DesiredStateExecutor.__init__(self)
        self._plan, self._nodes = PLAN, nodes

    def on_step_end(self) -> None:
        """No-op: the owner of the command queues sends their contents."""

    def _put(self, instance_id: str, order: m.TrialOrder) -> None:
        for node in self._nodes:
            if node.instance_id == instance_id:
                node.desired_state.orders(PLAN.events_key).put(order)

    def _release(self, instance_id: str, trial: str, attempt: int) -> None:
        for node in self._nodes:
            if node.instance_id == instance_id:
                node.desired_state.orders(PLAN.events_key).release(trial, attempt)


class Drawn(RuleBasedStateMachine):
    @initialize(
        max_failures=st.sampled_from([-1, 1]), losses=st.sampled_from([-1, 1]), keep=st.booleans()
    )
    def begin(self, max_failures: int, losses: int, keep: bool) -> None:
        self.settings = RunnerSettings(
            max_failures=max_failures,
            max_node_losses=losses,
            keep=RetentionPolicy(num_to_keep=1 if keep else None),
            request={"cpu": 1.0},
        )
        self.auditor = JournalAuditor(self.settings, said=self.stated)
        self.journal_records: list[m.JournalRecord] = []
        self.nodes: list[Node] = []
        self.sent_commands = QueueingExecutor(self.nodes)
        self.every: dict[str, Node] = {}
        self.term, self.lives, self.clock = 1, 0, 0.0
        for number in range(NODES):
            self.join(f"node-{number}")
        self.suggest()

    @property
    def runner(self) -> TrialRunner:
        return self.auditor.runner

    def stated(self, instance_id: str, number: int) -> m.NodeEvent:
        return self.every[instance_id].said[number - 1]

    def tell(self, event: m.Event, *answers: m.AlgorithmAnswer) -> None:
        self.journal_records.append(m.JournalRecord(event, answers))
        self.perform(self.auditor.event(event, answers))

    def perform(self, commands: Sequence[c.Command]) -> None:
        self.sent_commands.perform([one for one in commands if isinstance(one, c.ExecutorCommand)])
        self.post()

    def post(self) -> None:
        for node in self.nodes:
            if node.desired_state.is_changed and node.instance_id in self.runner.nodes:
                node.in_flight.append(node.desired_state.next_assignment())

    def join(self, name: str) -> None:
        self.lives += 1
        node = Node(name, f"{name}.{self.lives}", DesiredState(f"{name}.{self.lives}", self.term))
        self.nodes.append(node)
        self.every[node.instance_id] = node
        shared = self.lives % 2 == 0
        joined = m.NodeJoined(node.instance_id, name, name, "127.0.0.1", {"cpu": 2.0}, (), shared)
        self.tell(joined)
        if shared:
            self.offer(node, 2.0, None)

    def offer(self, node: Node, cpus: float, grace_s: float | None) -> None:
        node.offers += 1
        self.tell(
            m.NodeOffered(node.instance_id, node.offers, {"cpu": cpus}, preempt_grace_s=grace_s)
        )

    # --- the search -------------------------------------------------------------------------------

    @precondition(lambda self: self.runner.suggested < MOST_TRIALS)
    @rule()
    def suggest(self) -> None:
        n = self.runner.suggested
        horizon = m.HorizonSet(f"t_{n}", ())
        self.tell(m.ConfigSuggested(n, f"t_{n}", b"\x80", "", {"cpu": 1.0}), horizon)

    @precondition(lambda self: any(self.runner.waiting()))
    @rule(which=PICK)
    def choose(self, which: int) -> None:
        self.tell(m.TrialChosen(pick(list(self.runner.waiting()), which).trial_id))

    @precondition(lambda self: self.runner.live)
    @rule(which=PICK)
    def stop(self, which: int) -> None:
        self.tell(m.StopRequested(pick(sorted(self.runner.live), which), "drawn"))

    @rule(seconds=st.sampled_from([1.0, 30.0, 200.0]))
    def tick(self, seconds: float) -> None:
        self.clock += seconds
        self.tell(m.Tick(self.clock))

    @rule(cold=st.booleans(), by_dump=st.booleans(), errored=st.sampled_from(["", "restart"]))
    def restart_the_scheduler(self, cold: bool, by_dump: bool, errored: str) -> None:
        if by_dump:
            state, finished = dump(self.runner), dict(self.runner.finished)
            again = TrialRunner.load(self.settings, state, finished)
        else:
            again = replay(self.settings, self.journal_records)
        self.auditor.same_as(again)
        self.term += 1
        self.sent_commands = QueueingExecutor(self.nodes)
        if cold:
            self.nodes.clear()
        for node in self.nodes:
            node.desired_state = DesiredState(node.instance_id, self.term, node.confirmed[1])
        self.tell(m.ExperimentResumed(self.term, 0.0, errored=errored, is_cold=cold))
        if cold:
            for number in range(NODES):
                self.join(f"node-{number}")
        else:
            self.perform(self.runner.standing_orders())

    # --- transport --------------------------------------------------------------------------------

    @precondition(lambda self: any(node.in_flight for node in self.nodes))
    @rule(which=PICK, place=PICK, fate=st.sampled_from(["comes", "comes", "again", "lost"]))
    def deliver(self, which: int, place: int, fate: str) -> None:
        node = pick([node for node in self.nodes if node.in_flight], which)
        in_flight = pick(node.in_flight, place)
        if fate != "lost":
            node.obey(in_flight)
        if fate != "again":
            node.in_flight.remove(in_flight)

    @rule(which=PICK)
    def say_again_what_was_not_taken(self, which: int) -> None:
        if self.nodes:
            node = pick(self.nodes, which)
            if node.instance_id in self.runner.nodes and node.desired_state.version:
                node.in_flight.append(node.desired_state.same_assignment())

    @precondition(lambda self: any(self.unread(node) for node in self.nodes))
    @rule(
        which=PICK,
        count=st.integers(1, 4),
        doubled=st.integers(0, 3),
        decision=st.sampled_from([None] * 6 + [m.PAUSE, m.STOP]),
    )
    def read(self, which: int, count: int, doubled: int, decision: str | None) -> None:
        """Read a batch whose first events are repeated; the loop drops those."""
        node = pick([node for node in self.nodes if self.unread(node)], which)
        acknowledged = self.runner.acknowledged.get(node.instance_id, 0)
        first = max(1, acknowledged + 1 - doubled)
        events = node.said[first - 1 : acknowledged + count]
        if node.instance_id in self.runner.away:
            self.hear(node)
        last = first - 1 + len(events)
        self.tell(m.BatchRead(node.instance_id, acknowledged + 1, last, "0-0"))
        for event in events[acknowledged + 1 - first :]:
            answers: list[m.AlgorithmAnswer] = []
            if isinstance(event, m.ResultReported) and decision and self.is_due(event):
                answers.append(m.DecisionMade(event.trial, event.step, decision, "drawn"))
            self.tell(event, *answers)

    def is_due(self, event: m.ResultReported) -> bool:
        return self.runner.review(event).name == "DUE"

    def unread(self, node: Node) -> bool:
        return len(node.said) > self.runner.acknowledged.get(node.instance_id, 0)

    def hear(self, node: Node) -> None:
        node.desired_state.start_over()
        node.desired_state.orders(PLAN.events_key).settle()
        node.desired_state.is_changed = False
        self.tell(m.NodeReturned(node.instance_id))
        node.desired_state.is_changed = True
        self.post()

    # --- nodes ------------------------------------------------------------------------------------

    @rule(which=PICK)
    def lose_a_node(self, which: int) -> None:
        if self.runner.nodes:
            self.tell(m.NodeLost(pick(sorted(self.runner.nodes), which), "drawn"))

    @precondition(lambda self: self.runner.away)
    @rule(which=PICK)
    def a_node_returns(self, which: int) -> None:
        instance_id = pick(sorted(self.runner.away), which)
        node = next((one for one in self.nodes if one.instance_id == instance_id), None)
        if node is not None:
            self.hear(node)

    @precondition(lambda self: self.nodes)
    @rule(which=PICK)
    def a_node_is_started_again(self, which: int) -> None:
        node = pick(self.nodes, which)
        self.nodes.remove(node)
        self.tell(m.NodeLost(node.instance_id, "drawn", is_dead=True))
        self.join(node.name)

    @precondition(lambda self: any(node.offers for node in self.nodes))
    @rule(
        which=PICK,
        cpus=st.sampled_from([0.0, 1.0, 2.0]),
        grace_s=st.sampled_from([None, 0.0, 30.0]),
    )
    def something_else_is_offered(self, which: int, cpus: float, grace_s: float | None) -> None:
        self.offer(pick([node for node in self.nodes if node.offers], which), cpus, grace_s)

    # --- trial processes --------------------------------------------------------------------------

    def processes(self, *, over: bool = False) -> list[tuple[Node, tuple[str, int]]]:
        return [
            (node, key)
            for node in self.nodes
            for key, process in node.processes.items()
            if process.is_over == over
        ]

    @precondition(lambda self: self.processes())
    @rule(which=PICK, saves=st.booleans())
    def report(self, which: int, saves: bool) -> None:
        node, key = pick(self.processes(), which)
        process = node.processes[key]
        if process.waits:
            return
        process.step += 1
        done = process.step >= LAST_STEP
        told = m.ResultReported(*key, process.step, {}, 0.0, 1.0, 1.0, 1.0, process.step, done=done)
        node.said.append(told)
        does_save = saves or (process.is_pausing and not process.at_checkpoint)
        if does_save:
            trial, attempt = key
            name = f"{trial}/checkpoint_{attempt}-{process.step:06d}"
            written = m.CheckpointWritten(*key, process.step, process.step, name, "w", 1)
            node.said.append(written)
            node.uploads.append(written)
        if done:
            node.end(key, m.TrialFinished(*key))
        elif process.is_pausing and does_save:
            node.end(key, m.TrialPaused(*key))

    @precondition(lambda self: any(node.uploads for node in self.nodes))
    @rule(which=PICK, is_lost=st.sampled_from([False, False, True]))
    def an_upload_ends(self, which: int, is_lost: bool) -> None:
        node = pick([node for node in self.nodes if node.uploads], which)
        one = node.uploads.pop(0)
        if is_lost:
            node.said.append(m.CheckpointLost(one.trial, one.attempt, one.key, "drawn", 0.0))
        else:
            fields = (one.trial, one.attempt, one.n, one.step, one.key, "c", 1)
            node.said.append(m.CheckpointCommitted(*fields))

    @precondition(lambda self: self.processes())
    @rule(which=PICK, kind=st.sampled_from(["died", "user", "storage"]))
    def kill_a_trial(self, which: int, kind: str) -> None:
        node, key = pick(self.processes(), which)
        died = m.TrialProcessDied(*key, 1, 9, None, 0.0)
        node.end(key, died if kind == "died" else m.TrialFailed(*key, kind, "drawn", "", 0.0))

    @precondition(lambda self: self.processes(over=True))
    @rule(which=PICK)
    def a_process_is_gone(self, which: int) -> None:
        node, key = pick(self.processes(over=True), which)
        del node.processes[key]
        node.over.add(key)
        node.said.append(m.SlotFreed(*key))

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def all_invariants_hold(self) -> None:
        if hasattr(self, "auditor"):
            self.auditor.check()

    @invariant()
    def preempted_trials_run(self) -> None:
        if hasattr(self, "auditor"):
            for trial in self.runner.giving_way:
                assert self.runner.live[trial].status == "RUNNING"

    @invariant()
    def farm_knows_the_held_resources(self) -> None:
        if hasattr(self, "auditor"):
            held = {
                node: self.runner.placement.held(node)
                for node in self.runner.nodes
                if self.runner.placement.held(node).resources
            }
            assert self.runner.usage().held == held

    def teardown(self) -> None:
        """Nothing goes wrong any more: every trial comes to its end."""
        if not hasattr(self, "auditor"):
            return
        self.tell(m.SearchExhausted())
        for node in self.nodes:
            self.offer(node, 2.0, None)
        for _ in range(400):
            if self.runner.is_finished:
                return
            self.settle()
        raise AssertionError(f"I6: there are still {self.runner.live}")

    def settle(self) -> None:
        for node in list(self.nodes):
            if node.instance_id in self.runner.away:
                self.hear(node)
            self.say_again_what_was_not_taken(self.nodes.index(node))
            while node.in_flight:
                node.obey(node.in_flight.pop())
            while node.uploads:
                self.an_upload_ends(self.with_uploads(node), is_lost=False)
            for key, process in list(node.processes.items()):
                if not process.is_over:
                    place = self.processes().index((node, key))
                    self.report(place, saves=False)
                if process.is_over:
                    self.a_process_is_gone(self.processes(over=True).index((node, key)))
            while self.unread(node):
                readers = [one for one in self.nodes if self.unread(one)]
                self.read(readers.index(node), 1000, 0, None)
        for instance_id in set(self.runner.away) - {node.instance_id for node in self.nodes}:
            self.tell(m.NodeLost(instance_id, "drawn", is_dead=True))
        self.tick(200.0)
        while any(self.runner.waiting()):
            self.choose(0)

    def with_uploads(self, node: Node) -> int:
        return [one for one in self.nodes if one.uploads].index(node)


Drawn.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)

TestDrawn = Drawn.TestCase
