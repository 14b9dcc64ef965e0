"""The pure runner, with nodes that keep the rules: which of everything comes next is drawn.

What travels stays under way until it is drawn: orders are lost, doubled and overtaken, events come
late, again, and those of one node before those of another. After each step all invariants hold; in
the end, when nothing goes wrong any more, every trial comes to its end.
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
from tunemq_scheduler.transport.desired_state_orders import DesiredStateExecutor
from tunemq_shared.protocol import messages as m

LAST_STEP = 6
NODES = 2
MOST_TRIALS = 5
PICK = st.integers(0, 1000)


def pick(among: Sequence[Any], place: int) -> Any:
    return among[place % len(among)]


@dataclass
class Host:
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
    incarnation: str
    mailbox: DesiredState
    taken: tuple[int, int] = (0, 0)
    offers: int = 0
    hosts: dict[tuple[str, int], Host] = field(default_factory=dict)
    over: set[tuple[str, int]] = field(default_factory=set)
    starts: dict[tuple[str, int], m.TrialSpec] = field(default_factory=dict)
    said: list[m.NodeEvent] = field(default_factory=list)
    uploads: list[m.CheckpointWritten] = field(default_factory=list)
    #: Orders on their way.
    mail: list[m.Assignment] = field(default_factory=list)

    def obey(self, assignment: m.Assignment) -> None:
        if (assignment.term, assignment.version) <= self.taken:
            return
        self.taken = assignment.term, assignment.version
        wanted = {(order.trial, order.epoch): order for order in assignment.orders}
        self.over &= wanted.keys()
        for key in self.hosts.keys() - wanted.keys():
            self.hosts[key].is_over = True
        for key, order in wanted.items():
            if order.start is not None:
                self.starts[key] = order.start
            host = self.hosts.get(key)
            if host is not None:
                host.run_until = order.run_until
                host.is_pausing, host.at_checkpoint = order.pause, order.at_checkpoint
                host.is_over = host.is_over or order.stop or order.kill
            elif key not in self.over and (order.stop or order.kill):
                self.over.add(key)
                self.said.append(m.SlotFreed(*key))
            elif key not in self.over and key in self.starts:
                self.start(key, order)

    def start(self, key: tuple[str, int], order: m.TrialOrder) -> None:
        assert sum(1 for _ in self.hosts) < 2, "more hosts than slots"
        start = self.starts[key]
        step = start.restore[0].step if start.restore else 0
        self.hosts[key] = Host(
            step, start.last_step, order.run_until, order.pause, order.at_checkpoint
        )
        self.said.append(m.TrialStarted(*key, 1, "host", "127.0.0.1", 0.0))

    def end(self, key: tuple[str, int], *events: m.NodeEvent) -> None:
        self.hosts[key].is_over = True
        self.said += events


class Mailed(CeleryTrialExecutor):
    """Puts orders into the mailboxes of these nodes; others send them."""

    def __init__(self, nodes: list[Node]) -> None:
        DesiredStateExecutor.__init__(self)
        self._plan, self._nodes = PLAN, nodes

    def on_step_end(self) -> None:
        """Whoever has the mailboxes sends what is in them."""

    def _put(self, incarnation: str, order: m.TrialOrder) -> None:
        for node in self._nodes:
            if node.incarnation == incarnation:
                node.mailbox.orders(PLAN.events_key).put(order)

    def _release(self, incarnation: str, trial: str, epoch: int) -> None:
        for node in self._nodes:
            if node.incarnation == incarnation:
                node.mailbox.orders(PLAN.events_key).release(trial, epoch)


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
        self.entries: list[m.JournalRecord] = []
        self.nodes: list[Node] = []
        self.mailed = Mailed(self.nodes)
        self.every: dict[str, Node] = {}
        self.term, self.lives, self.clock = 1, 0, 0.0
        for number in range(NODES):
            self.join(f"node-{number}")
        self.suggest()

    @property
    def runner(self) -> TrialRunner:
        return self.auditor.runner

    def stated(self, incarnation: str, number: int) -> m.NodeEvent:
        return self.every[incarnation].said[number - 1]

    def tell(self, event: m.Event, *answers: m.AlgorithmAnswer) -> None:
        self.entries.append(m.JournalRecord(event, answers))
        self.perform(self.auditor.event(event, answers))

    def perform(self, commands: Sequence[c.Command]) -> None:
        self.mailed.perform([one for one in commands if isinstance(one, c.ExecutorCommand)])
        self.post()

    def post(self) -> None:
        for node in self.nodes:
            if node.mailbox.is_changed and node.incarnation in self.runner.nodes:
                node.mail.append(node.mailbox.next_assignment())

    def join(self, name: str) -> None:
        self.lives += 1
        node = Node(name, f"{name}.{self.lives}", DesiredState(f"{name}.{self.lives}", self.term))
        self.nodes.append(node)
        self.every[node.incarnation] = node
        shared = self.lives % 2 == 0
        joined = m.NodeJoined(node.incarnation, name, name, "127.0.0.1", {"cpu": 2.0}, (), shared)
        self.tell(joined)
        if shared:
            self.offer(node, 2.0, None)

    def offer(self, node: Node, cpus: float, grace_s: float | None) -> None:
        node.offers += 1
        self.tell(
            m.NodeOffered(node.incarnation, node.offers, {"cpu": cpus}, preempt_grace_s=grace_s)
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
            again = replay(self.settings, self.entries)
        self.auditor.same_as(again)
        self.term += 1
        self.mailed = Mailed(self.nodes)
        if cold:
            self.nodes.clear()
        for node in self.nodes:
            node.mailbox = DesiredState(node.incarnation, self.term, node.taken[1])
        self.tell(m.ExperimentResumed(self.term, 0.0, errored=errored, is_cold=cold))
        if cold:
            for number in range(NODES):
                self.join(f"node-{number}")
        else:
            self.perform(self.runner.standing_orders())

    # --- the wire ---------------------------------------------------------------------------------

    @precondition(lambda self: any(node.mail for node in self.nodes))
    @rule(which=PICK, place=PICK, fate=st.sampled_from(["comes", "comes", "again", "lost"]))
    def deliver(self, which: int, place: int, fate: str) -> None:
        node = pick([node for node in self.nodes if node.mail], which)
        mail = pick(node.mail, place)
        if fate != "lost":
            node.obey(mail)
        if fate != "again":
            node.mail.remove(mail)

    @rule(which=PICK)
    def say_again_what_was_not_taken(self, which: int) -> None:
        if self.nodes:
            node = pick(self.nodes, which)
            if node.incarnation in self.runner.nodes and node.mailbox.version:
                node.mail.append(node.mailbox.same_assignment())

    @precondition(lambda self: any(self.unread(node) for node in self.nodes))
    @rule(
        which=PICK,
        count=st.integers(1, 4),
        doubled=st.integers(0, 3),
        decision=st.sampled_from([None] * 6 + [m.PAUSE, m.STOP]),
    )
    def read(self, which: int, count: int, doubled: int, decision: str | None) -> None:
        """A batch comes, of which the first were read before: those the loop drops."""
        node = pick([node for node in self.nodes if self.unread(node)], which)
        accepted = self.runner.accepted.get(node.incarnation, 0)
        first = max(1, accepted + 1 - doubled)
        events = node.said[first - 1 : accepted + count]
        if node.incarnation in self.runner.away:
            self.hear(node)
        last = first - 1 + len(events)
        self.tell(m.BatchRead(node.incarnation, accepted + 1, last, "0-0"))
        for event in events[accepted + 1 - first :]:
            answers: list[m.AlgorithmAnswer] = []
            if isinstance(event, m.ResultReported) and decision and self.is_due(event):
                answers.append(m.DecisionMade(event.trial, event.step, decision, "drawn"))
            self.tell(event, *answers)

    def is_due(self, event: m.ResultReported) -> bool:
        return self.runner.review(event).name == "DUE"

    def unread(self, node: Node) -> bool:
        return len(node.said) > self.runner.accepted.get(node.incarnation, 0)

    def hear(self, node: Node) -> None:
        node.mailbox.start_over()
        node.mailbox.orders(PLAN.events_key).settle()
        node.mailbox.is_changed = False
        self.tell(m.NodeReturned(node.incarnation))
        node.mailbox.is_changed = True
        self.post()

    # --- nodes ------------------------------------------------------------------------------------

    @rule(which=PICK)
    def lose_a_node(self, which: int) -> None:
        if self.runner.nodes:
            self.tell(m.NodeLost(pick(sorted(self.runner.nodes), which), "drawn"))

    @precondition(lambda self: self.runner.away)
    @rule(which=PICK)
    def a_node_returns(self, which: int) -> None:
        incarnation = pick(sorted(self.runner.away), which)
        node = next((one for one in self.nodes if one.incarnation == incarnation), None)
        if node is not None:
            self.hear(node)

    @precondition(lambda self: self.nodes)
    @rule(which=PICK)
    def a_node_is_started_again(self, which: int) -> None:
        node = pick(self.nodes, which)
        self.nodes.remove(node)
        self.tell(m.NodeLost(node.incarnation, "drawn", is_dead=True))
        self.join(node.name)

    @precondition(lambda self: any(node.offers for node in self.nodes))
    @rule(
        which=PICK,
        cpus=st.sampled_from([0.0, 1.0, 2.0]),
        grace_s=st.sampled_from([None, 0.0, 30.0]),
    )
    def something_else_is_offered(self, which: int, cpus: float, grace_s: float | None) -> None:
        self.offer(pick([node for node in self.nodes if node.offers], which), cpus, grace_s)

    # --- hosts ------------------------------------------------------------------------------------

    def hosts(self, *, over: bool = False) -> list[tuple[Node, tuple[str, int]]]:
        return [
            (node, key)
            for node in self.nodes
            for key, host in node.hosts.items()
            if host.is_over == over
        ]

    @precondition(lambda self: self.hosts())
    @rule(which=PICK, saves=st.booleans())
    def report(self, which: int, saves: bool) -> None:
        node, key = pick(self.hosts(), which)
        host = node.hosts[key]
        if host.waits:
            return
        host.step += 1
        done = host.step >= LAST_STEP
        told = m.ResultReported(*key, host.step, {}, 0.0, 1.0, 1.0, 1.0, host.step, done=done)
        node.said.append(told)
        does_save = saves or (host.is_pausing and not host.at_checkpoint)
        if does_save:
            trial, epoch = key
            name = f"{trial}/checkpoint_{epoch}-{host.step:06d}"
            written = m.CheckpointWritten(*key, host.step, host.step, name, "w", 1)
            node.said.append(written)
            node.uploads.append(written)
        if done:
            node.end(key, m.TrialFinished(*key))
        elif host.is_pausing and does_save:
            node.end(key, m.TrialPaused(*key))

    @precondition(lambda self: any(node.uploads for node in self.nodes))
    @rule(which=PICK, is_lost=st.sampled_from([False, False, True]))
    def an_upload_ends(self, which: int, is_lost: bool) -> None:
        node = pick([node for node in self.nodes if node.uploads], which)
        one = node.uploads.pop(0)
        if is_lost:
            node.said.append(m.CheckpointLost(one.trial, one.epoch, one.key, "drawn", 0.0))
        else:
            fields = (one.trial, one.epoch, one.n, one.step, one.key, "c", 1)
            node.said.append(m.CheckpointCommitted(*fields))

    @precondition(lambda self: self.hosts())
    @rule(which=PICK, kind=st.sampled_from(["died", "user", "storage"]))
    def kill_a_host(self, which: int, kind: str) -> None:
        node, key = pick(self.hosts(), which)
        died = m.TrialProcessDied(*key, 1, 9, None, 0.0)
        node.end(key, died if kind == "died" else m.TrialFailed(*key, kind, "drawn", "", 0.0))

    @precondition(lambda self: self.hosts(over=True))
    @rule(which=PICK)
    def a_host_is_gone(self, which: int) -> None:
        node, key = pick(self.hosts(over=True), which)
        del node.hosts[key]
        node.over.add(key)
        node.said.append(m.SlotFreed(*key))

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def all_invariants_hold(self) -> None:
        if hasattr(self, "auditor"):
            self.auditor.check()

    @invariant()
    def whoever_gives_way_runs(self) -> None:
        if hasattr(self, "auditor"):
            for trial in self.runner.giving_way:
                assert self.runner.live[trial].status == "RUNNING"

    @invariant()
    def the_farm_is_told_what_is_held(self) -> None:
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
            if node.incarnation in self.runner.away:
                self.hear(node)
            self.say_again_what_was_not_taken(self.nodes.index(node))
            while node.mail:
                node.obey(node.mail.pop())
            while node.uploads:
                self.an_upload_ends(self.with_uploads(node), is_lost=False)
            for key, host in list(node.hosts.items()):
                if not host.is_over:
                    place = self.hosts().index((node, key))
                    self.report(place, saves=False)
                if host.is_over:
                    self.a_host_is_gone(self.hosts(over=True).index((node, key)))
            while self.unread(node):
                readers = [one for one in self.nodes if self.unread(one)]
                self.read(readers.index(node), 1000, 0, None)
        for incarnation in set(self.runner.away) - {node.incarnation for node in self.nodes}:
            self.tell(m.NodeLost(incarnation, "drawn", is_dead=True))
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
