"""`tunemq worker --trial-user`: which options it rejects and why, and its effect on folders."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import struct
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_processes import TcpRedis
from tests.support.farms.secured_redis import secured_redis
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.waiting import eventually, need
from tests.unit.workers.fakes import Clock, FakeDisk
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker import redis_keys
from tunemq_workers.node import node_process, trial_user_folders
from tunemq_workers.node.trial_user_folders import claim_workdir, give_folders, keep_rights
from tunemq_workers.system.trial_user import UserAccount

__all__ = ["open_folder", "server"]

pytestmark = pytest.mark.integration

USER = f"{NOBODY}:{NOBODY}"
ACCOUNT = UserAccount("nobody", NOBODY, NOBODY, (NOBODY,), "/")

Refused = Callable[..., str]


@pytest.fixture
def rejected(server: RedisServer) -> Refused:
    """Run a worker whose command line is rejected; return its output."""

    def run(
        *options: str,
        before: list[str] | None = None,
        python: str = sys.executable,
        path: str = "",
        url: str = server.url,
    ) -> str:
        prefix = reachable() if before is None else before
        ended = subprocess.run(
            [*prefix, python, "-P", "-m", "tunemq", "worker", "--name", "node", *options],
            env={**os.environ, "TUNEMQ_REDIS": url, "PYTHONPATH": path},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 64, ended
        return ended.stderr

    return run


@pytest.mark.parametrize(
    ("user", "why"),
    [
        ("nosuchuser", "'nosuchuser', a user that this machine does not know; name one of"),
        ("4000000000", "pass its group, too: 4000000000:4000000000"),
        ("root", "--trial-user is root, which is root; name a user without rights"),
        (f"{NOBODY}:staff", "pass a group as a number, as in 1000:1000"),
    ],
)
def test_trial_user_that_is_unknown_or_privileged_is_refused(rejected, user, why):
    need("root, who alone may name others", os.geteuid() == 0 or None)
    assert why in rejected("--trial-user", user, before=[])


def test_a_worker_that_root_did_not_start_cannot_run_trials_as_another_user(rejected):
    said = rejected("--trial-user", USER, before=reachable(NOBODY))
    assert "only a worker that root starts can run trials as another user" in said


def test_process_that_tries_the_user_cannot_type_into_roots_terminal() -> None:
    """Trials of that user could make it do so, and root's shell would run what they type."""
    need("root", os.geteuid() == 0 or None)
    need("script", shutil.which("script"))
    lines = [
        "from tunemq_workers.node import trial_user_folders as folders",
        "from tunemq_workers.system.trial_user import UserAccount",
        "print(open('/dev/tty'))",
        "folders._CHECK = 'open(\\'/dev/tty\\')'",
        f"folders._check(UserAccount('user', {NOBODY}, {NOBODY}, ({NOBODY},), '/'), [])",
    ]
    line = shlex.join([*reachable(), sys.executable, "-c", "; ".join(lines)])
    ended = subprocess.run(
        ["script", "--quiet", "--return", "--command", line, "/dev/null"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "name='/dev/tty'" in ended.stdout
    assert "No such device or address: '/dev/tty'" in ended.stdout


def test_user_who_may_change_modules_that_root_imports_is_refused(rejected, open_folder):
    modules = open_folder / "modules"
    modules.mkdir()
    os.chown(modules, NOBODY, NOBODY)
    said = rejected("--trial-user", USER, path=str(modules))
    assert f"it can change {modules}, which root runs" in said


@pytest.mark.parametrize("way", ["loopback", "socket"])
def test_redis_whose_place_a_trial_could_take_is_refused_if_it_has_a_password(
    rejected, tmp_path, open_folder, way: str
):
    redis = TcpRedis(tmp_path, "secret", ["--unixsocket", str(open_folder / "redis.sock")])
    try:
        open_folder.chmod(0o1777)
        place = f"unix://:secret@{open_folder}/redis.sock" if way == "socket" else redis.url
        said = rejected("--trial-user", USER, url=place)
    finally:
        redis.end()
    assert f"trials (user {USER}) could listen at" in said
    assert "give these services a rediss:// address with a ca.crt, or a unix:// socket" in said
    assert "secret" not in said


def test_folder_that_the_user_cannot_reach_is_refused_with_its_path(rejected, open_folder):
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    said = rejected("--trial-user", USER, "--workdir", str(closed / "node"))
    assert "who cannot run trials here: it cannot write to" in said
    assert str(closed / "node") in said


def test_worker_whose_interpreter_the_user_cannot_reach_is_refused_with_its_path(
    rejected, open_folder
):
    """A folder above the interpreter is closed, like root's home above a checkout."""
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    python = closed / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    said = rejected("--trial-user", USER, python=str(python), path=path)
    assert f"who cannot run trials here: {python}: Permission denied" in said
    assert "must be able to reach the interpreter" in said


def test_worker_whose_user_cannot_read_the_certificate_of_redis_starts(open_folder):
    """`deploy/redis/certificates.sh` makes a folder that only its owner may enter."""
    line = [*reachable(), sys.executable, "-P", "-m", "tunemq", "worker", "--name", "node"]
    line += ["--workdir", str(open_folder / "node"), "--trial-user", USER]
    (open_folder / "redis").mkdir()
    with secured_redis(open_folder / "redis") as redis, (open_folder / "said").open("wb") as said:
        assert stat.S_IMODE(redis.certificates.stat().st_mode) == 0o700
        environ = {**os.environ, "TUNEMQ_REDIS": redis.url("worker")}
        worker = subprocess.Popen(line, env=environ, cwd="/", stdout=said, stderr=said)
        try:
            redis.client.set(redis_keys.GENERATION, "one")
            eventually(
                lambda: redis.client.exists(redis_keys.NODES),
                within=60,
                message=(open_folder / "said").read_text,
            )
        finally:
            worker.terminate()
            worker.wait(60)


def test_a_cache_of_another_user_is_refused_and_left_alone(rejected, open_folder):
    cache = open_folder / "cache"
    cache.mkdir()
    (cache / "mine").touch()
    workdir = str(open_folder / "node")
    said = rejected("--trial-user", USER, "--workdir", workdir, "--cache", str(cache))
    assert f"it cannot write to {cache}" in said
    assert (cache / "mine").stat().st_uid == cache.stat().st_uid == 0


def test_folders_of_a_worker_with_another_trial_user_are_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("root, to give folders away", os.geteuid() == 0 or None)
    monkeypatch.setattr(trial_user_folders, "_check", lambda account, folders: None)
    root = tmp_path / "node"
    (root / "blobs" / "deep").mkdir(parents=True)
    (root / "blobs" / "deep" / "file").write_text("of root's")
    (root / "kept").mkdir()
    (root / "code").mkdir()
    os.chown(root / "code", NOBODY, NOBODY)
    (root / "code" / "file").touch()
    (root / "code").chmod(0)  # a trial has done it
    (root / "logs").mkdir(0o755)
    (root / "notes").touch(0o644)
    (root / "lock").write_text("123\n")

    names = ("blobs", "code", "new")
    claim_workdir(ACCOUNT, str(root), names)
    give_folders(ACCOUNT, str(root), names, str(tmp_path / "cache"))

    for folder in (root / "blobs", root / "code", root / "new", tmp_path / "cache"):
        status = folder.stat()
        assert (status.st_uid, status.st_gid) == (NOBODY, NOBODY), folder
    assert list((root / "blobs").iterdir()) == []
    assert [path.name for path in (root / "code").iterdir()] == ["file"]
    assert stat.S_IMODE((root / "code").stat().st_mode) == 0o700
    assert (root / "kept").stat().st_uid == 0
    assert stat.S_IMODE((root / "logs").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "notes").stat().st_mode) == 0o644
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


def test_a_folder_that_is_not_tunemqs_is_refused_at_every_start_and_left_alone(
    rejected, open_folder
):
    need("root, who alone may name others", os.geteuid() == 0 or None)
    project = open_folder / "project"
    (project / "code").mkdir(parents=True)
    (project / "code" / "precious").touch()
    project.chmod(0o750)
    for _ in range(2):
        said = rejected("--trial-user", USER, "--workdir", str(project))
        assert f"{project / 'code'} is not TuneMQ's: no worker has worked in {project}" in said
        assert "Move it away, or name another --workdir." in said
        said = rejected("--workdir", str(project))
        assert f"{project / 'code'} is not TuneMQ's: no worker has worked in {project}" in said
    assert (project / "code" / "precious").exists()
    assert [path.name for path in project.iterdir()] == ["code"]
    assert stat.S_IMODE(project.stat().st_mode) == 0o750


@pytest.mark.parametrize("lock", ["of yarn", "", None])
def test_only_a_lock_file_of_a_node_says_that_a_folder_is_tunemqs(tmp_path, lock):
    (tmp_path / "code").mkdir()
    if lock is None:
        (tmp_path / "lock").mkdir()
    else:
        (tmp_path / "lock").write_text(lock)
    with pytest.raises(ConfigError, match="code is not TuneMQ's"):
        claim_workdir(ACCOUNT, str(tmp_path), ["cache", "code"])


def test_link_as_workdir_is_refused_with_the_reason(tmp_path):
    (tmp_path / "lock").write_text("123\n")
    (tmp_path / "cache").symlink_to(tmp_path / "scratch")
    with pytest.raises(ConfigError, match=r"cache is a link.* name the folder itself with --cache"):
        claim_workdir(ACCOUNT, str(tmp_path), ["cache"])


def test_empty_workdir_is_accepted_and_one_writable_by_others_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    claim_workdir(ACCOUNT, str(tmp_path), ["cache"])
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o711
    (tmp_path / "lock").write_text("123\n")
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match=f"chmod go-w {tmp_path}"):
        claim_workdir(ACCOUNT, str(tmp_path), ["cache"])


@pytest.mark.parametrize("whose", ["node", "above"])
def test_workdir_that_another_user_could_change_is_refused(rejected, open_folder, whose):
    """There trials, or that user, could make links that root's node follows."""
    need("root, who alone may name others", os.geteuid() == 0 or None)
    workdir = open_folder / "above" / "node"
    workdir.mkdir(parents=True)
    changed = workdir if whose == "node" else workdir.parent
    os.chown(changed, NOBODY, NOBODY)
    said = rejected("--trial-user", USER, "--workdir", str(workdir))
    assert f"{changed} belongs to user {NOBODY}, who could make root write elsewhere" in said
    assert "name a --workdir that root made, in folders that only root can change." in said
    assert list(workdir.iterdir()) == []


def test_links_to_the_workdir_are_followed_once(tmp_path, monkeypatch):
    need("root, to give folders away", os.geteuid() == 0 or None)
    monkeypatch.setattr(trial_user_folders, "_check", lambda account, folders: None)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    options = Namespace(workdir=str(tmp_path / "link"), farm=False, cache=None)
    node_process._prepare_workdir(options, ACCOUNT)
    assert options.workdir == str(tmp_path / "real")


def test_workdir_in_a_folder_that_others_may_write_to_is_refused(tmp_path):
    workdir = tmp_path / "above" / "node"
    workdir.mkdir(parents=True)
    workdir.parent.chmod(0o1777)
    claim_workdir(ACCOUNT, str(workdir), ["cache"])
    workdir.parent.chmod(0o775)
    with pytest.raises(ConfigError, match=f"others may write to {workdir.parent}, who could"):
        claim_workdir(ACCOUNT, str(workdir), ["cache"])


@pytest.mark.parametrize("planted", ["logs", "logs/forkserver-1.log", "logs/node.log/deep"])
def test_what_earlier_trials_planted_in_the_logs_is_removed(tmp_path, monkeypatch, planted):
    need("root, to give folders away", os.geteuid() == 0 or None)
    monkeypatch.setattr(trial_user_folders, "_check", lambda account, folders: None)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    root = tmp_path / "node"
    (root / planted).parent.mkdir(parents=True)
    (root / planted).symlink_to(tmp_path / "precious")
    (root / "logs" / "consumer.log").touch()
    claim_workdir(ACCOUNT, str(root), ["cache"])
    give_folders(ACCOUNT, str(root), ["cache"], None)
    kept = [] if planted == "logs" else ["consumer.log"]
    assert [one.name for one in (root / "logs").iterdir()] == kept
    assert not (root / "logs").is_symlink()
    assert (tmp_path / "precious" / "file").exists()


def test_link_as_lock_file_is_not_followed(rejected, open_folder):
    need("root, who alone may name others", os.geteuid() == 0 or None)
    (open_folder / "precious").write_text("7\n")
    workdir = open_folder / "node"
    workdir.mkdir()
    (workdir / "lock").symlink_to(open_folder / "precious")
    said = rejected("--trial-user", USER, "--workdir", str(workdir))
    assert f"{workdir / 'lock'} is not TuneMQ's" in said
    assert (open_folder / "precious").read_text() == "7\n"


def test_folder_that_cannot_be_emptied_is_refused_with_its_path(tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=r"cache: Not a directory"):
        give_folders(ACCOUNT, str(tmp_path), ["cache"], None)


def test_folder_rights_that_a_trial_took_are_restored_within_a_second(tmp_path: Path) -> None:
    clock, disk, folder = Clock(), FakeDisk(), tmp_path / "blobs"
    folder.mkdir(0o750)
    (tmp_path / "link").symlink_to("gone")  # a trial has replaced the cache
    keep_rights(clock, disk, [str(tmp_path / one) for one in ("gone", "link", "blobs")])
    disk.settle()
    folder.chmod(0o050)
    clock.advance(1.0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_rights_are_restored_by_a_disk_job_since_a_trial_can_lock_a_folder(tmp_path, monkeypatch):
    clock, disk, folder = Clock(), FakeDisk(), tmp_path / "blobs"
    folder.mkdir(0o050)
    jobs = []
    monkeypatch.setattr(disk, "run", lambda place, job, *then: jobs.append((place, job, *then)))
    keep_rights(clock, disk, [str(folder), str(tmp_path / "code")])
    clock.advance(10.0)
    ((place, job, *_),) = jobs  # no other one before it is done
    assert stat.S_IMODE(folder.stat().st_mode) == 0o050
    job()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert place == f"{tmp_path} (rights)"


def acl(owner: int) -> bytes:
    """A default ACL that gives the owner these rights, and a group and the others none."""
    entries = [(0x01, owner), (0x04, 0), (0x20, 0)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *one, 2**32 - 1) for one in entries)


def test_default_acl_by_which_a_trial_locks_later_trials_out_is_removed_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("root, to give folders away", os.geteuid() == 0 or None)
    monkeypatch.setattr(trial_user_folders, "_check", lambda account, folders: None)
    name, clock, disk = "system.posix_acl_default", Clock(), FakeDisk()
    folder = tmp_path / "trials"
    give_folders(ACCOUNT, str(tmp_path), ["trials"], None)
    os.setxattr(folder, name, acl(0))
    (folder / "locked").mkdir()
    assert stat.S_IMODE((folder / "locked").stat().st_mode) == 0

    give_folders(ACCOUNT, str(tmp_path), ["trials"], None)
    (folder / "a").mkdir(0o700)
    keep_rights(clock, disk, [str(folder)])
    disk.settle()
    os.setxattr(folder, name, acl(0o5))
    clock.advance(1.0)
    disk.settle()
    (folder / "b").mkdir(0o700)
    assert [stat.S_IMODE((folder / one).stat().st_mode) for one in "ab"] == [0o700] * 2

    os.setxattr(folder, name, acl(0o7))  # as an administrator may
    clock.advance(1.0)
    assert os.listxattr(folder) == [name]
