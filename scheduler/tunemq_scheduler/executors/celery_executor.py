"""`CeleryTrialExecutor`: runs trials on nodes that are reached through Redis.

Orders are kept as what each node is *to host* and go out whole, as one Celery task for each node
whose orders changed in a turn. Whatever gets lost, doubled or reordered on the way is mended by one
rule: a node that has not confirmed the newest version is sent it again. Facts come back through
streams.
"""

from __future__ import annotations

import base64
import os
import secrets
import time
from collections import deque
from typing import Final, Protocol

from tunemq_scheduler.core.commands import (
    ContinueTrial,
    DropNode,
    PauseTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.executors.app import Publisher
from tunemq_scheduler.executors.executor import TrialExecutor
from tunemq_scheduler.executors.mailbox import Mailbox
from tunemq_scheduler.executors.redis_line import RedisLine
from tunemq_scheduler.executors.roster import Roster
from tunemq_scheduler.executors.stream_reader import StreamEntry, StreamReader
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_shared import messages as m
from tunemq_shared import wire
from tunemq_shared.errors import BugError, WireError, WireUnavailable

#: Leases and the generation are looked at this often.
_LOOK_EVERY_S: Final = wire.LEASE_PERIOD_S / 2
#: An order that was not confirmed by the first renewal after it was sent is sent again: it may have
#: died with the ear that had read it. One that was only on its way does no harm twice.
_RENEWALS_UNTIL_RESENT: Final = 1
#: Pauses between attempts to reach a Redis that is away.
_RETRY_EVERY_S: Final = 0.1
#: What a dead incarnation would have fetched, or a finished experiment's node appended, goes after
#: so long.
_EXPIRES_S: Final = 60
#: How long `close` waits for nodes to fetch the news that nothing is wanted any more.
_GOODBYE_S: Final = 1.5


class Backing(Protocol):
    """What keeps Redis and the nodes alive, where that is ours: the embedded farm."""

    def trouble(self) -> str | None:
        """Why it will never work again, if so."""

    def news(self) -> list[str]:
        """What happened since the last call that a person should know."""


class CeleryTrialExecutor(TrialExecutor):
    """The backend of real experiments; for one experiment.

    Args:
        url: where Redis is: ``unix://``, ``redis://`` or ``rediss://``.
        term: greater than that of every scheduler these nodes obeyed before.
        backing: asked once a second whether there is hope, and for notes.
        connect_within: how many seconds `open` tries to reach Redis.
    """

    def __init__(
        self,
        url: str,
        *,
        term: int,
        backing: Backing | None = None,
        connect_within: float = 10.0,
    ) -> None:
        self._term = term
        self._backing = backing
        self._connect_within = connect_within
        self._line = RedisLine(url)
        self._reading_line = RedisLine(url)
        self._publisher = Publisher(url)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._plan: ExperimentPlan | None = None
        self._reader: StreamReader | None = None
        self._generation: bytes | None = None
        self._roster = Roster(term)
        #: Entries that were read and are not journalled yet: id, incarnation, number of the last
        #: event.
        self._unreleased: deque[tuple[bytes, str, int]] = deque()
        self._look_due = 0.0
        self._away_since: float | None = None
        self._away_because = ""
        self._retry_due = 0.0

    # --- the experiment's beginning and end -------------------------------------------------------

    def open(self, plan: ExperimentPlan) -> None:
        """Reach Redis and make the experiment's stream.

        Raises:
            WireUnavailable: Redis cannot be reached for ``connect_within`` seconds.
        """
        self._plan = plan
        self._roster.events_key = plan.events_key
        self._reader = StreamReader(self._reading_line, (plan.events_key, wire.NODES))
        started = time.monotonic()
        while True:
            try:
                self._link()
            except WireUnavailable as error:
                tried = time.monotonic() - started
                if tried >= self._connect_within:
                    raise WireUnavailable(f"{error} Tried for {tried:.1f} s.") from error
                time.sleep(_RETRY_EVERY_S)  # there is nothing else to do yet
            else:
                return

    def close(self, *, now: bool = False) -> None:
        """End what still runs of this experiment, and leave no key of it without an expiry."""
        if self._wake_writer < 0:
            return
        try:
            if self._plan is not None and self._away_since is None:
                self._say_goodbye(self._plan, now=now)
        except WireError:
            # Nobody is left to tell. An embedded farm ends with the script; a farm's nodes give up
            # an experiment whose scheduler has ended.
            pass
        finally:
            self._publisher.close()
            self._line.close()
            self._reading_line.close()
            descriptors = self._wake_reader, self._wake_writer
            self._wake_reader = self._wake_writer = -1
            for descriptor in descriptors:
                os.close(descriptor)

    def _say_goodbye(self, plan: ExperimentPlan, *, now: bool) -> None:
        self._line.connect()
        told: list[str] = []
        for incarnation, node in self._roster.nodes.items():
            if not node.mailbox.is_empty or node.mailbox.is_outdated:
                if not node.mailbox.is_empty:
                    self._roster.over(incarnation)
                node.mailbox.clear()
                told.append(wire.queue(incarnation))
        # Before the orders: a node looks whether its rest is wanted until its last host is gone.
        self._post_commands()
        self.on_step_end()
        self._roster.commands.append(("EXPIRE", plan.events_key, str(_EXPIRES_S)))
        self._post_commands()
        deadline = time.monotonic() + (0.0 if now else _GOODBYE_S)
        while any(self._line.ask([("LLEN", queue) for queue in told])):
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)  # a queue has no way to tell that it was emptied

    # --- orders -----------------------------------------------------------------------------------

    def start_trial(self, order: StartTrial) -> None:
        """Have a node host a trial."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            start = self._opened_plan.host_start(order)
            mailbox.start(order.trial, order.epoch, order.run_until, start)

    def continue_training(self, order: ContinueTrial) -> None:
        """Let a hosted trial run on."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            mailbox.move_horizon(order.trial, order.epoch, order.run_until)

    def stop_trial(self, order: StopTrial) -> None:
        """Have a hosted trial ended."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            mailbox.stop(order.trial, order.epoch)

    def pause_trial(self, order: PauseTrial) -> None:
        """Have a hosted trial saved and ended, to go on later."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            mailbox.pause(order.trial, order.epoch)

    def release_trial(self, order: ReleaseTrial) -> None:
        """Forget a trial whose host is gone; the node hears of it with its next orders."""
        mailbox = self._mailbox(order.incarnation)
        if mailbox is not None:
            mailbox.release(order.trial, order.epoch)

    def drop_node(self, order: DropNode) -> None:
        """Forget a lost node."""
        self._roster.bury(order.incarnation, "it was lost")

    def on_step_end(self) -> None:
        """Send each node whose orders changed its new assignment."""
        for node in self._roster.nodes.values():
            if node.mailbox.is_changed and node.is_joined:
                self._send_orders(node.mailbox)

    def _mailbox(self, incarnation: str) -> Mailbox | None:
        """The mailbox of a node; None when it was lost since, which the runner is about to read."""
        node = self._roster.nodes.get(incarnation)
        return node.mailbox if node is not None else None

    def _send_orders(self, mailbox: Mailbox, *, again: bool = False) -> None:
        if self._away_since is not None:  # when Redis is back, all that has changed is sent
            return
        assignment = mailbox.same_assignment() if again else mailbox.next_assignment()
        payload = base64.b64encode(m.encode(assignment)).decode()
        incarnation = mailbox.incarnation
        try:
            self._publisher.publish(incarnation, f"{incarnation}/{mailbox.stamp}", payload)
        except WireUnavailable as error:
            mailbox.is_changed = True
            self._lost_link(error)
            return
        self._roster.commands += (
            ("EXPIRE", wire.queue(incarnation), str(_EXPIRES_S)),
            ("HSET", wire.reply(incarnation), "v", mailbox.stamp),
        )

    # --- facts ------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[m.Event]:
        """What nodes stated and what became of them; see `TrialExecutor.poll`.

        Raises:
            WireUnavailable: the embedded farm cannot be brought back to life.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._attend()
            is_woken = self._wait(deadline)
            if self._roster.facts or is_woken or time.monotonic() >= deadline:
                facts, self._roster.facts = self._roster.facts, []
                return facts

    def _attend(self) -> None:
        """Do what is due: link, send what waits, look at leases, ask for entries."""
        now = time.monotonic()
        if self._away_since is not None and now < self._retry_due:
            return
        if now >= self._look_due:
            self._ask_backing()
        try:
            if self._away_since is not None:
                self._link()
                self._away_since = None
                self.on_step_end()
            if now >= self._look_due:
                self._look_due = now + _LOOK_EVERY_S
                self._look()
            self._post_commands()
            self._opened_reader.ask()
        except WireError as error:
            self._lost_link(error)

    def _wait(self, deadline: float) -> bool:
        """Wait for entries, a wake-up, or what is due next; returns whether it was a wake-up."""
        due = self._look_due if self._away_since is None else self._retry_due
        pause = 0.0 if self._roster.facts else min(deadline, due) - time.monotonic()
        has_entries, is_woken = self._opened_reader.wait(pause, self._wake_reader)
        if is_woken:
            os.read(self._wake_reader, 4096)
        if has_entries:
            try:
                self._take(self._opened_reader.take())
                self._admit()
            except WireError as error:
                self._lost_link(error)
        return is_woken

    def wake(self) -> None:
        """Make a waiting `poll` return at once; for any thread or signal handler."""
        try:
            os.write(self._wake_writer, b"!")
        except OSError:  # full: it wakes already; or closed: nobody waits
            return

    def _take(self, taken: dict[bytes, list[StreamEntry]]) -> None:
        superseded: list[str] = []
        for entry_id, fields in taken.pop(wire.NODES.encode(), ()):
            superseded += self._roster.read_hello(entry_id, fields.get(wire.HELLO, b""))
        for entries in taken.values():
            for entry_id, fields in entries:
                self._unreleased.append((entry_id, *self._roster.read_batch(entry_id, fields)))
        for incarnation in superseded:  # after its last events, which were appended before
            self._roster.lose(incarnation, "its node was started again")

    def _admit(self) -> None:
        """Look at leases out of turn if a node waits to be announced: it can have work at once."""
        if any(not node.is_joined for node in self._roster.nodes.values()):
            self._look_at_leases()

    def release(self, accepted: dict[str, int]) -> None:
        """Tell nodes how far their events are journalled, and trim the stream."""
        self._roster.journalled(accepted)
        self._trim(accepted)
        if self._away_since is None:
            try:
                self._post_commands()
            except WireError as error:
                self._lost_link(error)

    def _trim(self, accepted: dict[str, int]) -> None:
        behind = b""
        while self._unreleased:
            entry_id, incarnation, last = self._unreleased[0]
            if incarnation in self._roster.nodes and accepted.get(incarnation, 0) < last:
                break
            behind = entry_id
            self._unreleased.popleft()
        if behind:
            milliseconds, _, number = behind.decode().partition("-")
            first_kept = f"{milliseconds}-{int(number) + 1}"
            self._roster.commands.append(
                ("XTRIM", self._opened_plan.events_key, "MINID", first_kept)
            )

    def notes(self) -> list[str]:
        """While Redis is away, that it is."""
        if self._away_since is None:
            return []
        seconds = time.monotonic() - self._away_since
        away = f"Redis has been away for {seconds:.0f} s ({self._away_because})"
        return [f"{away} The trials go on; their results come when it is back."]

    def news(self) -> list[str]:
        """What happened to nodes, and to an embedded farm, since the last call."""
        news, self._roster.news = self._roster.news, []
        return news + self._backing.news() if self._backing is not None else news

    # --- the link to Redis ------------------------------------------------------------------------

    @property
    def _opened_plan(self) -> ExperimentPlan:
        if self._plan is None:
            raise BugError("the executor was used before it was opened")
        return self._plan

    @property
    def _opened_reader(self) -> StreamReader:
        if self._reader is None:
            raise BugError("the executor was used before it was opened")
        return self._reader

    def _link(self) -> None:
        """(Re)connect, and repeat what may have been lost."""
        self._line.connect()
        (generation,) = self._line.ask([("GET", wire.GENERATION)])
        self._check_generation(generation)
        self._roster.start_anew()
        self._opened_reader.ask()

    def _check_generation(self, generation: bytes | None) -> None:
        if generation is not None and generation == self._generation:
            return
        # The wire is new to us: make the stream, read from the beginning, tell everybody
        # everything. The stream is there before the generation that nodes wait for, so that none
        # finds it missing.
        key = self._opened_plan.events_key
        self._line.ask(
            [  # nodes append to existing streams only; this is how an empty one is made
                ("XGROUP", "CREATE", key, "maker", "$", "MKSTREAM"),
                ("XGROUP", "DESTROY", key, "maker"),
            ]
        )
        if generation is None:
            fresh = secrets.token_hex(8)
            commands = [("SET", wire.GENERATION, fresh, "NX"), ("GET", wire.GENERATION)]
            generation = self._line.ask(commands)[1]
        self._generation = generation
        self._unreleased.clear()
        self._opened_reader.rewind()
        self._roster.start_anew()
        for node in self._roster.nodes.values():
            node.mailbox.lose_confirmation()

    def _look(self) -> None:
        """Once a second: the generation, the leases, and who has not taken their newest orders."""
        self._look_at_leases()
        for node in self._roster.nodes.values():
            mailbox = node.mailbox
            if not node.is_joined:
                continue
            if mailbox.is_changed or mailbox.is_outdated:
                self._send_orders(mailbox)
            elif mailbox.renewals_unconfirmed >= _RENEWALS_UNTIL_RESENT:
                self._send_orders(mailbox, again=True)

    def _look_at_leases(self) -> None:
        keys = self._roster.lease_keys()
        commands = [("GET", wire.GENERATION), *([("MGET", *keys)] if keys else [])]
        generation, *leases = self._line.ask(commands)
        self._check_generation(generation)
        if leases:
            self._roster.read_leases(time.monotonic(), leases[0])

    def _post_commands(self) -> None:
        if self._roster.commands:
            self._line.post(self._roster.commands)
            self._roster.commands = []

    def _lost_link(self, error: WireError) -> None:
        """Redis is away, or refuses: go on without it, and try again soon.

        Raises:
            WireUnavailable: it is the embedded one, and it will not come back.
        """
        now = time.monotonic()
        self._retry_due = now + _RETRY_EVERY_S
        if self._away_since is None:
            self._away_since = now
        self._away_because = str(error)
        self._line.close()
        self._opened_reader.reset()
        self._publisher.close()
        self._ask_backing()

    def _ask_backing(self) -> None:
        trouble = self._backing.trouble() if self._backing is not None else None
        if trouble is not None:
            raise WireUnavailable(f"The embedded farm cannot be used any more: {trouble}.")
