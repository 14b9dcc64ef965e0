"""S02, S03, S15: the farm rejects each of ten thousand messages that are not honest and current.

Each message is forged, altered, replayed, too long, or of an old term, and of one of the existing
kinds. It goes to the objects that read this kind on a farm with keys. It changes nothing there, and
is counted once.
"""

from __future__ import annotations

import base64
import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.keys import key_folder, of_scheduler, of_worker
from tests.unit.scheduler.transport.nodes.test_node_registry import REGISTRATION
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.request_signing import close_request
from tunemq_scheduler.farm.service.done_requests import DoneRequests
from tunemq_scheduler.farm.service.farm_api import RequestCaller
from tunemq_scheduler.farm.service.request_server import RequestServer
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.protocol import message_limits as limits
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.farm_requests import MAX_REQUEST_BYTES, REQUESTS_VERSION
from tunemq_shared.protocol.registration import BatchHeader
from tunemq_shared.protocol.rejection_counter import RejectionCounter
from tunemq_shared.signing.message_signing import (
    KEY_ID_BYTES,
    SECRET_BYTES,
    MessageSigner,
    SigningKey,
)
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.trials.assignment_filter import AssignmentFilter

pytestmark = [pytest.mark.security, pytest.mark.slow]

MESSAGES = 10_000
NODE, OTHER = "inc1", "inc2"
STREAM, OTHER_STREAM = "tunemq:events:mine", "tunemq:events:another"
OWNER = "ann"
DONE, NEW = "d" * 32, "e" * 32
#: Numbers of the honest messages that were accepted before.
TERM, VERSION, NUMBER, RENEWALS = 3, 7, 5, 10


class Said(NamedTuple):
    """A message of a kind: its body, and the context that its signature covers."""

    body: bytes
    about: tuple[bytes, ...]


class Handler:
    """Records the requests that it must execute."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.methods = {r.StopExperiment: self._stop}

    def _stop(self, _request: r.StopExperiment, _caller: RequestCaller) -> a.RequestDone:
        self.asked.append("stop")
        return a.RequestDone(text="done")


class BothEnds:
    """A scheduler, one of its nodes, and the honest messages that they have exchanged."""

    def __init__(self, folder: Path) -> None:
        made = key_folder(folder / "keys", OWNER)
        self.keys = of_scheduler(made)
        self.rejections = RejectionCounter()
        self.transport = SchedulerSigning(self.keys, self.rejections)
        self.registry = NodeRegistry(TERM, rejections=self.rejections)
        self.channel = self.registry.channels[STREAM] = ExperimentChannel(STREAM)
        self.node = NodeSigning(NODE, of_worker(made), self.rejections)
        self.desired_state = AssignmentFilter(NODE, self.node)
        ((*_, self.challenge),) = self.transport.challenge(0.0)
        assert self.node.hear_challenge(self.challenge)
        self.handler = Handler()
        self.server = RequestServer(
            "redis://127.0.0.1:1/0",  # it is never asked
            self.handler,  # type: ignore[arg-type]
            DoneRequests(folder / "done"),
            lambda: TERM,
            self.keys,
            self.rejections.add,
        )
        self._stranger = SigningKey(os.urandom(KEY_ID_BYTES), os.urandom(SECRET_BYTES))
        #: The last delivered message of each kind.
        self.last: dict[str, bytes] = {}
        for kind in KINDS:
            honest = self.honest(kind)
            self.deliver(kind, self.message_signer(kind).close(honest.body, *honest.about), DONE)
        assert self.state() == (TERM, VERSION, NUMBER, RENEWALS, 3, ("stop",))
        assert self.rejections.counts() == ()

    # --- honest messages --------------------------------------------------------------------------

    def message_signer(self, kind: str) -> MessageSigner:
        """The signer of honest messages of this kind."""
        if kind in {"command", "reply"}:
            return self.keys.orders
        return self.keys.submitter(OWNER) if kind == "request" else self.keys.events

    def honest(self, kind: str, *, another: bool = False) -> Said:
        """An accepted message; or the same for another node and stream."""
        node = (OTHER if another else NODE).encode()
        stream = (OTHER_STREAM if another else STREAM).encode()
        said = SAYS[kind](node, stream, another)
        return said._replace(body=self.answering(said.body)) if kind == "lease" else said

    def answering(self, lease: bytes) -> bytes:
        """The lease with the scheduler's challenge, as a node writes it."""
        return b":".join((lease, self.keys.orders.open(self.challenge, b"challenge")))

    def signed_by_a_stranger(self, kind: str, said: Said) -> bytes:
        """Signed, with a key that is not the farm's."""
        return MessageSigner(self.message_signer(kind).purpose, [self._stranger]).close(
            said.body, *said.about
        )

    # --- receivers --------------------------------------------------------------------------------

    def deliver(self, kind: str, signed_message: bytes, request: str = NEW) -> None:
        """Have it read as it is read on a farm."""
        self.last[kind] = signed_message
        match kind:
            case "registration":
                said = self.transport.registration_entry({redis_keys.REGISTRATION: signed_message})
                if said is not None:
                    self.registry.read_registration(b"1-0", said.body)
            case "deregistration":
                assert (
                    self.transport.registration_entry({redis_keys.BYE: signed_message}) is None
                    or request == DONE
                )
            case "events":
                fields = self.transport.batch(
                    STREAM, {redis_keys.HEADER: signed_message, redis_keys.EVENTS: EVENTS}
                )
                if fields is not None:
                    self.registry.read_batch(self.channel, b"2-0", fields)
            case "lease":
                self.registry.read_leases(0.0, self.transport.leases({NODE: signed_message}))
            case "node_metrics":
                assert self.transport.node_metrics(NODE, signed_message) is None or request == DONE
            case "output":
                assert self.transport.output(STREAM, signed_message) is None or request == DONE
            case "command":
                self.desired_state.open(base64.b64encode(signed_message))
            case "reply":
                assert self.node.replies({"f": signed_message})["f"] == b"" or request == DONE
            case "request":
                self.server._take(entry(signed_message, request))
                self.server._unsent.clear()

    def state(self) -> tuple[Any, ...]:
        """All that a message could have changed."""
        node = self.registry.nodes[NODE]
        return (
            *self.desired_state.confirmed,
            node.number,
            self.transport._leases[NODE].renewals,
            self.channel.cursors[NODE].read,
            tuple(self.handler.asked),
        )

    def counted(self) -> int:
        """How many messages were refused."""
        return sum(times for _, _, times in self.rejections.counts())


def entry(signed_message: bytes, request: str) -> dict[bytes, bytes]:
    """A request as it lies in its stream."""
    return {
        b"v": str(REQUESTS_VERSION).encode(),
        b"tunemq": b"0.1",
        b"id": request.encode(),
        b"owner": OWNER.encode(),
        b"kind": b"stop",
        b"sent": sent().encode(),
        b"body": signed_message,
    }


# --- the kinds ------------------------------------------------------------------------------------


@functools.cache
def sent() -> str:
    """When the honest request was sent."""
    return str(int(time.time() * 1000))


EVENTS = m.encode([m.TrialFinished("t", 1)] * 3)


def _registration(node: bytes, _stream: bytes, _another: bool) -> Said:
    registration = msgspec.structs.replace(REGISTRATION, instance_id=node.decode(), number=NUMBER)
    return Said(m.encode(registration), (b"registration",))


def _events(node: bytes, stream: bytes, another: bool) -> Said:
    header = m.encode(BatchHeader(m.PROTOCOL_VERSION, NODE, 1, (TERM, VERSION)))
    return Said(header, (b"batch", stream, EVENTS))


def _assignment(node: bytes, _stream: bytes, _another: bool, **fields: int) -> Said:
    given = {"term": TERM, "version": VERSION, **fields}
    assignment = m.Assignment(m.PROTOCOL_VERSION, NODE, given["term"], given["version"], ())
    return Said(m.encode(assignment), (b"command", node))


def _request(_node: bytes, _stream: bytes, another: bool) -> Said:
    request = NEW if another else DONE
    return Said(
        msgspec.msgpack.encode(r.StopExperiment(name="exp")),
        (b"request", request.encode(), str(REQUESTS_VERSION).encode(), b"stop", sent().encode()),
    )


SAYS: dict[str, Callable[[bytes, bytes, bool], Said]] = {
    "registration": _registration,
    "lease": lambda node, *_: Said(b"%d:3:7" % RENEWALS, (b"lease", node)),
    "events": _events,
    "node_metrics": lambda node, *_: Said(b"\x80", (b"node_metrics", node)),
    "output": lambda _node, stream, _another: Said(b"\x80", (b"output", stream)),
    "deregistration": lambda node, *_: Said(node, (b"bye",)),
    "command": _assignment,
    "reply": lambda node, *_: Said(b"1", (b"reply", node, b"f")),
    "request": _request,
}
KINDS = tuple(SAYS)
LIMITS = {
    "registration": limits.REGISTRATION_BYTES,
    "lease": limits.LEASE_BYTES,
    "events": limits.HEADER_BYTES,
    "node_metrics": limits.NODE_METRICS_BYTES,
    "output": limits.OUTPUT_BYTES,
    "deregistration": limits.DEREGISTRATION_BYTES,
    "command": limits.COMMAND_BYTES,
    "reply": limits.REPLY_BYTES,
    "request": MAX_REQUEST_BYTES + 64,
}


# --- attacks --------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """Values drawn by hypothesis."""

    kind: str
    noise: bytes
    at: int


def forged(ends: BothEnds, drawn: Drawn) -> bytes:
    """A message by an attacker who knows the format and the keys' ids, but not the secrets."""
    said, message_signer = ends.honest(drawn.kind), ends.message_signer(drawn.kind)
    ways: list[Callable[[], bytes]] = [
        lambda: b"\0" + said.body,
        lambda: said.body,
        lambda: drawn.noise,
        lambda: b"\1" + message_signer.signer + os.urandom(32) + said.body,
        lambda: b"\1" + message_signer.signer + bytes(32) + drawn.noise,
        lambda: ends.signed_by_a_stranger(drawn.kind, said),
        # An attacker with other keys of this farm: a node cannot sign as scheduler, nor a
        # submitter.
        lambda: MessageSigner(message_signer.purpose, [_other_key(ends, drawn.kind)]).close(
            said.body, *said.about
        ),
    ]
    return ways[drawn.at % len(ways)]()


def _other_key(ends: BothEnds, kind: str) -> SigningKey:
    message_signer = (
        ends.keys.events if kind in {"command", "reply", "request"} else ends.keys.orders
    )
    ring = message_signer._ring
    assert ring.signer is not None
    return ring.signer


def altered(ends: BothEnds, drawn: Drawn) -> bytes:
    """An honest one with something changed on its way."""
    said = ends.honest(drawn.kind)
    signed_message = ends.message_signer(drawn.kind).close(said.body, *said.about)
    at = drawn.at % len(signed_message)
    ways: list[Callable[[], bytes]] = [
        lambda: (
            signed_message[:at]
            + bytes([signed_message[at] ^ (1 << drawn.at % 8)])
            + signed_message[at + 1 :]
        ),
        lambda: signed_message[:at],
        lambda: signed_message + (drawn.noise or b"\0"),
        lambda: signed_message[:at] + (drawn.noise or b"\0") + signed_message[at:],
        lambda: signed_message[:41] + bytes(reversed(signed_message[41:])) + b"\0",
    ]
    return ways[drawn.at // 8 % len(ways)]()


def elsewhere(ends: BothEnds, drawn: Drawn) -> bytes:
    """An honest message in the wrong context, or as the wrong kind."""
    kind, message_signer = drawn.kind, ends.message_signer(drawn.kind)
    others = [
        one
        for one in KINDS
        if one != kind and ends.message_signer(one).purpose == message_signer.purpose
    ]
    if others and drawn.at % 2:
        said = ends.honest(others[drawn.at % len(others)])
    else:
        said = ends.honest(kind, another=True)
        if said.about == ends.honest(kind).about:  # only the body binds this kind
            said = said._replace(about=(*said.about, drawn.noise))
    return message_signer.close(said.body, *said.about)


def repeated(ends: BothEnds, drawn: Drawn) -> bytes:
    """An honest one, once more."""
    said = ends.honest(drawn.kind)
    if drawn.kind == "registration":
        registration = msgspec.structs.replace(
            REGISTRATION, instance_id=NODE, number=drawn.at % NUMBER, resources={"cpu": 1000.0}
        )
        said = said._replace(body=m.encode(registration))
    if drawn.kind == "lease":
        lease = b"%d:%d:9" % (drawn.at % RENEWALS + 1, drawn.at % 3)
        said = said._replace(body=ends.answering(lease))
    return ends.message_signer(drawn.kind).close(said.body, *said.about)


def old_term(ends: BothEnds, drawn: Drawn) -> bytes:
    """An order of the scheduler before."""
    said = _assignment(NODE.encode(), b"", False, term=drawn.at % TERM, version=drawn.at)
    return ends.message_signer("command").close(said.body, *said.about)


@functools.cache
def _long(kind: str, ends: BothEnds) -> bytes:
    said = ends.honest(kind)
    longer = said.body + bytes(LIMITS[kind] - len(said.body) + 1)
    return ends.message_signer(kind).close(longer, *said.about)


def oversized(ends: BothEnds, drawn: Drawn) -> bytes:
    """Signed, but longer than any honest one."""
    return _long(drawn.kind, ends)


ATTACKS: dict[str, Callable[[BothEnds, Drawn], bytes]] = {
    one.__name__: one for one in (forged, altered, elsewhere, repeated, old_term, oversized)
}
#: Kinds whose replay could have an effect; the others are bound to a place, or state facts.
_REPEATED = ("registration", "lease", "events", "command", "request")
messages = st.one_of(
    st.tuples(st.sampled_from(["forged", "altered", "elsewhere"]), st.sampled_from(KINDS)),
    st.tuples(st.just("repeated"), st.sampled_from(_REPEATED)),
    st.tuples(st.just("old_term"), st.just("command")),
    # It takes longest, and there is little to draw.
    st.tuples(st.just("oversized"), st.sampled_from(KINDS)),
)


@pytest.mark.timeout(600)
def test_s02_s03_s15_ten_thousand_forged_messages_are_rejected_and_counted(
    tmp_path: Path,
) -> None:
    ends = BothEnds(tmp_path)
    tried = Counter[tuple[str, str]]()

    @settings(max_examples=MESSAGES, database=None, suppress_health_check=list(HealthCheck))
    @given(which=messages, noise=st.binary(max_size=80), at=st.integers(0, 2**20))
    def try_one(which: tuple[str, str], noise: bytes, at: int) -> None:
        attack, kind = which
        signed_message = ATTACKS[attack](ends, Drawn(kind, noise, at))
        before, counted = ends.state(), ends.counted()
        # These lie in a key that is looked at again and again; an empty reply is none.
        is_same = kind in {"lease", "reply"} and signed_message == ends.last[kind]
        is_new = not (is_same or (kind == "reply" and not signed_message))
        ends.deliver(kind, signed_message, NEW if attack == "forged" else DONE)
        assert ends.state() == before
        assert ends.counted() == counted + is_new
        tried[which] += 1

    try_one()
    assert tried.total() >= MESSAGES
    assert {attack for attack, _ in tried} == set(ATTACKS)
    assert {kind for _, kind in tried} == set(KINDS)
    reasons = {reason for _, reason, _ in ends.rejections.counts()}
    assert reasons >= {
        *("unsigned", "unknown_key", "altered", "unreadable", "oversized", "repeated", "old_term")
    }
    honest_ones_are_believed_behind_them(ends)


def honest_ones_are_believed_behind_them(ends: BothEnds) -> None:
    """Messages after the attacks are accepted."""
    counted = ends.counted()
    sent.cache_clear()  # it may be minutes ago
    said = _assignment(NODE.encode(), b"", False, version=VERSION + 1)
    ends.deliver("command", ends.message_signer("command").close(said.body, *said.about))
    lease = Said(ends.answering(b"%d:3:8" % (RENEWALS + 1)), (b"lease", NODE.encode()))
    ends.deliver("lease", ends.message_signer("lease").close(lease.body, *lease.about))
    request = "f" * 32
    signed_message = close_request(
        ends.message_signer("request"),
        msgspec.msgpack.encode(r.StopExperiment(name="exp")),
        request=request,
        kind="stop",
        sent=sent(),
    )
    ends.deliver("request", signed_message, request)
    assert ends.state() == (TERM, VERSION + 1, NUMBER, RENEWALS + 1, 3, ("stop", "stop"))
    assert ends.counted() == counted
