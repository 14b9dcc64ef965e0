"""`tunemq doctor` finds keys where others can read them."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.farms.examined_farm import ExaminedFarm, farm
from tests.support.other_users import NOBODY
from tunemq_scheduler.security.doctor import process_argument_checks
from tunemq_scheduler.security.doctor.key_checks import PrivateFile, check_private_files
from tunemq_scheduler.security.doctor.process_argument_checks import (
    KnownSecrets,
    ListedProcess,
    check_arguments,
    running_processes,
)
from tunemq_scheduler.security.findings import Finding, FindingLevel
from tunemq_shared.broker.redis_address import parse_address

__all__ = ["farm"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.fixture
def copied_keys(farm: ExaminedFarm, tmp_path: Path) -> Path:
    """The scheduler's key file, to be treated badly."""
    copy = tmp_path / "copy.toml"
    shutil.copyfile(farm.keys / "scheduler.toml", copy)
    copy.chmod(0o600)
    return copy


def test_key_file_that_others_may_read_is_found(farm: ExaminedFarm, copied_keys: Path):
    for mode in (0o644, 0o640, 0o604, 0o620):
        copied_keys.chmod(mode)
        found = farm.examined(variables={"TUNEMQ_KEYS": str(copied_keys)})
        problems = [one for one in found.findings if one.level is FindingLevel.PROBLEM]
        assert [one.check for one in problems] == ["key-files"], str(found)
        assert f"chmod 600 {copied_keys}" in problems[0].fix
        assert f"{mode:04o}" in problems[0].what
        checks = {one.check for one in found.findings if one.level is FindingLevel.OK}
        assert {"keys", "scheduler", "nodes", "store-access"} <= checks  # looked at all the same
    copied_keys.chmod(0o600)
    assert not farm.examined(variables={"TUNEMQ_KEYS": str(copied_keys)}).problems


def test_key_file_that_others_may_replace_is_found(farm: ExaminedFarm, copied_keys: Path):
    folder = copied_keys.parent
    folder.chmod(0o770)
    finding = farm.has_only(
        "key-files", f"chmod go-w {folder}", variables={"TUNEMQ_KEYS": str(copied_keys)}
    )
    assert "replace" in finding.what


def test_store_keys_that_others_may_read_are_found(farm: ExaminedFarm, tmp_path: Path):
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    file.chmod(0o644)
    farm.has_only(
        "key-files", f"chmod 600 {file}", variables={"AWS_SHARED_CREDENTIALS_FILE": str(file)}
    )


def test_invalid_key_file_is_found(farm: ExaminedFarm, copied_keys: Path):
    copied_keys.write_text("[orders]\n")
    found = farm.examined(variables={"TUNEMQ_KEYS": str(copied_keys)})
    problems = [one for one in found.findings if one.level is FindingLevel.PROBLEM]
    assert [one.check for one in problems] == ["keys"], str(found)
    assert "tunemq keys new" in problems[0].fix


def test_a_key_file_of_another_role_cannot_examine(farm: ExaminedFarm):
    found = farm.examined(variables={"TUNEMQ_KEYS": str(farm.keys / "ada.toml")})
    assert not found.problems, str(found)
    assert "--keys scheduler.toml" in found.of("keys")[0].fix


def test_farm_that_signs_says_so_to_a_client_without_keys(farm: ExaminedFarm):
    found = farm.examined(variables={"TUNEMQ_KEYS": ""})
    assert "--keys scheduler.toml" in found.of("nodes")[0].fix, str(found)


def test_a_password_in_an_argument_is_found(farm: ExaminedFarm):
    password = "secret-" + os.urandom(4).hex()
    farm.redis.client.execute_command(
        "ACL", "SETUSER", "spare", "on", f">{password}", "~*", "+@all"
    )
    url = farm.redis.url.replace("redis://", f"redis://spare:{password}@")
    process = farm.head.start(
        farm.command("scheduler", "--redis", url),
        farm.environ("head"),
        farm.folder / "head" / "second.log",
    )
    process.send_signal(signal.SIGSTOP)  # it would wait for its turn, and end after seconds
    try:
        finding = farm.has_only("keys-in-arguments", "TUNEMQ_REDIS")
        assert f"process {process.pid}" in finding.what
        assert password not in finding.what + finding.fix
    finally:
        process.kill()
        process.wait()
        farm.head.processes.remove(process)
        farm.redis.client.execute_command("ACL", "DELUSER", "spare")


def test_a_key_of_the_store_in_an_argument_is_found(farm: ExaminedFarm):
    secret = farm.environ("head")["AWS_SECRET_ACCESS_KEY"]
    line = [sys.executable, "-c", "import sys; sys.stdin.read()", f"--password={secret}"]
    with subprocess.Popen(line, stdin=subprocess.PIPE) as process:
        finding = farm.has_only("keys-in-arguments", "AWS_SECRET_ACCESS_KEY")
        assert f"process {process.pid}" in finding.what
        assert secret not in finding.what


@pytest.mark.parametrize("why", ["owner", "mode"])
def test_key_file_below_a_folder_of_others_is_found(tmp_path: Path, why: str):
    above = tmp_path / "above"
    file = above / "keys" / "scheduler.toml"
    file.parent.mkdir(parents=True)
    file.write_text("")
    file.chmod(0o600)
    file.parent.chmod(0o700)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    assert _key_files(file).level is FindingLevel.OK
    if why == "mode":
        above.chmod(0o777)
        fix = f"chmod go-w {above}"
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give folders away")
        os.chown(above, NOBODY, NOBODY)
        fix = f"chown {os.geteuid()} {above}"
    for path in (file, link):
        finding = _key_files(path)
        assert finding.level is FindingLevel.PROBLEM
        assert f"others may replace it: {above} " in finding.what
        assert finding.fix == fix
    above.chmod(0o1777)  # as /tmp
    assert (_key_files(file).level is FindingLevel.OK) == (why == "mode")


def test_key_file_by_a_link_in_a_folder_of_others_is_found(tmp_path: Path):
    file, place = tmp_path / "scheduler.toml", tmp_path / "place"
    file.write_text("")
    file.chmod(0o600)
    place.mkdir()
    (place / "link.toml").symlink_to("../scheduler.toml")
    assert _key_files(place / "link.toml").level is FindingLevel.OK
    place.chmod(0o777)
    assert _key_files(place / "link.toml").fix == f"chmod go-w {place}"


def _key_files(path: Path) -> Finding:
    (finding,) = check_private_files([PrivateFile(path, "the farm's key file")])
    return finding


# --- which arguments ------------------------------------------------------------------------------

_OURS = parse_address("redis://me:wordword@farm.example:6379/0")


@pytest.mark.parametrize(
    "line",
    [
        ("tunemq", "worker", "--redis", "redis://u:pass@farm.example:6379/0"),
        ("tunemq", "worker", "--redis=rediss://:pass@FARM.example/3"),
        ("sh", "-c", "TUNEMQ_REDIS='redis://u:pass@farm.example:6379/0' tunemq worker"),
        ("docker", "run", "-e", "AWS_SECRET_ACCESS_KEY=abc", "image", "tunemq", "worker"),
        ("redis-cli", "-a", "wordword"),
        ("redis-cli", "-u", "redis://me:wordword@elsewhere"),
        ("anything", "--key=the-secret-of-the-store"),
        ("anything", "the%20other%20one%2F"),
        ("anything", "--key=wordword"),
        ("sh", "-c", "redis-cli -a 'wordword' PING"),
        ("anything", "xxthe-secret-of-the-storexx"),
    ],
)
def test_key_in_process_arguments_is_found(line: tuple[str, ...]):
    secrets = KnownSecrets(_OURS, ["the-secret-of-the-store", "the other one/", ""])
    (finding,) = check_arguments(secrets, [ListedProcess(7, line)])
    assert finding.level is FindingLevel.PROBLEM
    assert f"process 7 ({line[0]})" in finding.what
    assert not [word for word in ("pass", "wordword", "abc") if word in finding.what.split()]


@pytest.mark.parametrize(
    "line",
    [
        ("tunemq", "worker", "--redis", "redis://farm.example:6379/0"),
        ("tunemq", "worker", "--redis", "redis://u:pass@another.example:6379/0"),
        ("tunemq", "worker", "--redis", "redis://u:pass@farm.example:6380/0"),
        ("tunemq", "worker", "--redis", "redis://u:pass@farm.example:port/0"),
        ("docker", "run", "-e", "AWS_SECRET_ACCESS_KEY", "image", "tunemq", "worker"),
        ("aws", "AWS_SECRET_ACCESS_KEY=abc"),
        ("", "short"),
        ("python", "/srv/wordword-project/run.py", "--name=wordwords"),
        (),
    ],
)
def test_harmless_process_arguments_are_not_reported(line: tuple[str, ...]):
    secrets = KnownSecrets(_OURS, ["short", ""])
    assert [one.level for one in check_arguments(secrets, [ListedProcess(7, line)])] == [
        FindingLevel.OK
    ]


def test_an_address_of_this_machine_has_several_names():
    secrets = KnownSecrets(parse_address("redis://localhost:6379/0"), [])
    line = ("tunemq", "--redis", "redis://u:pass@127.0.0.1/0")
    assert check_arguments(secrets, [ListedProcess(7, line)])[0].level is FindingLevel.PROBLEM
    secrets = KnownSecrets(parse_address("unix:///run/r.sock"), [])
    line = ("tunemq", "--redis", "unix://u:pass@/run/r.sock?db=0")
    assert check_arguments(secrets, [ListedProcess(7, line)])[0].level is FindingLevel.PROBLEM


def test_process_whose_arguments_never_come_is_named_and_others_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for pid in ("7", "8"):
        (tmp_path / pid).mkdir()
    os.mkfifo(tmp_path / "7" / "cmdline")
    (tmp_path / "8" / "cmdline").write_bytes(b"redis-cli\0-a\0wordword\0")
    monkeypatch.setattr(process_argument_checks, "_PROCESSES", str(tmp_path))
    monkeypatch.setattr(process_argument_checks, "_READ_S", 0.5)
    try:
        found = check_arguments(KnownSecrets(_OURS, []), running_processes())
    finally:
        os.close(os.open(tmp_path / "7" / "cmdline", os.O_RDWR))  # so that its reader ends
    levels = {one.what.split(" (")[0]: one.level for one in found}
    assert levels == {"process 7": FindingLevel.WARNING, "process 8": FindingLevel.PROBLEM}


def test_processes_whose_arguments_never_come_delay_doctor_for_a_limited_time():
    silent = (ListedProcess(pid, None) for pid in itertools.count(1))
    found = check_arguments(KnownSecrets(_OURS, []), silent)
    assert {one.level for one in found} == {FindingLevel.WARNING}
    assert "not all processes were looked at" in found[-1].what
