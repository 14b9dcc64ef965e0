"""A user of Redis that lacks a right of its role: whoever it is says which, and the fix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.secured_farm import secured_farm
from tests.secured_redis import SecuredRedis, secured_redis
from tests.support import eventually

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredRedis]:
    with secured_redis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.mark.parametrize("command", ["get", "xadd"])
def test_command_of_a_user_without_its_roles_rights_is_refused_with_the_fix(
    redis: SecuredRedis, tmp_path: Path, command: str
):
    redis.client.execute_command("ACL", "SETUSER", "submitter", f"-{command}")
    try:
        with secured_farm(tmp_path / "farm", redis) as farm:
            refused = farm.run("ls")
        assert refused.returncode == 1
        assert f"no permissions to run the '{command}' command" in refused.stderr
        assert "the rights of its role in deploy/redis/users.acl" in refused.stderr
    finally:
        redis.client.execute_command("ACL", "SETUSER", "submitter", f"+{command}")


@pytest.mark.parametrize(
    ("command", "told"),
    [("hmget", "the rights of its role in deploy/redis/users.acl"), ("brpop", "ear.died")],
)
def test_worker_whose_user_lacks_a_right_says_so_and_not_all_the_time(
    redis: SecuredRedis, tmp_path: Path, command: str, told: str
):
    redis.client.execute_command("ACL", "SETUSER", "worker", f"-{command}")
    try:
        with secured_farm(tmp_path / "farm", redis) as farm:
            farm.add_worker("one", 1)
            log = farm.folder / "one" / "worker.log"
            eventually(lambda: log.exists() and told in log.read_text())
            time.sleep(5)
            assert log.read_text().count(told) < 10
    finally:
        redis.client.execute_command("ACL", "SETUSER", "worker", f"+{command}")
