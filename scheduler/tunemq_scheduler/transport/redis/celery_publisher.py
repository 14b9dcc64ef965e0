"""Puts assignments on the wire as Celery tasks. The scheduler's only use of Celery.

A message is a genuine task message of Celery's protocol 2, made by `app.amqp`, so that any Celery
worker understands it. It does not go through `app.send_task`: that resolves routes, declares and
makes a result for every message, which is twice as slow; and kombu makes a new Redis client, with
its table of 170 callbacks, for every message, which `_Channel` avoids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from celery import Celery
from kombu import Connection, Producer
from kombu.exceptions import OperationalError
from kombu.transport.redis import Channel, Transport
from redis.exceptions import OutOfMemoryError

from tunemq_scheduler.transport.redis.redis_connection import RedisFull, rights_fix
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.broker import redis_keys
from tunemq_shared.broker.redis_address import parse_address

#: Bounds what a turn of the loop can lose to a Redis that accepts connections and says nothing.
_SOCKET_TIMEOUT_S: Final = 3.0
_CONNECT_TIMEOUT_S: Final = 2.0


class _Channel(Channel):
    """A channel that makes one Redis client, not one for each message, and names no library to it.

    It has no right to where a farm's users have the rights that they need.
    """

    _one_client: Any = None

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        params: dict[str, Any] = super()._connparams(asynchronous=asynchronous)
        return {**params, "driver_info": None, "protocol": 2}  # of version 3 it tells more

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """The client to use for one operation."""
        if client is None:
            if self._one_client is None:
                self._one_client = self._create_client()
            client = self._one_client
        yield client


class _Transport(Transport):
    """Kombu's Redis transport with our channel."""

    Channel = _Channel


class CeleryPublisher:
    """A kept-open connection for publishing. Not thread-safe.

    Args:
        url: where Redis is: ``unix://``, ``redis://`` or ``rediss://``.
    """

    def __init__(self, url: str) -> None:
        self._url = parse_address(url).celery_url()
        # A script may have a Celery of its own, or Django: this app is nobody's default and takes
        # nothing from CELERY_* variables (the loader is given here, the broker's URL to the
        # connection below) or settings.
        self._app = Celery("tunemq", set_as_current=False, loader="app", fixups=set())
        self._app.conf.update(
            task_serializer="json",
            accept_content=["json"],
            task_ignore_result=True,
            task_send_sent_event=False,
            worker_send_task_events=False,
        )
        self._connection: Connection | None = None
        self._producer: Producer | None = None

    def publish(self, instance_id: str, task_id: str, payload: str) -> None:
        """Queue one assignment for a node.

        A failed attempt is repeated once on a new connection (the old one may have died in an idle
        hour).

        Raises:
            WireUnavailable: Redis does not take it; it may or may not have been queued.
            RedisFull: it has no memory for it; it was not queued.
        """
        message = self._app.amqp.as_task_v2(
            task_id,
            redis_keys.TASK,
            args=[payload],
            ignore_result=True,
            # Otherwise configurations would stand in headers, and in the logs of whoever reads
            # them.
            argsrepr="(assignment)",
            kwargsrepr="{}",
            origin="tunemq",
        )
        queue = redis_keys.queue(instance_id)
        try:
            self._send(queue, message)
        except RedisUnavailable:
            self._send(queue, message)

    def _send(self, queue: str, message: Any) -> None:
        connection, producer = self._open()
        try:
            # The anonymous exchange leads to the list alone: no binding keys, nothing declared.
            producer.publish(
                message.body,
                exchange="",
                routing_key=queue,
                serializer="json",
                headers=message.headers,
                retry=False,
                **message.properties,
            )
        except OutOfMemoryError as error:
            full = f"An assignment could not be queued in Redis, which is full ({error})."
            raise RedisFull(full) from error
        except (
            OperationalError,  # what kombu calls its failure to connect
            *connection.connection_errors,
            *connection.channel_errors,
        ) as error:
            self.close()
            raise RedisUnavailable(
                f"An assignment could not be queued in Redis: {error}{rights_fix(error)}"
            ) from error

    def _open(self) -> tuple[Connection, Producer]:
        if self._connection is None or self._producer is None:
            self._connection = Connection(
                self._url,
                transport=_Transport,
                transport_options={
                    "socket_timeout": _SOCKET_TIMEOUT_S,
                    "socket_connect_timeout": _CONNECT_TIMEOUT_S,
                    "socket_keepalive": True,
                    # Kombu would sleep for seconds between attempts to connect.
                    "max_retries": 0,
                    # One list for each queue, as the consumer has it.
                    "priority_steps": [0],
                },
            )
            self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        return self._connection, self._producer

    def close(self) -> None:
        """Close the connection; publishing again opens a new one."""
        if self._connection is not None:
            self._connection.release()
        self._connection = self._producer = None
