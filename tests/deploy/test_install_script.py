"""`install.sh` and `tunemq-farm`, as far as they need no machine of their own."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

from tests.support.waiting import eventually

PROJECT: Final = Path(__file__).parents[2]
SCRIPT: Final = PROJECT / "deploy" / "install.sh"
FARM: Final = PROJECT / "deploy" / "systemd" / "tunemq-farm"
_WORKER_OPTIONS: Final = "--workdir /var/cache/tunemq/worker --grace 30 --trial-user tunemq-trials"


def said_by(*arguments: str, code: int) -> str:
    ended = subprocess.run(
        ["sh", str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("script", [SCRIPT, FARM], ids=lambda path: path.name)
def test_scripts_are_posix_shell(script):
    for shell in filter(shutil.which, ("sh", "dash", "bash")):
        subprocess.run([shell, "-n", str(script)], check=True)
    if (shellcheck := shutil.which("shellcheck")) is not None:
        subprocess.run([shellcheck, "--shell=sh", str(script)], check=True)


def test_help_names_every_option():
    text = SCRIPT.read_text()
    known = {
        word
        for line in text.splitlines()
        if line.strip().startswith("--") and line.rstrip().endswith((")", ";;"))
        for word in line.replace("|", " ").replace(")", " ").split()
        if word.startswith("--")
    }
    said = said_by("--help", code=0)
    assert {option for option in known if option not in said} == set()
    assert len(known) >= 10


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "role missing: name scheduler"),
        (["worker", "scheduler"], "got worker and scheduler"),
        (["worker", "--quickly"], "unknown argument --quickly"),
        (["worker", "--config"], "--config needs a value"),
        (["worker", "--config", "/nowhere"], "contains no file named environment"),
        (["worker", "--wheels", "/nowhere"], "is not a folder"),
        (["worker", "--wheel", "/nowhere"], "is not a file"),
        (["worker", "--requirements", "/nowhere"], "is not a file"),
        (["worker", "--wheel", "a", "--wheels", "b"], "not both"),
        (["worker", "--index", "https://me:secret@there/simple"], "PIP_INDEX_URL"),
        (["worker", "--purge"], "--purge is for uninstall only"),
        (["worker", "--user", "ada"], "--user is for submitters"),
        (["submitter", "--user", "ada"], "--user needs --config FOLDER"),
        (["submitter", "--config", "/nowhere"], "--config needs --user"),
        (["scheduler", "--gpu"], "for workers"),
    ],
)
def test_invalid_arguments_are_rejected_with_the_reason(arguments, why):
    said = said_by(*arguments, code=2)
    assert why in said
    assert "secret" not in said


def test_wheels_of_several_versions_are_rejected(tmp_path):
    for version in ("0.1.0", "0.1.0.dev0"):
        (tmp_path / f"tunemq-{version}-py3-none-any.whl").touch()
    assert "contains several versions" in said_by("worker", "--wheels", str(tmp_path), code=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can install")
def test_second_install_at_the_same_time_is_rejected(tmp_path):
    lock = tmp_path / "lock"
    script = SCRIPT.read_text().replace("=/run/tunemq-install.lock", f"={lock}")
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = subprocess.run(
            ["sh", "-s", "uninstall"], input=script, capture_output=True, text=True, check=False
        )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "another install.sh runs on this machine" in ended.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_user_other_than_root_is_rejected():
    script = SCRIPT.read_text()
    ended = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-s", "uninstall"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "only root" in ended.stderr


def farm(*arguments: str, folder: Path, code: int = 0) -> str:
    """Run tunemq-farm with a program of two lines in the place of tunemq; return its output."""
    folder.mkdir(exist_ok=True)
    program = folder / "tunemq"
    program.write_text('#!/bin/sh\necho "$@"\necho "$TUNEMQ_REDIS" "$TOKEN"\n')
    program.chmod(0o755)
    script = folder / "tunemq-farm"
    script.write_text(FARM.read_text().replace("/opt/tunemq/bin/tunemq", str(program)))
    ended = subprocess.run(
        ["sh", str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": "/", "TUNEMQ_CONFIG": str(folder)},
    )
    assert ended.returncode == code, ended.stderr
    return ended.stdout + ended.stderr


def test_values_of_the_environment_file_are_taken_literally(tmp_path):
    url = "rediss://ada:$(touch x)@h:1/0?a=b&c=`id`;d 'e\""
    lines = ["# a comment", "", f"TUNEMQ_REDIS={url}", "no pair", "TOKEN=last line, without an end"]
    (tmp_path / "environment").write_text("\n".join(lines))
    said = farm("ls", "--json", "a b", folder=tmp_path).splitlines()
    assert said[:2] == ["ls --json a b", f"{url} last line, without an end"]
    assert "ignored no pair: write NAME=VALUE" in said[2]
    assert not (tmp_path / "x").exists()


def test_line_with_export_is_named_without_its_value(tmp_path):
    (tmp_path / "environment").write_text("export TUNEMQ_REDIS=secret\nTOKEN=t\n")
    said = farm("ls", folder=tmp_path)
    assert "environment: ignored export TUNEMQ_REDIS: write NAME=VALUE" in said
    assert "secret" not in said
    said = said_by("worker", "--config", str(tmp_path), code=2)
    assert f"{tmp_path}/environment, line 1: write NAME=VALUE" in said
    assert "secret" not in said


def test_folder_without_an_environment_file_is_named(tmp_path):
    said = farm("ls", folder=tmp_path, code=64)
    assert f"{tmp_path}/environment is missing: create it" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_runs_no_line_of_a_file_before_it_becomes_the_files_user():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        ran_as = folder / "ran-as"
        ran_as.mkdir()
        ran_as.chmod(0o777)
        for tool in ("stat", "id", "getent", "cut", "setpriv", "setsid", "env", "sh"):
            evil = folder / tool
            evil.write_text(f"#!/bin/sh\n: > {ran_as}/$(/usr/bin/id -u)\n")
            evil.chmod(0o755)
        variables = folder / "environment"
        variables.write_text(f"PATH={folder}\nTUNEMQ_REDIS=theirs\n")
        os.chown(variables, 65534, 65534)
        assert farm("ls", folder=folder).splitlines() == ["ls", "theirs "]
        assert [path.name for path in ran_as.iterdir() if path.name == "0"] == []


class Installer:
    """install.sh with the test's folders in place of the machine's, and tools that only print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etc = folder / "etc"
        self.programs = folder / "programs"
        self.units = folder / "units"
        for made in ("etc", "programs", "prefix", "stage", "units"):
            (folder / made).mkdir()
        functions = SCRIPT.read_text().replace('\nmain "$@"; exit\n', "\n")
        (above, _) = functions.split("\nsay()", 1)  # where the folders of the machine are named
        named = re.findall(r"^(\w+)=[/$]", above, re.MULTILINE)
        assert {"prefix", "etc", "state", "units", "programs"} < {*named}
        folders = "\n".join(f"{name}={folder}/{name}" for name in named)
        self._functions = f"""{functions}
            {folders}
            chown() {{ :; }}
            install() {{ for last; do :; done; mkdir -p "$last"; }}
            flock() {{ :; }}
            has_systemd() {{ true; }}
            systemctl() {{
                verb=$1
                [ "$verb" = is-active ] || echo "systemctl $*"
                for unit; do :; done
                case $verb in
                    start) for unit; do : > "{folder}/up-$unit"; done ;;
                    is-active) [ -e "{folder}/up-$unit" ] ;;
                esac
            }}
            running() {{ cat {folder}/running 2> /dev/null || :; }}
            getent() {{ [ "$2" != nobody-here ]; }}
            userdel() {{ echo "userdel $1"; }}
            groupdel() {{ :; }}
            put_programs() {{ :; }}
            report() {{ :; }}
            fetch() {{
                mkdir -p $prefix
                stage={folder}/stage is_new=$(cat {folder}/is_new 2> /dev/null || :)
            }}
            install_packages() {{ echo installed; }}
        """

    def sh(self, lines: str, code: int = 0, at: Path = SCRIPT) -> str:
        """Run lines of shell that use the script's functions; return their output."""
        ended = subprocess.run(
            ["sh", "-euc", f"{self._functions}\n{lines}", str(at)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert ended.returncode == code, ended.stdout
        return ended.stdout

    def install(self, role: str, *options: str, code: int = 0) -> str:
        """Install ``role`` on the machine; each role has a separate key file with its name."""
        config = self.folder / f"config-{role}"
        config.mkdir(exist_ok=True)
        (config / "environment").write_text(f"TUNEMQ_KEYS={self.etc}/keys.toml\n")
        (config / "keys.toml").write_text(role)
        line = " ".join([role, "--config", str(config), *options])
        return self.sh(f"read_arguments {line}; make_users() {{ :; }}; install_role", code)

    def uninstall(self, *options: str) -> str:
        """Uninstall TuneMQ from the machine."""
        return self.sh(f"read_arguments uninstall {' '.join(options)}; uninstall")


@pytest.fixture
def installer(tmp_path):
    return Installer(tmp_path)


def test_uninstall_refuses_while_a_process_that_no_service_runs_uses_its_files(installer):
    installer.install("scheduler")
    said = installer.sh(
        "read_arguments uninstall; has_systemd() { false; }; unmanaged() { echo 77; }; uninstall", 1
    )
    assert "cannot remove" in said
    assert "while its processes run: 77; stop them first" in said
    assert (installer.etc / "keys.toml").exists()


def test_keys_kept_by_an_uninstall_are_not_writable_for_another_role(installer):
    installer.install("scheduler")
    installer.install("worker")
    installer.uninstall()
    installer.install("worker")
    assert (installer.etc / "keys.toml").read_text() == "scheduler"
    assert (installer.etc / "worker" / "keys.toml").read_text() == "worker"
    assert "worker/keys.toml" in (installer.etc / "worker" / "environment").read_text()
    assert stat.S_IMODE((installer.etc / "environment").stat().st_mode) == 0o640
    assert stat.S_IMODE((installer.etc / "keys.toml").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("first", "second"), [("scheduler", "worker"), ("worker", "scheduler"), ("worker", "store")]
)
def test_second_role_of_a_machine_reads_only_its_own_environment(
    installer: Installer, first: str, second: str
):
    installer.install(first)
    (unit,) = installer.units.glob(f"tunemq-{first}.service")
    shipped = unit.read_text()
    # As earlier versions of the script wrote it.
    late = installer.units / f"tunemq-{second}.service"
    shutil.copy(SCRIPT.parent / "systemd" / late.name, late)
    (installer.folder / "running").write_text(f"{late.name}\n")
    said = installer.install(second)
    assert f"systemctl stop {late.name}\n" in said
    for path in installer.units.glob(f"tunemq-{second}*.service"):
        files = re.findall("^EnvironmentFile=-(.*)$", path.read_text(), re.MULTILINE)
        assert files[0] == f"/etc/tunemq/{second}/environment"
        assert "/etc/tunemq/environment" not in files
    assert "is up to date" in installer.install(second)
    assert "is up to date" in installer.install(first)
    assert unit.read_text() == shipped
    assert "EnvironmentFile=-/etc/tunemq/environment" in shipped


def test_second_role_without_an_environment_is_refused_before_services_stop(installer: Installer):
    installer.install("scheduler")
    (installer.folder / "running").write_text("tunemq-worker.service\n")
    (installer.folder / "is_new").write_text("yes")
    line = "make_users() { :; }; install_role"
    said = installer.sh(f"read_arguments worker; {line}", code=1)
    assert f"it does not read {installer.etc}/environment, which is another role's" in said
    assert "systemctl stop" not in said
    installer.sh(f"read_arguments store; {line}")
    with (installer.etc / "environment").open("a") as file:
        file.write("TUNEMQ_STORE_OPTIONS=--listen 192.0.2.1:7380\n")
    said = installer.sh(f"read_arguments store; {line}", code=1)
    assert f"the store needs {installer.etc}/store/environment" in said


def test_printed_command_of_a_second_role_has_only_its_own_options(installer: Installer):
    (installer.folder / "config-worker").mkdir()
    installer.install("scheduler")
    (installer.etc / "environment").write_text("TUNEMQ_WORKER_OPTIONS=--cpus 16\n")
    config = installer.folder / "config-worker"
    (config / "environment").write_text("A=b\n")
    said = installer.sh(
        f"""
        has_systemd() {{ false; }}
        read_arguments worker --config {config}
        make_users() {{ :; }}; make_folders() {{ :; }}; install_role
        """
    )
    assert f"TUNEMQ_CONFIG={installer.etc}/worker " in said
    assert "--cpus" not in said


def test_uninstall_removes_no_files_of_others(installer):
    installer.install("worker")
    theirs = installer.units / "tunemq-backup.service"
    theirs.touch()
    (installer.programs / "tunemq").write_text("another's")
    (installer.etc / ".made-users").write_text("tunemq\nnobody-here\n")
    said = installer.uninstall("--purge")
    assert "backup" not in said
    assert "tunemq-*" not in said
    assert [line for line in said.splitlines() if "userdel" in line] == ["userdel tunemq"]
    assert theirs.exists()
    assert not (installer.units / "tunemq-worker.service").exists()
    assert (installer.programs / "tunemq").read_text() == "another's"
    assert not installer.etc.exists()


def test_services_changed_and_not_restarted_are_restarted_by_the_next_run(installer):
    (installer.folder / "running").write_text("tunemq-worker.service\ntunemq-store.service\n")
    said = installer.install("worker", "--no-start")
    assert "the next run without --no-start restarts tunemq-worker.service" in said
    assert "systemctl stop" not in said
    said = installer.install("worker")
    assert "systemctl stop tunemq-worker.service\n" in said
    assert "is up to date" in installer.install("worker")


def test_packages_of_a_running_service_are_not_replaced(installer):
    (installer.folder / "running").write_text("tunemq-worker.service\n")
    (installer.folder / "is_new").write_text("yes")
    said = installer.install("scheduler", "--no-start", code=1)
    assert "systemctl stop tunemq-worker.service" in said
    assert "installed" not in said
    assert list(installer.etc.iterdir()) == []
    said = installer.install("scheduler")
    assert said.index("systemctl stop tunemq-worker.service") < said.index("installed")


@pytest.mark.parametrize("end", ["its output is read no further", "TERM", "HUP"])
def test_stopped_services_start_again_where_the_script_is_cut_off(installer, end):
    traps = re.findall(r"^ +trap .*$", SCRIPT.read_text(), re.MULTILINE)
    assert traps
    log = installer.folder / "log"
    kill = "" if end.startswith("its") else f"kill -{end} $$"
    lines = "\n".join(
        [
            f"systemctl() {{ echo $* >> {log}; echo said; }}",
            f"stage={installer.folder}/stage",
            "stopped_units=tunemq-worker.service",
            *traps,
            kill,
            "while :; do echo line; done",
        ]
    )
    script = installer.folder / "script"
    script.write_text(f"{installer._functions}\n{lines}")
    subprocess.run(
        ["sh", "-c", f"sh -eu {script} {SCRIPT} 2>&1 | head -n 1"], check=False, timeout=60
    )
    eventually(log.exists)
    assert log.read_text() == "start --no-block tunemq-worker.service\n"


def test_services_of_a_machine_start_at_once_so_that_systemd_orders_them(installer):
    services = ["tunemq-scheduler.service", "tunemq-store.service"]
    (installer.folder / "running").write_text("\n".join(services))
    (installer.folder / "is_new").write_text("yes")
    said = installer.install("scheduler").splitlines()
    started = [line.split() for line in said if line.startswith("systemctl start ")]
    assert [set(services) & set(words) for words in started] == [set(services)]


@pytest.mark.parametrize(
    ("name", "project", "mode", "is_ours"),
    [
        ("deploy", "tunemq", 0o755, True),
        ("kit", "tunemq", 0o755, False),
        ("deploy", "theirs", 0o755, False),
        ("deploy", "tunemq", 0o1777, False),  # such as /tmp
        ("deploy", None, 0o755, False),
    ],
)
def test_only_the_scripts_checkout_is_built_or_constrains_pip(
    installer, tmp_path, name, project, mode, is_ours
):
    above = tmp_path / "above"
    here = above / name
    here.mkdir(parents=True)
    here.chmod(0o755)
    (here / "install.sh").touch()
    if project is not None:
        (above / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    above.chmod(mode)
    said = installer.sh(f"here={here}; if is_checkout; then echo yes; else echo no; fi")
    assert said == ("yes\n" if is_ours else "no\n")


@pytest.mark.parametrize(("restarts", "looks"), [(2, 0), (0, 59)])
def test_unit_that_ends_twice_is_given_up_at_once_and_a_silent_one_after_a_minute(
    installer: Installer, restarts: int, looks: int
):
    said = installer.sh(
        f"""
        systemctl() {{ [ "$1" = show ] && echo {restarts}; }}
        sleep() {{ echo slept; }}
        wait_until_active tunemq-worker.service || echo down
        """
    )
    assert said.count("slept") == looks
    assert said.endswith("down\n")


@pytest.mark.parametrize(
    ("role", "options", "made", "arguments"),
    [
        (
            "scheduler",
            "--store s3://b/farm?a=1&ca_file=/x'y;$(id) --metrics 127.0.0.1:9464",
            "-m 0750 -o tunemq -g tunemq {0}/state",
            "scheduler {options}",
        ),
        (
            "store",
            "--listen 192.0.2.1:7380 --cert /c.crt --key *",
            "-m 0700 -o tunemq -g tunemq {0}/store",
            "store serve {options} /var/lib/tunemq-store",
        ),
        (
            "store",
            "",
            "-m 0700 -o tunemq -g tunemq {0}/store",
            "store serve /var/lib/tunemq-store",
        ),
        (
            "worker",
            "--cpus 16 --gpus 0,1",
            "-m 0755 -o root -g root {0}/cache",
            f"worker {_WORKER_OPTIONS} {{options}}",
        ),
    ],
)
def test_install_without_systemd_prints_a_command_with_all_options_and_makes_folders(
    installer: Installer, role: str, options: str, made: str, arguments: str
):
    name = f"TUNEMQ_{role.upper()}_OPTIONS"
    config = installer.folder / "config"
    config.mkdir()
    (config / "environment").write_text(f"{name}=--before\n{name}={options}\nA=b\n")
    given = f"--config {config}" if options else ""
    said = installer.sh(
        f"""
        has_systemd() {{ false; }}
        install() {{ for last; do :; done; mkdir -p "$last"; echo "install $*"; }}
        read_arguments {role} {given}; make_users() {{ :; }}; install_role
        """
    )
    assert f"install -d {made.format(installer.folder)}\n" in said
    program = installer.programs / "tunemq"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    farm_script = FARM.read_text().replace("/opt/tunemq/bin/tunemq", str(program))
    farm_script = farm_script.replace("/etc/tunemq", str(installer.etc))
    (installer.programs / "tunemq-farm").write_text(farm_script)
    (installer.programs / "tunemq-farm").chmod(0o755)
    command = said[said.index("restart it when it ends:\n") :].splitlines()[1]
    ran = subprocess.run(["sh", "-euc", command], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:-1] == arguments.format(options=options).split()


@pytest.mark.parametrize(
    ("written", "expected"),
    [("keys", "the keys for all machines are in "), ("", "start the store, which writes the keys")],
)
def test_install_store_without_systemd_announces_only_keys_that_exist(
    installer: Installer, written: str, expected: str
):
    (installer.folder / "store").mkdir()
    (installer.folder / "store" / "credentials").write_text(written)
    (report,) = re.findall(
        r"^report\(\) \{\n.*?^\}\n", SCRIPT.read_text(), re.MULTILINE | re.DOTALL
    )
    said = installer.sh(
        f"{report}\nhas_systemd() {{ false; }}\nread_arguments store; failed_unit=''; report"
    )
    assert f"done. Next: {expected}" in said
