"""Real processes for tests of the node: a Redis that can be killed, a node, a scheduler.

The scheduler here is only the other end of the transport: it publishes assignments with Celery,
reads events, and acknowledges them.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from kombu import Exchange, Queue

from tests.support.waiting import eventually, need
from tunemq_shared.broker import redis_keys
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    Environment,
    NodeEvent,
    TrialOrder,
    TrialSpec,
    decode_node_events,
    encode,
)
from tunemq_shared.protocol.registration import NodeRegistration, decode_header, decode_registration
from tunemq_shared.protocol.result_conditions import TO_THE_END, Horizon
from tunemq_shared.signing.live_keys import LiveKeys
from tunemq_shared.trainable.trainable_blobs import ship

#: The empty folders that stay in a node's working folder: its caches.
CACHES = frozenset({"cache", "blobs", "code", "logs"})
_VARIABLES = {"PATH": os.environ.get("PATH", ""), "HOME": os.environ.get("HOME", "/")}


class RedisServer:
    """A redis-server on a unix socket, without persistence unless ``options`` enable it."""

    def __init__(self, folder: Path, *options: str, password: str = "") -> None:
        beside = Path(sysconfig.get_path("scripts"), "redis-server")
        self._program = str(beside) if beside.exists() else shutil.which("redis-server")
        need("redis-server", self._program)
        self._folder, self._options = folder, options
        self.path = str(folder / "redis.sock")
        self.credentials = f":{password}@" if password else ""
        self.url = f"unix://{self.credentials}{self.path}"
        if password:
            self._options += ("--requirepass", password)
        self.process: subprocess.Popen[bytes] | None = None
        #: Celery apps that use this server; `end` closes them first.
        self.users: list[Celery] = []
        self.start()

    def start(self) -> None:
        """Start it with the data that its disk kept."""
        options = ["--port", "0", "--unixsocket", self.path, "--save", "", "--appendonly", "no"]
        log = ["--loglevel", "warning", "--logfile", "redis.log"]
        command = [str(self._program), *options, *log, *self._options]
        self.process = subprocess.Popen(command, cwd=self._folder)
        # A client that times out sends the command again: Redis would execute it twice.
        self.client = redis.Redis.from_url(self.url, socket_timeout=60)
        eventually(self.answers, message="redis-server does not answer")

    def add_options(self, *options: str) -> None:
        """Add options for the next start."""
        self._options += options

    def answers(self) -> bool:
        """Return whether the server answers."""
        try:
            return bool(self.client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def kill(self) -> None:
        """Kill it as a power cut does."""
        assert self.process is not None
        self.client.close()
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Kill it, and close all clients."""
        for user in self.users:
            user.close()
        self.kill()


class Scheduler:
    """The scheduler's end of the transport, for one experiment.

    Args:
        keys: the farm's signing keys; none where messages are not signed.
    """

    def __init__(
        self,
        server: RedisServer,
        folder: Path,
        experiment: str = "exp",
        keys: LiveKeys | None = None,
    ) -> None:
        self._server, self._folder = server, folder
        self.keys = LiveKeys.none() if keys is None else keys
        self.key = redis_keys.events(experiment)
        self._app = Celery("scheduler", set_as_current=False, fixups=[])
        self._app.conf.update(
            broker_url=f"redis+socket://{server.credentials}{server.path}",
            task_ignore_result=True,
            broker_transport_options={"priority_steps": [0]},
        )
        server.users.append(self._app)
        self._generations = 0
        self._blobs = BlobFolder(folder / "blobs")
        self._versions: dict[str, int] = {}
        self.create_generation()

    @property
    def client(self) -> Any:
        """A connection to Redis."""
        return self._server.client

    def create_generation(self) -> None:
        """Begin a new Redis generation."""
        self._generations += 1
        self.client.xgroup_create(self.key, "made", mkstream=True)
        self.client.xgroup_destroy(self.key, "made")
        self.client.set(redis_keys.GENERATION, f"generation {self._generations}")

    def registrations(self) -> list[NodeRegistration]:
        """Return the registrations of this generation."""
        said = [fields for _, fields in self.client.xrange(redis_keys.NODES)]
        opened = self.keys.events.open
        return [
            decode_registration(opened(fields[redis_keys.REGISTRATION], b"registration"))
            for fields in said
            if redis_keys.REGISTRATION in fields
        ]

    def deregistrations(self) -> list[str]:
        """Return the ids of the node instances that deregistered in this generation."""
        said = [fields for _, fields in self.client.xrange(redis_keys.NODES)]
        opened = self.keys.events.open
        return [
            opened(fields[redis_keys.BYE], b"bye").decode()
            for fields in said
            if redis_keys.BYE in fields
        ]

    def start(self, trainable: Any, config: dict[str, Any] | None = None, **how: Any) -> TrialSpec:
        """Return the spec of a trial of ``trainable``."""
        number = how.pop("trial_number", 0)
        (self._folder / "store").mkdir(exist_ok=True)
        environment = Environment(sys.executable, (), _VARIABLES, ())
        values: dict[str, Any] = {
            "experiment": "exp",
            "events_key": self.key,
            "trial_name": f"trial_{number}",
            "trial_number": number,
            "folder": str(self._folder / f"trial_{number}"),
            "code": ship(trainable, self._blobs),
            "config": pack_config(config or {}),
            "resources": {"cpu": 1.0},
            "environment": environment,
            "store": str(self._folder / "store"),
        }
        return TrialSpec(**{**values, **how})

    def assign(self, instance_id: str, *orders: TrialOrder, version: int | None = None) -> int:
        """Publish an assignment; return its version (by default the next one)."""
        if version is None:
            version = self._versions[instance_id] = self._versions.get(instance_id, 0) + 1
        assignment = Assignment(PROTOCOL_VERSION, instance_id, 1, version, orders)
        self.send_assignment(instance_id, assignment)
        return version

    def send_assignment(self, instance_id: str, assignment: Assignment) -> None:
        """Sign and publish this assignment."""
        signed_message = self.keys.orders.close(
            encode(assignment), b"command", instance_id.encode()
        )
        self.post(instance_id, base64.b64encode(signed_message).decode())

    def post(self, instance_id: str, send_assignment: str) -> None:
        """Put a message into a node's queue without checks."""
        name = redis_keys.queue(instance_id)
        self._app.send_task(
            redis_keys.TASK,
            args=[send_assignment],
            queue=Queue(
                name, exchange=Exchange("", no_declare=True), routing_key=name, no_declare=True
            ),
            ignore_result=True,
        )

    def batches(self) -> list[tuple[int, list[NodeEvent]]]:
        """Return all batches in the stream: the number of the first event, and the events."""
        batches = []
        for _, fields in self.client.xrange(self.key):
            events = fields[redis_keys.EVENTS]
            header = self.keys.events.open(
                fields[redis_keys.HEADER], b"batch", self.key.encode(), events
            )
            batches.append((decode_header(header).first, decode_node_events(events)))
        return batches

    def events(self) -> list[NodeEvent]:
        """Return the events of the stream in order, without duplicates; fail the test on a gap."""
        events: list[NodeEvent] = []
        for first, batch in self.batches():
            assert first <= len(events) + 1, f"event {len(events) + 1} is missing"
            events += batch[len(events) + 1 - first :]
        return events

    def said(self, kind: type[NodeEvent]) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self.events() if isinstance(event, kind)]

    def journal(self, instance_id: str, n: int) -> None:
        """Acknowledge the events up to number ``n``."""
        self.reply(instance_id, redis_keys.acknowledged_up_to(self.key), str(n))

    def announce(self, instance_id: str, version: int) -> None:
        """Announce the version of the newest assignment."""
        self.reply(instance_id, "v", f"1:{version}")

    def reply(self, instance_id: str, field: str, value: str) -> None:
        """Set a field of the reply to a node."""
        about = (b"reply", instance_id.encode(), field.encode())
        signed_message = self.keys.orders.close(value.encode(), *about)
        self.client.hset(redis_keys.reply(instance_id), field, signed_message)

    def lease(self, instance_id: str) -> list[int]:
        """Return the lease's counter, term and version; empty if there is no lease."""
        value = self.client.get(redis_keys.lease(instance_id))
        if not value:
            return []
        opened = self.keys.events.open(value, b"lease", instance_id.encode())
        return [int(part) for part in opened.split(b":")[:3]]

    def renewals(self, instance_id: str) -> int:
        """Return the lease's counter; wait for a new lease if the old one expired."""
        found: list[int] = []

        def is_there() -> bool:
            found[:] = self.lease(instance_id)
            return bool(found)

        eventually(is_there, message="there is no lease")
        return found[0]

    def confirmed(self, instance_id: str) -> tuple[int, ...]:
        """Return the term and version that the lease confirms; empty if there is none."""
        return tuple(self.lease(instance_id)[1:])


class Node:
    """A node process that has registered."""

    def __init__(
        self,
        server: RedisServer,
        scheduler: Scheduler,
        folder: Path,
        *more: str,
        program: tuple[str, str] = ("-m", "tunemq_workers.node.node_process"),
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        command = [*before, sys.executable, "-P", *program, "--redis", server.url]
        self.process = subprocess.Popen([
            *command, "--name", "node", "--workdir", str(folder), "--cpus", "2", *more,
        ])  # fmt: skip
        mine: list[NodeRegistration] = []

        def is_registered() -> bool:
            mine[:] = [
                registration
                for registration in scheduler.registrations()
                if registration.pid == self.process.pid
            ]
            return bool(mine)

        eventually(is_registered, message="the node does not introduce itself")
        self.registration = mine[-1]
        self.instance_id = self.registration.instance_id

    def log(self) -> str:
        """Return its log."""
        return (self.folder / "logs" / "node.log").read_text()

    def consumers(self) -> int:
        """Return the pid of the consumers' forkserver; the node replaces a dead one.

        The kernel's list of children may omit one child while another ends.
        """
        found: list[int] = []

        def is_one() -> bool:
            children = children_of(self.process.pid)
            found[:] = [
                pid
                for pid in children
                if b"tunemq_workers.broker.celery_consumer" in command_line(pid)
            ]
            return len(found) == 1

        eventually(is_one, message=lambda: f"what forks consumers: {found}")
        return found[0]

    def consumer(self) -> int | None:
        """Return the pid of its consumer."""
        return next(iter(children_of(self.consumers())), None)

    def forkserver_of(self, process: int) -> int:
        """Return the forkserver that forked a trial process."""
        return next(pid for pid in children_of(self.process.pid) if process in children_of(pid))

    def end(self) -> None:
        """End it in any state."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        self.process.wait(60)


def order(
    trial: str,
    start: TrialSpec | None,
    *,
    attempt: int = 1,
    run_until: Horizon = TO_THE_END,
    stop: bool = False,
    pause: bool = False,
    kill: bool = False,
) -> TrialOrder:
    """Return an order for a trial."""
    return TrialOrder(trial, attempt, run_until, stop, start, pause, kill)


def children_of(pid: int) -> list[int]:
    """Return the children of a process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def process_tree_of(pid: int) -> list[int]:
    """Return a process and its descendants."""
    return [pid, *(member for child in children_of(pid) for member in process_tree_of(child))]


def is_alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
