"""The units in `deploy/systemd`: systemd accepts them, and trials can do their work under them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

from tunemq.__main__ import main
from tunemq_scheduler.storage.folders import farm_results_folder

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS: Final = sorted(path.name for path in FOLDER.glob("*.service"))
WORKERS: Final = ["tunemq-worker.service", "tunemq-worker@.service"]
_PROGRAM: Final = "/opt/tunemq/bin/tunemq"


def settings_of(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in (FOLDER / unit).read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[name].append(value)
    return found


def seconds(unit: str, name: str) -> float:
    (value,) = settings_of(unit)[name]
    return float(value)


def test_each_part_of_a_farm_has_a_unit():
    assert [*WORKERS, "tunemq-scheduler.service", "tunemq-store.service"] == sorted(
        UNITS, key=lambda name: ("worker" not in name, name.replace("@", "~"))
    )


def test_systemd_verifies_all_units_and_drop_ins(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:  # machines that run tests need no systemd, in CI neither
        pytest.skip("systemd-analyze is missing")
    for unit in UNITS:  # the program is not installed on a machine that runs tests
        text = (FOLDER / unit).read_text().replace(_PROGRAM, "/bin/true")
        (tmp_path / unit).write_text(text)
    for unit in WORKERS:
        (tmp_path / f"{unit}.d").mkdir()
        for drop_in in ("gpu.conf", "same-user.conf"):
            shutil.copy(FOLDER / drop_in, tmp_path / f"{unit}.d")
    files = [str(tmp_path / unit) for unit in UNITS]
    ended = subprocess.run(
        [analyze, "verify", "--man=no", *files], capture_output=True, text=True, check=False
    )
    # Ignore warnings about other units of this machine.
    assert [line for line in ended.stderr.splitlines() if "tunemq" in line] == []


@pytest.mark.parametrize("unit", [*WORKERS, "tunemq-scheduler.service"])
def test_units_that_use_the_store_start_after_it(unit):
    (after,) = settings_of(unit)["After"]
    assert {"minio.service", "tunemq-store.service", "redis.service"} <= set(after.split())


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_starts_an_installed_program_and_is_restarted_for_ever(unit):
    settings = settings_of(unit)
    (command,) = settings["ExecStart"]
    assert command.split()[0] == _PROGRAM
    assert settings["Restart"] == ["always"]
    assert settings["StartLimitIntervalSec"] == ["0"]
    assert settings["KillMode"] == ["mixed"]
    assert settings["EnvironmentFile"][0] == "-/etc/tunemq/environment"
    assert settings["WantedBy"] == ["multi-user.target"]


def test_every_worker_unit_reads_the_workers_environment_on_a_head():
    for unit in WORKERS:
        files = settings_of(unit)["EnvironmentFile"]
        assert files[1] == "-/etc/tunemq/worker/environment"
    assert files[2:] == ["-/etc/tunemq/%i/environment"]  # the instance's file is last


@pytest.mark.parametrize("unit", UNITS)
def test_every_option_in_a_unit_exists(unit, capsys):
    (command,) = settings_of(unit)["ExecStart"]
    words = command.split()[1:]
    command_words = words[:2] if words[0] == "store" else words[:1]
    with pytest.raises(SystemExit):
        main([*command_words, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known
    assert words[-1].startswith(("$", "/var/lib/"))


@pytest.mark.parametrize("unit", WORKERS)
def test_worker_unit_has_longer_to_stop_than_its_trials(unit):
    (command,) = settings_of(unit)["ExecStart"]
    words = command.split()
    grace = float(words[words.index("--grace") + 1])
    assert seconds(unit, "TimeoutStopSec") >= grace + 15


@pytest.mark.parametrize("unit", [*WORKERS, "tunemq-scheduler.service"])
def test_hanging_service_is_restarted_and_one_greedy_child_ends_nothing(unit):
    settings = settings_of(unit)
    assert settings["Type"] == ["notify"]
    assert seconds(unit, "WatchdogSec") >= 10
    assert settings["OOMPolicy"] == ["continue"]


@pytest.mark.parametrize("unit", WORKERS)
@pytest.mark.parametrize(
    "setting",
    [
        *("PrivateDevices", "ProtectClock", "DeviceAllow", "DevicePolicy"),  # hide /dev/nvidia*
        *("PrivateIPC", "TemporaryFileSystem", "InaccessiblePaths"),  # hide locks in /dev/shm
        *("PrivateUsers", "DynamicUser"),  # trials are another user
        "MemoryDenyWriteExecute",  # compilers of kernels
    ],
)
def test_gpus_and_their_locks_are_visible_to_workers(unit, setting):
    assert settings_of(unit)[setting] == []


@pytest.mark.parametrize("unit", WORKERS)
def test_programs_of_trials_find_the_python_that_tunemq_has_as_in_its_images(unit):
    dockerfile = (FOLDER.parent / "images" / "tunemq.Dockerfile").read_text()
    (path,) = re.findall(r"^ENV (PATH=/opt/tunemq/bin:\S+)", dockerfile, re.MULTILINE)
    assert path in settings_of(unit)["Environment"]


@pytest.mark.parametrize("unit", WORKERS)
def test_trials_run_as_another_user_than_the_worker_by_default(unit):
    settings = settings_of(unit)
    assert settings["User"] == ["root"]
    assert '"TRIALS_AS=--trial-user tunemq-trials"' in settings["Environment"]
    (command,) = settings["ExecStart"]
    assert " $TRIALS_AS " in command
    drop_in = settings_of("same-user.conf")
    assert drop_in["User"] == ["tunemq"]
    assert drop_in["Environment"] == ["TRIALS_AS=", "HOME=/var/cache/tunemq/home"]
    assert drop_in["CacheDirectory"] == ["tunemq/home"]
    assert drop_in["CapabilityBoundingSet"] == [""]


@pytest.mark.parametrize("unit", WORKERS)
def test_worker_may_divide_its_control_group_for_memory_limits(unit):
    settings = settings_of(unit)
    assert settings["Delegate"] == ["memory"]
    assert settings["ProtectControlGroups"] == []


def test_folder_store_may_be_the_place_of_a_schedulers_results(monkeypatch):
    settings = settings_of("tunemq-scheduler.service")
    (command,) = settings["ExecStart"]
    assert "--results" not in command
    (variable,) = settings["Environment"]
    monkeypatch.setenv(*variable.split("="))
    assert (
        farm_results_folder(None, "s3://tunemq/farm?endpoint=https://head:7380")
        == "/var/lib/tunemq/results"
    )
    assert farm_results_folder(None, "/mnt/farm") == "/mnt/farm"


@pytest.mark.parametrize("unit", UNITS)
def test_unit_programs_get_no_further_rights_and_write_only_where_they_need(unit):
    settings = settings_of(unit)
    assert settings["NoNewPrivileges"] == ["yes"]
    assert settings["ProtectSystem"] == ["strict"]
    granted = set(settings["CapabilityBoundingSet"][0].split())
    wanted = [
        "SETUID",
        "SETGID",
        "CHOWN",
        "FOWNER",
        "DAC_OVERRIDE",
        "KILL",
        "SYS_PTRACE",
        "SYS_RESOURCE",
    ]
    assert granted == ({f"CAP_{name}" for name in wanted} if unit in WORKERS else set())


def test_two_worker_units_differ_only_in_names():
    one, many = (settings_of(unit) for unit in WORKERS)
    differing = {name for name in {*one, *many} if one[name] != many[name]}
    assert differing == {"Description", "EnvironmentFile", "ExecStart"}
