"""A Redis user lacks a right of its role: each process names the missing right and the fix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_service import Search
from tests.support.farms.secured_farm import secured_farm
from tests.support.farms.secured_redis import SecuredRedis, secured_redis
from tests.support.waiting import eventually

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
            rejected = farm.run("ls")
        assert rejected.returncode == 1
        assert f"no permissions to run the '{command}' command" in rejected.stderr
        assert "the rights of its role in deploy/redis/users.acl" in rejected.stderr
    finally:
        redis.client.execute_command("ACL", "SETUSER", "submitter", f"+{command}")


@pytest.mark.parametrize(
    ("command", "told"),
    [("hmget", "the rights of its role in deploy/redis/users.acl"), ("brpop", "consumer.died")],
)
def test_worker_whose_user_lacks_a_right_says_so_without_repeating(
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
            if command == "brpop":  # no consumer can work: another node may get the trials
                assert farm.workers["one"].wait(60) == 70
                assert "its Celery consumer ended 10 times in a row" in log.read_text()
    finally:
        redis.client.execute_command("ACL", "SETUSER", "worker", f"+{command}")


@pytest.mark.parametrize("command", ["lpush", "xread", "hset"])
def test_scheduler_whose_user_loses_a_right_names_it_and_waits(
    redis: SecuredRedis, tmp_path: Path, command: str
):
    with secured_farm(tmp_path / "farm", redis) as farm:
        farm.submit(Search(name="first", trials=2, steps=10, has_gate=True))
        if command != "lpush":  # that is for the first order to a node
            farm.add_worker("one", 1)
            farm.open_gate("first", 2)
            farm.wait_for_steps("first", 1, 1)
        redis.client.execute_command("ACL", "SETUSER", "scheduler", f"-{command}")
        try:
            if command == "lpush":
                farm.add_worker("one", 1)
            farm.open_gate("first", 10)
            log = farm.folder / "head" / "scheduler.log"
            told = "the rights of its role in deploy/redis/users.acl. The scheduler waits"
            eventually(lambda: told in log.read_text(), message=log.read_text)
            assert command in log.read_text().lower()
            time.sleep(3)  # it tries again meanwhile
        finally:
            redis.client.execute_command("ACL", "SETUSER", "scheduler", f"+{command}")
        farm.wait_for("first", "FINISHED")
        farm.check_results("first")
        assert log.read_text().count("the rights of its role") < 5, log.read_text()
        assert "Traceback" not in log.read_text()


def test_changed_password_scheduler_worker_and_doctor_name_the_user_and_the_fix(
    redis: SecuredRedis, tmp_path: Path
):
    with secured_farm(tmp_path / "farm", redis) as farm:
        farm.add_worker("one", 1)
        farm.has_nodes("one")
        logs = {
            "scheduler": farm.folder / "head" / "scheduler.log",
            "worker": farm.folder / "one" / "worker.log",
        }
        for user in logs:
            redis.client.execute_command("ACL", "SETUSER", user, "resetpass", ">the-new-one")
            redis.client.execute_command("CLIENT", "KILL", "USER", user)
        try:
            for user, log in logs.items():
                told = f"refuses the user '{user}'"
                eventually(
                    lambda told=told, log=log: told in log.read_text(), message=log.read_text
                )
                assert "invalid username-password pair" in log.read_text()
                assert "$TUNEMQ_REDIS" in log.read_text()
            eventually(lambda: not redis.client.exists("tunemq:scheduler"))
            url = redis.url("scheduler", password="the-new-one")
            said = farm.run("doctor", variables={"TUNEMQ_REDIS": url}).stdout
            for user in logs:
                assert f"refuses the login of '{user}'" in said
        finally:
            for user in logs:
                password = f">{redis.password(user)}"
                redis.client.execute_command("ACL", "SETUSER", user, "resetpass", password)
        farm.has_nodes("one")
        for log in logs.values():
            assert log.read_text().count("refuses the user") < 5, log.read_text()
