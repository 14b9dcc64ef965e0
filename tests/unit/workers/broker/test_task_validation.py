"""Which messages of a queue the consumer passes to Celery."""

from __future__ import annotations

import base64
import copy
import json

import pytest

from tunemq_scheduler.transport.redis.celery_publisher import CeleryPublisher
from tunemq_shared.protocol import message_limits as limits
from tunemq_workers.broker.task_validation import InvalidCeleryMessage, check_task


def message_of(*arguments, options=None, canvas=None, **changes):
    """Return a scheduler's queue message, with changes to its headers or its top level."""
    publisher = CeleryPublisher("redis://127.0.0.1:1/0")
    made = publisher._app.amqp.as_task_v2("id", "tunemq.run_steps", args=list(arguments))
    publisher.close()
    args, kwargs, embed = made.body
    body = json.dumps([args, options or kwargs, {**embed, **(canvas or {})}])
    message = {
        "body": base64.b64encode(body.encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": dict(made.headers),
        "properties": {
            **made.properties,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "tunemq.node.inc"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "tag",
        },
    }
    for name, value in changes.items():
        part = message["headers"] if name in _HEADERS else message
        part[name.replace("_", "-") if part is message else name] = value
    return json.dumps(message, default=str).encode()


_HEADERS = frozenset({"task", "compression", "eta", "expires", "group", "timelimit"})


def rejected(message):
    with pytest.raises(InvalidCeleryMessage) as told:
        check_task(message)
    return told.value.reason


def test_messages_of_a_scheduler_are_accepted():
    passed = json.loads(check_task(message_of("cGF5bG9hZA==")))
    assert passed["headers"]["task"] == "tunemq.run_steps"
    body = json.loads(base64.b64decode(passed["body"]))
    canvas = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    assert body == [["cGF5bG9hZA=="], {}, canvas]


@pytest.mark.parametrize("part", ["top", "headers", "properties", "canvas"])
@pytest.mark.parametrize("more", ['{"__type__": "nope", "__value__": 1}', "9" * 5_000])
def test_s01_celery_receives_only_checked_messages(part, more):
    canvas = {"x": "MORE"} if part == "canvas" else None
    made = json.loads(message_of("cGF5bG9hZA==", canvas=canvas))
    if part == "canvas":
        body = base64.b64decode(made["body"]).replace(b'"MORE"', more.encode())
        made["body"] = base64.b64encode(body).decode()
    else:
        (made if part == "top" else made[part])["x"] = "MORE"
    message = json.dumps(made).replace('"MORE"', more).encode()
    assert check_task(message) == check_task(message_of("cGF5bG9hZA=="))


@pytest.mark.parametrize(
    "changes",
    [
        {"content_type": "application/x-python-serialize"},
        {"content_type": "application/x-yaml"},
        {"content_type": "application/data"},
        {"content_encoding": "binary"},
        {"compression": "application/x-gzip"},
        {"eta": "2099-01-01T00:00:00"},
        {"expires": "2000-01-01T00:00:00"},
        {"task": "celery.chain"},
        {"task": "os.system"},
        {"timelimit": [1, 1]},
        {"group": "g"},
        {"headers": {}},
        {"headers": None},
        {"properties": {}},
        {"body": None},
        {"body": "no base64!"},
        {"body": base64.b64encode(b"\x80\x04.").decode()},
        {"options": {"payload": "twice"}},
        {"options": {"payload": None}},
        {"canvas": {"callbacks": [{"task": "tunemq.run_steps", "args": []}]}},
        {"canvas": {"errbacks": [{"task": "x"}]}},
        {"canvas": {"chain": [{"task": "x"}]}},
        {"canvas": {"chord": {"task": "x"}}},
    ],
)
def test_s01_no_other_message_reaches_celery(changes):
    assert rejected(message_of("cGF5bG9hZA==", **changes)) == "unreadable"


def test_s01_arguments_are_one_string():
    for arguments in [(), ("a", "b"), (1,), (["a"],), (None,), ({"a": "b"},)]:
        assert rejected(message_of(*arguments)) == "unreadable"


@pytest.mark.parametrize(
    "message",
    [b"", b"nonsense", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000],
)
def test_s15_invalid_or_too_deep_json_is_rejected(message):
    assert rejected(message) == "unreadable"


def test_s15_body_that_is_too_deep_is_rejected():
    made = json.loads(message_of("a"))
    deep = copy.deepcopy(made)
    deep["body"] = base64.b64encode(b"[" * 100_000).decode()
    assert rejected(json.dumps(deep).encode()) == "unreadable"


def test_s15_message_that_is_too_long_is_not_parsed():
    assert rejected(b"[" * (limits.TASK_BYTES + 1)) == "oversized"
