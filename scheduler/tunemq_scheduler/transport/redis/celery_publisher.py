"""`CeleryPublisher`: sends assignments as Celery tasks; the scheduler's only use of Celery.

A message is a genuine task message of Celery's protocol 2, made by `app.amqp`, so that any Celery
worker understands it. It does not use `app.send_task`, which is twice as slow because it resolves
routes, declares queues and creates a result for every message. `_Channel` avoids that kombu creates
a Redis client, with its table of 170 callbacks, for every message.
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

#: Limits the time that a turn can lose to a Redis that accepts connections but does not answer.
_SOCKET_TIMEOUT_S: Final = 3.0
_CONNECT_TIMEOUT_S: Final = 2.0


class _Channel(Channel):
    """A channel that reuses one Redis client and does not send the library's name to Redis.

    On a farm whose Redis users have minimal rights, it may not send that.
    """

    _one_client: Any = None

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        params: dict[str, Any] = super()._connparams(asynchronous=asynchronous)
        return {**params, "driver_info": None, "protocol": 2}  # version 3 would send more commands

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """Yield the client for one operation."""
        if client is None:
            if self._one_client is None:
                self._one_client = self._create_client()
            client = self._one_client
        yield client


class _Transport(Transport):
    """Kombu's Redis transport with the channel above."""

    Channel = _Channel


class CeleryPublisher:
    """A persistent connection for publishing. Not thread-safe.

    Args:
        url: the Redis address: ``unix://``, ``redis://`` or ``rediss://``.
    """

    def __init__(self, url: str) -> None:
        self._url = parse_address(url).celery_url()
        # A script may have its own Celery app, or use Django. So this app is not the default app,
        # and takes nothing from settings or CELERY_* variables: the loader is set here, and the
        # broker's URL on the connection below.
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

        Retries once on a new connection, because an idle one may have died.

        Raises:
            RedisUnavailable: Redis did not accept it; it may or may not be queued.
            RedisFull: Redis has no memory for it; it was not queued.
        """
        message = self._app.amqp.as_task_v2(
            task_id,
            redis_keys.TASK,
            args=[payload],
            ignore_result=True,
            # Otherwise the arguments would appear in headers, and so in logs of other programs.
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
            OperationalError,  # kombu's error for a failed connection
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
        """Close the connection; the next `publish` opens a new one."""
        if self._connection is not None:
            self._connection.release()
        self._connection = self._producer = None
