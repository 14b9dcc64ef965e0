"""The consumer process: a Celery worker that passes a node's commands on without decoding them.

It runs in a separate process because Celery's worker needs the main thread and may hang. It holds
no state, so every failure has the same remedy: it exits and the node starts another. It exits when
its connection to Redis breaks (Celery's own back-off can take 9 s), when its event loop has had no
socket for a second, when the node closes the socket pair, and when the node dies. At its start it
waits until Redis is reachable.

It sends frames over the socket pair, in the format that node and trial processes use: READY once,
then COMMAND with a task's argument, or REJECTED with the reason why it rejected a message.

A command that is lost with a consumer waits for the next consumer, and importing Celery takes half
a second of CPU time. So the node starts a forkserver, which imports Celery once and forks one
consumer at a time; a forked consumer is ready in a twentieth of that time.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NoReturn

# At import Celery reads the user's broker, settings and Django project from the environment.
for _name in [name for name in os.environ if name.startswith(("CELERY", "DJANGO_", "KOMBU_"))]:
    del os.environ[_name]
# The node waits for this import, and fruitless garbage collections take 5 % of it. Freezing keeps
# the imported objects shared between forkserver and consumers.
gc.disable()

from celery import Celery, signals  # noqa: E402
from celery.app.amqp import AMQP  # noqa: E402
from celery.apps.worker import Worker  # noqa: E402
from celery.exceptions import SecurityWarning  # noqa: E402
from kombu import Connection, Exchange, Queue  # noqa: E402
from kombu.transport.redis import Channel, Transport  # noqa: E402
from redis import Redis  # noqa: E402
from redis.exceptions import ResponseError  # noqa: E402

from tunemq_shared.base.errors import RedisUnavailable  # noqa: E402
from tunemq_shared.base.failpoints import failpoint  # noqa: E402
from tunemq_shared.base.unpickling import never_unpickle  # noqa: E402
from tunemq_shared.broker import redis_keys  # noqa: E402
from tunemq_shared.broker.redis_address import REDIS_VARIABLE, parse_address  # noqa: E402
from tunemq_shared.system.process_attributes import die_with_parent, set_name  # noqa: E402
from tunemq_workers.broker.consumer_launcher import COMMAND, READY, REJECTED, next_socket  # noqa: E402
from tunemq_workers.broker.redis_client import RedisClient, RedisCommandError  # noqa: E402
from tunemq_workers.broker.task_validation import InvalidCeleryMessage, check_task  # noqa: E402
from tunemq_workers.runtime.frames import frame  # noqa: E402
from tunemq_workers.system.credentials import take_keys  # noqa: E402

# Modules that Celery imports by name only when a worker starts.
for _name in (
    "billiard.pool",
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.backends.base",
    "celery.concurrency.solo",
    "celery.events",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.consumer.delayed_delivery",
    "celery.worker.strategy",
    "kombu.transport.redis",
):
    import_module(_name)

gc.freeze()
gc.enable()

#: Seconds without a socket after which an event loop counts as hung.
_HUNG_AFTER_S: Final = 1.0
_POLL_INTERVAL_S: Final = 0.5
#: Seconds between attempts to reach Redis: the first pause and the longest.
_KNOCK_S: Final = (0.05, 0.2)
#: The command with which Celery's worker takes a message from Redis.
_POP: Final = "BRPOP"
#: Exit code of a consumer whose event loop hung.
_EXIT_HUNG: Final = 70


def main() -> None:
    """Fork a consumer for the node instance on the command line each time the node asks for one."""
    parser = argparse.ArgumentParser(prog="tunemq_workers.broker.celery_consumer")
    parser.add_argument("--instance-id", required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--node-pid", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.node_pid)
    forkserver, consumer = os.getpid(), 0
    with socket.socket(fileno=options.fd) as node:
        take_keys(node)
        never_unpickle()
        while True:
            wanted = next_socket(node)
            if consumer:  # not reaped yet, so the pid is still this consumer's
                os.kill(consumer, signal.SIGKILL)
                os.waitpid(consumer, 0)
            if wanted is None:
                return
            consumer = os.fork()
            if not consumer:
                break
            wanted.close()
    die_with_parent(forkserver)
    _listen(os.environ[REDIS_VARIABLE], options.instance_id, wanted)


def _listen(redis_url: str, instance_id: str, node: socket.socket) -> None:
    """Run a consumer until something fails, then end the process."""
    set_name("tunemq-consumer")
    # Celery warns root about pickled messages; this application accepts only JSON.
    warnings.simplefilter("ignore", SecurityWarning)
    app = make_app(redis_url, redis_keys.queue(instance_id), node.sendall)
    worker = _Worker(
        app=app,
        hostname=f"consumer@{instance_id}",
        pool="solo",
        concurrency=1,
        loglevel="WARNING",
        redirect_stdouts=False,
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    threading.Thread(target=_watch, args=(node, worker), name="watch", daemon=True).start()
    signals.worker_ready.connect(lambda **_: node.sendall(frame(READY)), weak=False)
    _wait_for_redis(redis_url)
    worker.start()


class _Worker(Worker):
    """A Celery worker that exits at once: it has no work to return, and its node waits."""

    def stop(self, in_sighandler: bool = False, exitcode: int | None = None) -> NoReturn:  # noqa: ARG002
        """End the process."""
        os._exit(exitcode or 0)


def make_app(redis_url: str, queue: str, send: Callable[[bytes], None]) -> Celery:
    """Return a Celery application that consumes ``queue`` and sends tasks' arguments to the node.

    Args:
        redis_url: the address of Redis.
        queue: the node's queue.
        send: writes one frame to the node.
    """

    def reject(reason: str) -> None:
        send(frame(REJECTED, reason.encode()))

    app = Celery(
        "tunemq", set_as_current=False, loader="app", fixups=[], amqp=_connecting(queue, reject)
    )
    app.conf.update(
        broker_url=parse_address(redis_url).celery_url(),
        broker_transport_options={
            "socket_timeout": 10,
            "socket_connect_timeout": 2,
            "socket_keepalive": True,
            "retry_on_timeout": False,
            "health_check_interval": 5,
            "polling_interval": 5,
            "priority_steps": [0],
            # Messages are never unacknowledged, so Celery need not keep or restore any. A
            # consumer's Redis rights cover only taking messages from its queue.
            "ack_emulation": False,
            "unacked_restore_interval": 86_400,
        },
        # The node starts another consumer sooner than Celery would try a second time.
        broker_connection_retry=False,
        broker_connection_retry_on_startup=False,
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_create_missing_queues=False,
        task_default_queue=queue,
        # Declaring the exchange or the queue would leave binding keys in Redis for ever.
        task_queues=[
            Queue(
                queue,
                exchange=Exchange("", no_declare=True),
                routing_key=queue,
                no_declare=True,
                no_ack=True,
            )
        ],
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )

    @app.task(name=redis_keys.TASK)  # type: ignore[untyped-decorator]
    def run_steps(payload: str) -> None:
        failpoint("consumer.before_handover")
        send(frame(COMMAND, payload.encode()))
        failpoint("consumer.after_handover")

    return app


def _connecting(queue: str, reject: Callable[[str], None]) -> type[AMQP]:
    """Return an AMQP class whose connections pass only valid messages to Celery.

    Args:
        queue: the queue to consume; deleted if its key has another type than a list.
        reject: takes the reason for which a message was discarded.
    """

    class OurClient(Redis):
        def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
            try:
                answer: Any = super().parse_response(connection, command_name, **options)  # type: ignore[no-untyped-call]
            except ResponseError as problem:
                if command_name != _POP or not str(problem).startswith("WRONGTYPE"):
                    raise
                self.delete(queue)  # otherwise each read would fail again
                reject("wrong_type")
                return None
            if command_name == _POP and answer:
                try:
                    answer = [answer[0], check_task(answer[1])]
                except InvalidCeleryMessage as problem:
                    reject(problem.reason)
                    return None  # as if the queue were empty
            return answer

    class OurChannel(Channel):
        def _get_client(self) -> type[Redis]:
            return OurClient

        def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
            params: dict[str, Any] = super()._connparams(asynchronous=asynchronous)
            # A consumer has no right to send CLIENT SETINFO, and RESP 3 would need more commands.
            return {**params, "driver_info": None, "protocol": 2}

    class OurTransport(Transport):
        Channel = OurChannel

    class OurConnection(Connection):
        def get_transport_cls(self) -> type[Transport]:
            return OurTransport

    class OurAMQP(AMQP):
        Connection = OurConnection

    return OurAMQP


def _wait_for_redis(url: str) -> None:
    """Return once Redis answers, because Celery's worker would give up.

    The node ends a consumer that waits too long although Redis is reachable.
    """
    address = parse_address(url)
    pause_s, longest_s = _KNOCK_S
    while True:
        try:
            client = RedisClient(address)
            (reply,) = client.pipeline([["PING"]])
            client.close()
            if not isinstance(reply, RedisCommandError):  # an error: Redis loads data
                return
        except RedisUnavailable:
            pass
        time.sleep(pause_s)
        pause_s = min(longest_s, 1.2 * pause_s)


def _watch(node: socket.socket, worker: Any) -> None:
    """End the process once the node closes its socket or the worker's event loop hangs."""
    hung_since: float | None = None
    while True:
        if select.select([node], [], [], _POLL_INTERVAL_S)[0]:
            os._exit(0)  # the node never writes, so readable means closed
        hub = getattr(worker, "hub", None)
        has_started = worker.consumer is not None and worker.consumer.restart_count > 0
        if hub is None or hub.readers or not has_started:
            hung_since = None
        elif hung_since is None:
            hung_since = time.monotonic()
        elif time.monotonic() - hung_since >= _HUNG_AFTER_S:
            os._exit(_EXIT_HUNG)


if __name__ == "__main__":
    main()
