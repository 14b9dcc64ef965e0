"""Assignments go to the farm's Redis, whatever Celery settings a script has."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import redis

from tunemq_scheduler.embedded.embedded_farm import EmbeddedFarm
from tunemq_scheduler.transport.redis.celery_publisher import CeleryPublisher
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.broker import redis_keys

pytestmark = pytest.mark.integration

#: Settings of a script that uses Celery itself.
OF_THE_SCRIPT = {
    "CELERY_BROKER_URL": "redis://127.0.0.1:1/0",
    "CELERY_BROKER_WRITE_URL": "redis://127.0.0.1:1/0",
    "CELERY_RESULT_BACKEND": "no-such-backend://",
    "CELERY_LOADER": "no.such.module:Loader",
    "CELERY_CONFIG_MODULE": "no_such_config",
    "DJANGO_SETTINGS_MODULE": "no_such_settings",
}

PUBLISH = """
import os, sys
from tunemq_scheduler.transport.redis.celery_publisher import CeleryPublisher
before = dict(os.environ)
publisher = CeleryPublisher(sys.argv[1])
publisher.publish("inc1", "inc1/1:1", "payload")
publisher.close()
assert dict(os.environ) == before
"""


@pytest.fixture
def farm() -> Iterator[EmbeddedFarm]:
    farm = EmbeddedFarm(make_node_command=lambda *_: ["/bin/sleep", "600"])
    farm.wait_until_ready(within=60)
    yield farm
    farm.stop()


def test_variables_and_settings_of_the_scripts_own_celery_change_nothing(farm):
    environ = {**os.environ, **OF_THE_SCRIPT}
    subprocess.run([sys.executable, "-c", PUBLISH, farm.url], env=environ, check=True, timeout=120)
    client = redis.Redis.from_url(farm.url)
    assert client.llen(redis_keys.queue("inc1")) == 1
    assert client.keys("*") == [redis_keys.queue("inc1").encode()]
    client.close()


def test_a_publisher_that_lost_its_redis_says_so(farm):
    publisher = CeleryPublisher(farm.url)
    publisher.publish("inc1", "inc1/1:1", "payload")
    farm.stop()
    started = time.monotonic()
    with pytest.raises(RedisUnavailable, match="could not be queued"):
        publisher.publish("inc1", "inc1/1:2", "payload")
    assert time.monotonic() - started < 30.0, "the publisher does not wait for Redis to come back"
    publisher.close()
