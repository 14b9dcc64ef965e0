"""`CeleryTrialExecutor`: runs trials on nodes that are reached through Redis.

Orders are kept as what each node is *to host* and go out whole, as one Celery task for each node
whose orders changed in a turn. Whatever gets lost, doubled or reordered on the way is mended by one
rule: a node that has not confirmed the newest version is sent it again. Facts come back through
streams.
"""

from __future__ import annotations

import base64
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from tunemq_scheduler.core.commands import DropNode
from tunemq_scheduler.executors.app import Publisher
from tunemq_scheduler.executors.generation import QUESTIONS, Generation
from tunemq_scheduler.executors.mailbox import Mailbox
from tunemq_scheduler.executors.mailed_orders import MailedOrders
from tunemq_scheduler.executors.redis_line import Command, RedisFull, RedisLine
from tunemq_scheduler.executors.redis_room import PROBE, RedisRoom, check_policy
from tunemq_scheduler.executors.roster import Roster, place_of
from tunemq_scheduler.executors.stream_reader import COUNT, StreamEntry, StreamReader
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_shared import defences, wire
from tunemq_shared import messages as m
from tunemq_shared.errors import BugError, WireError, WireUnavailable
from tunemq_shared.failpoints import failpoint

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

    def excuse_node(self) -> None:
        """A node died while it had trials: one of them may have done it, and is judged for it."""


class CeleryTrialExecutor(MailedOrders):
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
        super().__init__()
        self._roster = Roster(term)
        self._backing = backing
        self._connect_within = connect_within
        self._line = RedisLine(url)
        self._reading_line = RedisLine(url)
        self._publisher = Publisher(url)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._reader: StreamReader | None = None
        self._generation: Generation | None = None
        #: Entries that were read and are not journalled yet: id, incarnation, number of the last
        #: event.
        self._unreleased: deque[tuple[bytes, str, int]] = deque()
        #: Incarnations that are dead once their last events are read: the entry that said so, and
        #: why.
        self._departed: dict[str, tuple[bytes, str]] = {}
        self._look_due = 0.0
        self._room = RedisRoom()
        self._away_since: float | None = None
        self._away_because = ""
        self._retry_due = 0.0

    # --- the experiment's beginning and end -------------------------------------------------------

    def open(self, plan: ExperimentPlan) -> None:
        """Reach Redis and make the experiment's stream.

        Raises:
            WireUnavailable: Redis cannot be reached for ``connect_within`` seconds.
            ConfigError: it would delete what is ours when its memory is used up.
        """
        self._plan = plan
        self._roster.events_key = plan.events_key
        self._generation = Generation(self._line, plan.events_key)
        self._reader = StreamReader(self._reading_line, (plan.events_key, wire.NODES))
        started = time.monotonic()
        while True:
            try:
                self._link()
                self._roster.news += check_policy(self._line)
            except (WireUnavailable, RedisFull) as error:
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
            if not node.mailbox.is_empty or node.journalled:
                # Also one that hosts nothing now: it may keep copies of checkpoints.
                self._roster.over(incarnation)
            if not node.mailbox.is_empty or node.mailbox.is_outdated:
                node.mailbox.clear()
                told.append(wire.queue(incarnation))
            self._roster.commands.append(self._roster.expiry(incarnation))
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

    def reattach(
        self,
        nodes: Iterable[m.NodeJoined],
        away: Iterable[m.NodeJoined],
        accepted: Mapping[str, int],
    ) -> None:
        """Watch the leases of nodes that the runner knows; see `TrialExecutor.reattach`."""
        for node in nodes:
            self._roster.expect(node, accepted.get(node.incarnation, 0))
        for node in away:
            since = time.monotonic()
            self._roster.expect(node, accepted.get(node.incarnation, 0), away_since=since)

    def drop_node(self, order: DropNode) -> None:
        """Forget a node that is dead."""
        self._roster.bury(order.incarnation, "it was lost")

    def on_step_end(self) -> None:
        """Send each node whose orders changed its new assignment."""
        for node in self._roster.nodes.values():
            if node.mailbox.is_changed and node.takes_orders:
                self._send_orders(node.mailbox)

    def _mailbox(self, incarnation: str) -> Mailbox | None:
        node = self._roster.nodes.get(incarnation)
        return node.mailbox if node is not None else None

    def _send_orders(self, mailbox: Mailbox, *, again: bool = False) -> None:
        if self._away_since is not None:  # when Redis is back, all that has changed is sent
            return
        assignment = mailbox.same_assignment() if again else mailbox.next_assignment()
        payload = base64.b64encode(m.encode(assignment)).decode()
        incarnation = mailbox.incarnation
        failpoint("orders.before_send")
        try:
            self._publisher.publish(incarnation, f"{incarnation}/{mailbox.stamp}", payload)
            failpoint("orders.after_send")
        except WireUnavailable as error:
            mailbox.is_changed = True
            self._lost_link(error)
            return
        except RedisFull as error:
            mailbox.is_changed = True
            self._is_full(error)
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
                if self._roster.has_gap and self._opened_generation.renew():
                    self._begin_generation()
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
        for entry_id, fields in taken.pop(wire.NODES.encode(), ()):
            if (goodbye := fields.get(wire.BYE)) is not None:
                incarnation = self._roster.read_goodbye(entry_id, goodbye)
                self._departed[incarnation] = entry_id, "it took its leave"
            else:
                hello = fields.get(wire.HELLO, b"")
                for incarnation in self._roster.read_hello(entry_id, hello):
                    self._departed[incarnation] = entry_id, wire.STARTED_AGAIN
        events = taken.get(self._opened_plan.events_key.encode(), [])
        for entry_id, fields in events:
            self._unreleased.append((entry_id, *self._roster.read_batch(entry_id, fields)))
        self._bury_departed(events[-1][0] if len(events) >= COUNT else None)

    def _bury_departed(self, read: bytes | None) -> None:
        """Lose who said that it ends, and whose last events, appended before that, are read.

        Args:
            read: the newest entry of our stream that was read; None when there are no more.
        """
        for incarnation, (entry_id, why) in list(self._departed.items()):
            # Within a millisecond the numbers of two streams say nothing about their order.
            if read is None or place_of(read)[0] > place_of(entry_id)[0]:
                del self._departed[incarnation]
                if why == wire.STARTED_AGAIN:
                    self._excuse(incarnation)
                self._roster.lose(incarnation, why, is_dead=True)

    def _excuse(self, incarnation: str) -> None:
        mailbox = self._mailbox(incarnation)
        if self._backing is not None and mailbox is not None and not mailbox.is_empty:
            self._backing.excuse_node()

    def _admit(self) -> None:
        """Look at leases out of turn if a node waits to be announced: it can have work at once."""
        if any(node.is_awaited for node in self._roster.nodes.values()):
            self._look_at_leases()

    def release(self, accepted: dict[str, int]) -> None:
        """Tell nodes how far their events are journalled, and trim the stream."""
        self._roster.journalled(accepted)
        self._trim(accepted)
        self._roster.settle()
        self.on_step_end()
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
        """While Redis is away or full, that it is."""
        if self._away_since is None:
            return self._room.notes()
        seconds = time.monotonic() - self._away_since
        away = f"Redis has been away for {seconds:.0f} s ({self._away_because})"
        return [f"{away} The trials go on; their results come when it is back."]

    def news(self) -> list[str]:
        """What happened to nodes, and to an embedded farm, since the last call."""
        news, self._roster.news = self._roster.news + self._room.news(), []
        return news + self._backing.news() if self._backing is not None else news

    # --- the link to Redis ------------------------------------------------------------------------

    @property
    def _opened_reader(self) -> StreamReader:
        if self._reader is None:
            raise BugError("the executor was used before it was opened")
        return self._reader

    @property
    def _opened_generation(self) -> Generation:
        if self._generation is None:
            raise BugError("the executor was used before it was opened")
        return self._generation

    def _link(self) -> None:
        """(Re)connect, and repeat what may have been lost."""
        self._line.connect()
        if self._opened_generation.begins_with_link():
            self._begin_generation()
        self._roster.start_anew()
        self._opened_reader.ask()

    def _begin_generation(self) -> None:
        """The wire is new to us: read from the beginning, tell everybody everything."""
        if self._opened_generation.begun > 1:
            self._roster.news.append("Redis lost data; what was not recorded yet is sent again.")
        self._unreleased.clear()
        self._roster.begin_anew()
        self._opened_reader.rewind()

    def _look(self) -> None:
        """Twice a second: the generation, the leases, and who has not taken their newest orders."""
        self._look_at_leases()
        for node in self._roster.nodes.values():
            mailbox = node.mailbox
            if not node.takes_orders:
                continue
            if mailbox.is_changed or mailbox.is_outdated:
                self._send_orders(mailbox)
            elif defences.RESEND and mailbox.renewals_unconfirmed >= _RENEWALS_UNTIL_RESENT:
                self._send_orders(mailbox, again=True)

    def _look_at_leases(self) -> None:
        keys = self._roster.lease_keys()
        commands = [PROBE, *self._opened_generation.questions]
        commands += [("MGET", *keys)] if keys else []
        try:
            _, *answers = self._line.ask(commands)
        except RedisFull as error:
            self._is_full(error)
            return
        if self._room.is_back():
            self._roster.start_anew()
        if self._opened_generation.begins(answers[:QUESTIONS]):
            self._begin_generation()
        for leases in answers[QUESTIONS:]:
            self._roster.read_leases(time.monotonic(), leases)

    def _guarded(self, commands: Sequence[Command]) -> Sequence[Command]:
        """What is sent to Redis to have these done; in a farm, only while nobody replaced us."""
        return commands

    def _post_commands(self) -> None:
        if self._roster.commands:
            try:
                self._line.post(self._guarded(self._roster.commands))
            except RedisFull as error:  # those before: what they said is said again when it may
                self._is_full(error)
                self._line.post(self._guarded(self._roster.commands))
            self._roster.commands = []

    def _is_full(self, error: WireError) -> None:
        """Redis takes nothing; no lease either, so nobody's silence means anything."""
        self._room.is_used_up(error)
        self._roster.forget_silence()

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
