"""The health file of a service, and the verdict of `tunemq health`."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.health import health_command, service_health
from tunemq_shared.health.service_health import ServiceHealth
from tunemq_shared.system.process_attributes import keep_memory_private


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "health"


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]):
    def ask(*arguments: object) -> tuple[int, str]:
        code = health_command.main([str(one) for one in arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return ask


def aged(path: Path, by_s: float) -> None:
    """Set the file's timestamp back by this many seconds."""
    parts = path.read_text().split(" ", 3)
    parts[2] = f"{time.monotonic() - by_s:.3f}"
    path.write_text(" ".join(parts))


# --- the status -----------------------------------------------------------------------------------


def test_starting_service_is_alive_and_not_ready(path, asked):
    ServiceHealth("worker", str(path))
    code, said = asked(path)
    assert code == 0
    assert said == f"worker (process {os.getpid()}) is alive (starting)\n"
    assert asked("--ready", path)[0] == 1


def test_looping_service_that_can_work_is_ready(path, asked):
    ServiceHealth("scheduler", str(path)).beat(is_ready=True, status="searches: 3 run")
    wanted = (0, f"scheduler (process {os.getpid()}) is ready: searches: 3 run\n")
    assert asked("--ready", path) == wanted
    assert asked(path) == wanted


def test_service_without_redis_is_alive_and_not_ready(path, asked):
    ServiceHealth("worker", str(path)).beat(is_ready=False, status="Redis is away; trials: 2")
    assert asked(path)[0] == 0
    code, said = asked("--ready", path)
    assert code == 1
    assert "is alive and not ready (waiting): Redis is away; trials: 2" in said


def test_stopping_service_is_alive_and_not_ready(path, asked):
    one = ServiceHealth("worker", str(path))
    one.beat(is_ready=True, status="trials: 2")
    one.stopping()
    assert asked("--ready", path)[0] == 1
    one.beat(is_ready=True, status="trials: 2")
    assert asked(path)[0] == 0
    assert asked("--ready", path)[0] == 1


def test_ended_service_is_absent(path, asked):
    one = ServiceHealth("worker", str(path))
    one.close()
    one.beat(is_ready=True, status="too late")
    code, said = asked(path)
    assert code == 1
    assert "nothing runs here: No such file" in said


def test_service_whose_loop_hangs_is_not_alive(path, asked):
    ServiceHealth("worker", str(path)).beat(is_ready=True, status="")
    aged(path, 61)
    code, said = asked(path)
    assert code == 1
    found = re.search(r"hangs, or is gone: its loop last went round (\d+\.\d) s ago", said)
    assert found is not None, said
    assert 61 <= float(found[1]) < 90
    assert asked("--within", "90", path)[0] == 0
    assert asked("--within=90", "--ready", path)[0] == 0


def test_file_from_before_the_boot_is_ignored(path, asked):
    ServiceHealth("worker", str(path))
    aged(path, -1000)
    code, said = asked(path)
    assert code == 1
    assert "from before this machine was started" in said


def test_file_from_before_the_boot_with_a_plausible_time_is_ignored(path, asked):
    ServiceHealth("worker", str(path)).beat(is_ready=True, status="trials: 2")
    aged(path, 1)
    assert asked("--ready", path)[0] == 0
    now = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:16]
    path.write_text(path.read_text().replace(now, "0" * len(now)))
    code, said = asked(path)
    assert code == 1
    assert "from before this machine was started" in said


def test_without_a_boot_id_only_time_counts(path, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(health_command, "_BOOT", str(tmp_path / "none"))
    ServiceHealth("worker", str(path)).beat(is_ready=True, status="trials: 2")
    assert asked("--ready", path) == (0, f"worker (process {os.getpid()}) is ready: trials: 2\n")
    aged(path, -1000)
    assert asked(path)[0] == 1


# --- the file -------------------------------------------------------------------------------------


def test_file_is_private_and_of_fixed_size(path):
    one = ServiceHealth("worker", str(path))
    for status in ("short", "long " * 100, "two\nlines ☃"):
        one.beat(is_ready=True, status=status)
        assert path.stat().st_size == service_health.SIZE
        assert path.read_bytes().count(b"\n") == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_command_knows_the_size_and_the_variable():
    assert health_command._SIZE == service_health.SIZE
    assert health_command._VARIABLE == service_health.VARIABLE


def test_link_at_the_path_is_replaced_and_not_followed(path, tmp_path, asked):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    one = ServiceHealth("worker", str(path))
    one.beat(is_ready=True, status="")
    assert victim.read_text() == "precious"
    assert not path.is_symlink()
    assert asked("--ready", path)[0] == 0


def test_link_at_the_temporary_path_is_not_followed(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    Path(f"{path}.{os.getpid()}").symlink_to(victim)
    ServiceHealth("worker", str(path))
    assert victim.read_text() == "precious"


def test_removed_or_replaced_file_is_written_again(path, asked):
    one = ServiceHealth("worker", str(path))
    path.unlink()
    one.beat(is_ready=True, status="")
    assert asked("--ready", path)[0] == 0
    path.unlink()
    path.write_text("of another user")
    one.beat(is_ready=True, status="")
    assert asked("--ready", path)[0] == 0


def test_ending_service_leaves_the_file_of_its_successor(path, asked):
    before = ServiceHealth("worker", str(path))
    after = ServiceHealth("worker", str(path))
    after.beat(is_ready=True, status="")
    before.close()
    assert asked("--ready", path)[0] == 0


def test_removed_folder_ends_no_service(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    one = ServiceHealth("worker", str(folder / "health"))
    (folder / "health").unlink()
    folder.rmdir()
    one.beat(is_ready=True, status="")
    folder.mkdir()
    one.beat(is_ready=True, status="")
    assert (folder / "health").exists()


def test_file_that_cannot_be_created_is_rejected_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"TUNEMQ_HEALTH is .*/none/health, which cannot be"):
        ServiceHealth("worker", str(tmp_path / "none" / "health"))
    with pytest.raises(ConfigError, match="null"):
        ServiceHealth("worker", "a\0b")


def test_folder_in_place_of_the_file_is_rejected_and_leaves_nothing(tmp_path):
    (tmp_path / "health").mkdir()
    with pytest.raises(ConfigError):
        ServiceHealth("worker", str(tmp_path / "health"))
    assert os.listdir(tmp_path) == ["health"]


# --- the command ----------------------------------------------------------------------------------


def test_link_pipe_or_folder_is_not_read(tmp_path, asked):
    ServiceHealth("worker", str(tmp_path / "real"))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        assert asked(tmp_path / name)[0] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away, and look as others")
def test_file_of_another_user_is_ignored(path, asked):
    ServiceHealth("worker", str(path)).beat(is_ready=True, status="")
    assert asked(path)[0] == 0
    os.chmod(path.parent, 0o755)
    os.chmod(path, 0o644)
    os.chown(path, 1234, 1234)
    assert asked(path)[0] == 0  # root may ask about any user's service
    os.seteuid(1235)
    try:
        code, said = asked(path)
    finally:
        os.seteuid(0)
        keep_memory_private(False)  # the kernel makes it private when the user changes
    assert code == 1
    assert "cannot be read" in said or "no file of this user's" in said


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"worker",
        b"worker x 1 0 ready",
        b"worker 1 x 0 ready",
        b"worker 1 1 0",
        b"\xff\0" * 100,
    ],
)
def test_file_of_other_content_is_ignored(path, asked, content):
    path.write_bytes(content)
    code, said = asked(path)
    assert code == 1
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["--within"], ["--within", "soon", "x"], ["--within", "0", "x"], ["--within=nan", "x"],
     ["--reddy", "x"], ["one", "two"]],
)  # fmt: skip
def test_wrong_usage_has_another_exit_code(asked, arguments):
    code, said = asked(*arguments)
    assert code == 64
    assert said.startswith("tunemq health: ")


def test_variable_names_the_file(path, asked, monkeypatch):
    ServiceHealth("worker", str(path))
    monkeypatch.setenv(service_health.VARIABLE, str(path))
    assert asked()[0] == 0


def test_help_explains_the_command(asked):
    code, said = asked("--help")
    assert code == 0
    for word in ("--ready", "--within", "TUNEMQ_HEALTH", "Exit codes", "alive"):
        assert word in said


def test_command_imports_no_slow_module(path):
    ServiceHealth("worker", str(path))
    code = (
        "import sys; from tunemq.__main__ import main; code = main(['health', sys.argv[1]]);"
        "print(*sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    modules = done.stdout.splitlines()[1].split()
    heavy = {"argparse", "json", "msgspec", "celery", "redis", "tunemq_scheduler", "socket"}
    assert "tunemq_shared.health.health_command" in modules
    assert not heavy & set(modules)


# --- the environment ------------------------------------------------------------------------------


def test_health_variables_are_removed_from_the_environment(path, monkeypatch):
    given = {
        "TUNEMQ_HEALTH": str(path),
        "NOTIFY_SOCKET": "@nobody-listens-there",
        "WATCHDOG_USEC": "1000000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    one = ServiceHealth.of_environment("worker")
    assert not set(given) & set(os.environ)
    assert one.variables == given
    assert one.is_wanted
    one.beat(is_ready=True, status="")
    one.close()


def test_without_a_path_health_does_nothing(monkeypatch):
    for name in ("TUNEMQ_HEALTH", "NOTIFY_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    one = ServiceHealth.of_environment("worker")
    assert not one.is_wanted
    one.beat(is_ready=True, status="")
    one.stopping()
    one.close()


def test_health_shows_control_characters_of_the_file_as_text(path: Path, asked) -> None:
    path.write_text("1 x \x1b]0;title\x07\u202e")
    _, said = asked(path)
    assert said.rstrip("\n").isprintable()
