"""`install.sh` on machines of their own, with systemd as PID 1: docs/deploy/bare-metal.md, done."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.booted_farm import CARRIED, PROJECT, BootedFarm, commands_of
from tests.deploy.booted_machines import Machine, machines, what_is_missing, wheels
from tests.support.waiting import eventually

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1200)]

#: Resumes from its last checkpoint, and reports its step with each result.
_STEPS = 40
_LONG = f"""
import tempfile, time
from pathlib import Path
import tunemq as tune

def train(config):
    done = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            done = int(Path(folder, "step").read_text())
    for step in range(done + 1, {_STEPS} + 1):
        time.sleep(0.3)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            kept = tune.Checkpoint.from_directory(folder)
            tune.report({{"loss": 1 / step, "step": step}}, checkpoint=kept)

tuner = tune.Tuner(train, tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=2))
"""
#: Inspects its environment, and prints the findings.
_LOOK = """
import getpass, json, os, tempfile
import tunemq as tune

def tried(attempt):
    try:
        attempt()
    except OSError as problem:
        return problem.strerror
    return "yes"

def train(config):
    reads = ("keys.toml", "environment", "ca.crt")
    writes = ("/dev/shm", "/tmp", os.environ["HOME"], ".", "/etc", "/opt/tunemq", "/home")
    seen = {name: tried(lambda: open("/etc/tunemq/" + name).close()) for name in reads}
    for name in writes:
        seen[name] = tried(lambda: tempfile.TemporaryFile(dir=name).close())
    tune.report({"loss": 1.0, "user": getpass.getuser(), "seen": json.dumps(seen)})

tuner = tune.Tuner(train, tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=1))
"""


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[BootedFarm, Machine, Machine]]:
    """A farm with a worker, and a machine that is nothing yet."""
    if missing := what_is_missing():
        pytest.skip(f"no machines of their own: {missing}")
    folder = Path(tempfile.mkdtemp(prefix="tunemq-machines-", dir="/var/tmp"))
    try:
        with machines(folder, ["head", "rack1", "spare"]) as (head, rack, spare):
            for machine in (head, rack, spare):
                machine.boot()
            farm = BootedFarm(head, wheels(PROJECT))
            farm.admit(rack)
            farm.admit(spare)
            first, many = commands_of("Workers", "head#").split("for machine", 1)
            head.sh(first)
            rack.sh(commands_of("Workers", "rack1#"))
            head.sh("echo spare > /root/racks")
            said = head.sh(f"cd /root\nfor machine{many}")
            assert "not done" not in said
            farm.ready("rack1", "spare")
            _uninstall(spare, "--purge")
            yield farm, rack, spare
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def farm(site: tuple[BootedFarm, Machine, Machine]) -> BootedFarm:
    site[0].ready("rack1")
    return site[0]


@pytest.fixture
def rack(site: tuple[BootedFarm, Machine, Machine]) -> Machine:
    return site[1]


@pytest.fixture
def spare(site: tuple[BootedFarm, Machine, Machine]) -> Machine:
    return site[2]


def main_pid(machine: Machine, service: str = "tunemq-worker") -> str:
    return machine.run("systemctl", "show", "--property=MainPID", "--value", service).strip()


def is_active(machine: Machine, service: str = "tunemq-worker") -> bool:
    return machine.run("systemctl", "is-active", service, fails=True).strip() == "active"


def comes_back(machine: Machine, old: str, within: float = 150) -> None:
    """Wait until the worker runs under another pid.

    With control groups of version 1, the kernel does not tell systemd in a container that a group
    is empty, so systemd waits for TimeoutStopSec=.
    """
    eventually(
        lambda: is_active(machine) and main_pid(machine) not in {old, "0"},
        within=within,
        every=0.5,
        message=lambda: machine.run("journalctl", "--lines=40", "-u", "tunemq-worker"),
    )


def no_step_is_missing_or_doubled(farm: BootedFarm, name: str) -> None:
    steps = sorted(line["step"] for line in farm.results(name))
    assert steps == sorted(2 * list(range(1, _STEPS + 1)))


def test_doctor_finds_no_problem_in_a_farm_set_up_by_the_page(farm):
    found = json.loads(farm.head.run("tunemq-farm", "doctor", "--json"))["findings"]
    wrong = {finding["check"] for finding in found if finding["level"] != "ok"}
    # This machine's disk may be full, and of Debian's Redis doctor cannot know which fixes it has.
    assert wrong <= {"node-disk", "results-disk", "redis-lua"}, found
    assert {finding["check"] for finding in found} >= {"store-tls", "redis-tls", "keys", "nodes"}


def test_units_pass_systemds_check_where_they_are_installed(farm, rack):
    for machine in (farm.head, rack):
        said = machine.sh("systemd-analyze verify /etc/systemd/system/tunemq-*.service")
        assert not said.strip()


def test_trial_user_can_read_no_key_and_write_its_folders(farm):
    farm.submit("look", _LOOK)
    farm.ends_well("look")
    said = farm.head.run("journalctl", "--output=cat", "-u", "tunemq-scheduler")
    assert "look: its process" not in said  # it was not started again and again
    (line,) = farm.results("look")
    assert line["user"] == "tunemq-trials"
    seen = json.loads(line["seen"])
    rejected = {"keys.toml", "environment", "/etc", "/opt/tunemq", "/home"}
    assert {name for name, what in seen.items() if what != "yes"} == rejected, seen


def test_killed_worker_restarts_and_its_trials_continue(farm, rack):
    farm.submit("killed", _LONG)
    farm.has_steps("killed", 10)
    old = main_pid(rack)
    rack.run("kill", "-9", old)
    comes_back(rack, old)
    farm.ends_well("killed")
    no_step_is_missing_or_doubled(farm, "killed")


def test_hanging_worker_is_restarted(farm, rack):
    rack.sh(
        "mkdir -p /run/systemd/system/tunemq-worker.service.d;"
        " printf '[Service]\\nWatchdogSec=10\\n'"
        " > /run/systemd/system/tunemq-worker.service.d/quick.conf;"
        " systemctl daemon-reload; systemctl restart tunemq-worker"
    )
    try:
        farm.ready("rack1")
        old = main_pid(rack)
        rack.run("kill", "-STOP", old)
        comes_back(rack, old)
    finally:
        rack.sh(
            "rm -r /run/systemd/system/tunemq-worker.service.d;"
            " systemctl daemon-reload; systemctl restart tunemq-worker"
        )
    farm.ready("rack1")


def test_rebooted_machine_rejoins_and_its_trials_continue(farm, rack):
    farm.submit("rebooted", _LONG)
    farm.has_steps("rebooted", 10)
    rack.reboot()
    farm.ready("rack1")
    farm.ends_well("rebooted")
    no_step_is_missing_or_doubled(farm, "rebooted")


def test_trials_continue_while_the_head_restarts(farm, rack):
    farm.submit("headless", _LONG)
    farm.has_steps("headless", 10)
    old = main_pid(rack)
    farm.head.reboot()
    farm.ends_well("headless")
    no_step_is_missing_or_doubled(farm, "headless")
    assert main_pid(rack) == old


def renew_version(wheel: Path) -> tuple[str, str]:
    """Make a wheel one of the next patch version; the version before, and after."""
    before = wheel.name.split("-")[1]
    after = ".".join([*before.split(".")[:2], "99"])
    new = wheel.with_name(wheel.name.replace(before, after))
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as made:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith((".dist-info/METADATA", ".dist-info/RECORD", "tunemq/__init__.py")):
                data = data.replace(before.encode(), after.encode())
            if name.endswith("RECORD"):  # pip checks no sums where there are none
                data = b"".join(line.split(b",")[0] + b",,\n" for line in data.splitlines())
            made.writestr(name.replace(before, after), data)
    wheel.unlink()
    return before, after


def test_installing_again_changes_and_stops_nothing(farm, rack):
    for machine, install in ((rack, farm.install_worker), (farm.head, _scheduler(farm))):
        service = "tunemq-worker" if machine is rack else "tunemq-scheduler"
        install(machine)  # tests come in any order: another one may have installed something else
        old = main_pid(machine, service)
        said = install(machine)
        assert "is up to date" in said
        assert "stopping" not in said
        assert main_pid(machine, service) == old


def _scheduler(farm):
    return lambda head: farm.install(head, "scheduler", "--config", "/root/farm/scheduler")


def test_upgrade_stops_a_worker_briefly_and_its_trials_continue(farm, rack):
    farm.submit("upgraded", _LONG)
    farm.has_steps("upgraded", 10)
    old = main_pid(rack)
    carried = rack.root / CARRIED[1:]
    shutil.copytree(carried / "wheels", carried / "newer")
    (wheel,) = (carried / "newer").glob("tunemq-*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:  # built anew: the same version, other bytes
        archive.comment = b"newer"
    said = farm.install(rack, "worker", wheels=f"{CARRIED}/newer")
    assert said.index("stopping tunemq-worker.service") < said.index("installed tunemq==")
    assert main_pid(rack) not in {old, "0"}
    farm.ends_well("upgraded")
    no_step_is_missing_or_doubled(farm, "upgraded")


def test_head_that_serves_its_store_moves_running_and_paused_searches_to_another_patch(farm):
    farm.submit("running", _LONG)
    farm.submit("paused", _LONG)
    farm.has_steps("running", 4)
    farm.has_steps("paused", 4)
    farm.ada("pause", "paused")
    carried = farm.head.root / CARRIED[1:]
    shutil.copytree(carried / "wheels", carried / "next")
    (wheel,) = (carried / "next").glob("tunemq-*.whl")
    before, after = renew_version(wheel)

    began = time.monotonic()
    said = farm.install(farm.head, "scheduler", wheels=f"{CARRIED}/next")

    assert f"installed tunemq=={after}" in said
    assert is_active(farm.head, "tunemq-store")
    assert is_active(farm.head, "tunemq-scheduler")
    assert time.monotonic() - began < 600
    farm.ada("resume", "paused")
    for name in ("running", "paused"):
        farm.ends_well(name)
        no_step_is_missing_or_doubled(farm, name)
    said = farm.install(farm.head, "scheduler")
    assert f"installed tunemq=={before}" in said


def test_worker_instances_of_a_head_have_the_workers_keys(farm):
    farm.install(farm.head, "worker", "--config", "/root/farm/worker")
    try:
        farm.ready("head")
        farm.head.run("systemctl", "disable", "--now", "tunemq-worker")
        farm.head.run("systemctl", "enable", "--now", "tunemq-worker@a", "tunemq-worker@b")
        farm.ready("head-a", "head-b")
    finally:
        farm.head.run("systemctl", "disable", "--now", "tunemq-worker@a", "tunemq-worker@b")


def test_second_submitter_leaves_the_commands_of_the_heads_root_working(farm):
    farm.head.sh(
        "cd /root; tunemq keys add keys aaron; cp keys/scheduler.toml farm/scheduler/keys.toml"
    )
    farm.install(farm.head, "scheduler", "--config", "/root/farm/scheduler")
    farm.submit("stopped", _LONG)
    farm.has_steps("stopped", 1)
    farm.head.run("tunemq-farm", "nodes")
    farm.head.run("tunemq-farm", "stop", "stopped")
    assert "stopped by operator" in farm.ada("show", "stopped")


def test_impossible_upgrade_stops_nothing(farm, rack):
    old = main_pid(rack)
    wheel = "/root/broken/tunemq-9.9-py3-none-any.whl"
    rack.sh(f"mkdir -p /root/broken && cat {CARRIED}/wheels/tunemq-*.whl | head -c 1000 > {wheel}")
    line = ["sh", f"{CARRIED}/install.sh", "worker", "--wheels", "/root/broken"]
    said = rack.run(*line, fails=True)
    assert "pip cannot install TuneMQ from /root/broken" in said
    assert main_pid(rack) == old


def test_several_workers_of_one_machine_have_separate_names(farm, rack):
    rack.run("systemctl", "start", "tunemq-worker@a", "tunemq-worker@b")
    farm.ready("rack1", "rack1-a", "rack1-b")
    rack.run("systemctl", "stop", "tunemq-worker@a", "tunemq-worker@b")
    assert is_active(rack)


def test_with_same_user_a_worker_and_its_trials_are_not_root(farm, spare):
    try:
        farm.install_worker(spare, "--same-user")
        farm.ready("spare")
        users = spare.sh(f"ps -o user= -p {main_pid(spare)}").split()
        assert users == ["tunemq"]
        farm.head.run("tunemq-farm", "nodes", "drain", "rack1")
        farm.submit("same", _LOOK)
        farm.ends_well("same")
        farm.head.run("tunemq-farm", "nodes", "resume", "rack1")
        (line,) = farm.results("same")
        assert line["user"] == "tunemq"
        seen = json.loads(line["seen"])
        rejected = {"/etc", "/opt/tunemq", "/home"}
        assert {name for name, what in seen.items() if what != "yes"} == rejected, seen
        farm.install_worker(spare)  # the earlier option still applies
        assert "User=tunemq" in spare.run("systemctl", "cat", "tunemq-worker")
        farm.install_worker(spare, "--separate-user")
        farm.ready("spare")
        assert spare.sh(f"ps -o user= -p {main_pid(spare)}").split() == ["root"]
    finally:
        farm.head.run("tunemq-farm", "nodes", "resume", "rack1", fails=True)
        _uninstall(spare, "--purge")


def test_worker_with_wrong_password_fails_its_installation_until_it_is_corrected(farm, spare):
    spare.sh(
        "cp -r /root/worker /root/wrong;"
        " sed -i 's,://worker:[^@]*@,://worker:wrong@,' /root/wrong/environment"
    )
    try:
        farm.install_worker(spare, "--no-start")  # packages take their own time
        for _ in range(2):
            began = time.monotonic()
            said = spare.run(
                *("sh", f"{CARRIED}/install.sh", "worker", "--config", "/root/wrong"),
                *("--wheels", f"{CARRIED}/wheels"),
                fails=True,
            )
            assert "WRONGPASS" in said
            assert "tunemq-worker.service does not start" in said
            assert time.monotonic() - began < 30
            said = farm.install_worker(spare)
            assert "install.sh: done." in said
            assert "WRONGPASS" not in said
            farm.ready("spare")
    finally:
        _uninstall(spare, "--purge")
        spare.sh("rm -r /root/wrong")


def test_user_submits_from_another_machine(farm, spare):
    farm.admit(spare, "laptop")
    farm.head.sh(commands_of("People", "head#"))
    spare.run("useradd", "--create-home", "ada")
    try:
        spare.sh(commands_of("People", "laptop#"))
        farm.submit("carried", _LOOK, at=spare)
        farm.ends_well("carried")
        assert spare.sh("stat -c '%U %a' ~ada/.config/tunemq/keys.toml").strip() == "ada 600"
        assert not (spare.root / "root/ada").exists()
    finally:
        _uninstall(spare, "--purge")
        spare.run("userdel", "--remove", "ada")


def test_uninstalled_worker_leaves_the_machine_as_it_was(farm, spare):
    before = _what_is_there(spare)
    farm.install_worker(spare)
    farm.ready("spare")
    assert _what_is_there(spare) != before
    _uninstall(spare)
    kept = _what_is_there(spare)
    assert "/etc/tunemq/keys.toml" in kept
    gone = ("/opt/tunemq", "/usr/local/bin/tunemq", "/etc/systemd/system/tunemq", "/var/cache/t")
    assert [path for path in kept - before if path.startswith(gone)] == []
    _uninstall(spare, "--purge")
    after = _what_is_there(spare)
    assert sorted(after - before) == []
    assert sorted(before - after) == []


def _uninstall(machine: Machine, *more: str) -> None:
    machine.run("sh", f"{CARRIED}/install.sh", "uninstall", *more)


def _what_is_there(machine: Machine) -> set[str]:
    """All paths except logs and files of the system; users, groups, units, processes."""
    others = ("/proc", "/sys", "/run", "/var/log", "/tmp", "/var/tmp", "/var/lib/systemd")
    prune = " -o ".join(f"-path {path}" for path in others)
    paths = machine.sh(rf"find / \( {prune} \) -prune -o -print").splitlines()
    paths += machine.sh("find /dev/shm /var/tmp /tmp -name '*tunemq*'").splitlines()
    paths += machine.sh("cut -d : -f 1 /etc/passwd | sed 's/^/user /'").splitlines()
    paths += machine.sh("cut -d : -f 1 /etc/group | sed 's/^/group /'").splitlines()
    units = machine.sh("systemctl list-units --plain --no-legend 'tunemq*'").splitlines()
    files = machine.sh("systemctl list-unit-files --no-legend 'tunemq*' || true").splitlines()
    processes = machine.sh("ps -eo comm=,args= | grep '[t]unemq' || true").splitlines()
    backups = {"/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-", "/etc/.pwd.lock"}
    return {*paths, *units, *files, *processes} - backups
