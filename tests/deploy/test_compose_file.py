"""docker-compose.yml: open ports, access to secrets, and services that start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.compose_parts import DEPLOY, REPOSITORY
from tests.support.waiting import need

FILE: Final = REPOSITORY / "docker-compose.yml"
TEXT: Final = FILE.read_text(encoding="utf-8")
COMPOSE: Final[dict[str, Any]] = yaml.safe_load(TEXT)
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
ONCE: Final = {"setup", "store-setup"}
#: Of others; all the rest is built from deploy/images.
FOREIGN: Final = {"prometheus", "grafana"}
_VARIABLE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")

every_service = pytest.mark.parametrize("name", sorted(SERVICES))


def plain(value: object) -> str:
    """The value if no variable is set."""
    return _VARIABLE.sub(r"\2", str(value))


def test_compose_starts_a_whole_farm_and_the_rest_by_profiles():
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert {name for name, given in profiles.items() if not given} == {
        *("setup", "store-setup", "redis", "minio", "proxy", "scheduler", "worker")
    }
    assert profiles["worker-gpu"] == ["gpu"]
    assert profiles["prometheus"] == ["monitoring", "grafana"]
    assert profiles["grafana"] == ["grafana"]


def test_only_loopback_ports_are_published():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"redis", "proxy", *FOREIGN}
    for ports in published.values():
        for port in ports:
            assert plain(port).startswith("127.0.0.1:"), port
    for name in FOREIGN:  # these have no TLS: no variable opens them to others
        assert all(port.startswith("127.0.0.1:") for port in published[name])
    assert not [
        name for name, service in SERVICES.items() if "host" in service.get("network_mode", "")
    ]


def test_minio_is_reached_only_through_its_proxy():
    assert SERVICES["minio"]["networks"] == ["store"]
    assert COMPOSE["networks"]["store"] == {"internal": True}
    beside = {name for name, service in SERVICES.items() if "store" in service.get("networks", [])}
    assert beside == {"minio", "proxy", "store-setup"}
    assert SERVICES["setup"]["network_mode"] == "none"


@every_service
def test_each_service_reports_its_health_and_is_restarted(name: str):
    service = SERVICES[name]
    if name in ONCE:
        assert service["healthcheck"] == {"disable": True}
        assert service["restart"] == "no"  # `up` reports its failure
        return
    assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
    assert service["restart"] == "unless-stopped"
    assert service["logging"]["options"]["max-size"]


@every_service
def test_each_service_has_only_the_rights_that_it_needs(name: str):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is (name != "grafana")
    assert not service.get("privileged")
    assert name in ONCE or "cap_add" not in service
    if name not in ONCE | FOREIGN:
        assert service["user"] == "10001:10001"
    if name not in ONCE:
        assert service["pids_limit"]
        assert "mem_limit" in service


@every_service
def test_services_can_be_scaled(name: str):
    assert not {"container_name", "hostname"} & set(SERVICES[name])


@every_service
def test_environments_and_arguments_contain_no_secret(name: str):
    service = SERVICES[name]
    environment = service.get("environment", {})
    assert set(environment) <= {
        *("TUNEMQ_SUBMITTERS", "TUNEMQ_HOST", "TUNEMQ_PUBLISH"),
        *("TUNEMQ_REDIS_PORT", "TUNEMQ_STORE_PORT"),
        *("MINIO_ROOT_USER_FILE", "MINIO_ROOT_PASSWORD_FILE", "MINIO_BROWSER", "MINIO_UPDATE"),
        "HOME",
    }
    assert "env_file" not in service
    said = json.dumps([service.get("command"), service.get("entrypoint"), environment])
    assert not re.search(r"rediss?://|password=|AWS_|SECRET_KEY", said)


@every_service
def test_only_setup_and_services_that_need_them_see_secrets_and_none_changes_them(name: str):
    mounted = [one for one in SERVICES[name].get("volumes", []) if one.startswith("secrets-")]
    if name == "setup":
        assert {one.split(":")[0] for one in mounted} == {
            volume for volume in COMPOSE["volumes"] if volume.startswith("secrets-")
        }
        return
    assert all("ro" in one.split(":")[2].split(",") for one in mounted)
    if name == "store-setup":
        return
    wanted = {"worker-gpu": "worker", "prometheus": None}.get(name, name)
    assert [one.split(":")[0] for one in mounted] == ([f"secrets-{wanted}"] if wanted else [])


@every_service
def test_each_service_has_an_image_that_can_be_built_here(name: str):
    service = SERVICES[name]
    if name in FOREIGN:
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", plain(service["image"]))
        return
    image, build = plain(service["image"]), service["build"]
    file = REPOSITORY / build["context"] / build["dockerfile"]
    stages = re.findall(r"(?m)^FROM .* AS ([\w-]+)$", file.read_text(encoding="utf-8"))
    assert build["target"] in stages
    assert image == f"tunemq/{build['target']}"


@every_service
def test_mounts_and_dependencies_exist(name: str):
    service = SERVICES[name]
    for mount in service.get("volumes", []):
        source, *rest = mount.split(":")
        assert rest, f"{mount} has no name: no command would remove it"
        if source.startswith("."):
            assert rest[-1] == "ro"
            assert (REPOSITORY / source).exists(), source
        else:
            assert source in COMPOSE["volumes"]
    for other, how in service.get("depends_on", {}).items():
        has_end = other in ONCE
        assert (how["condition"] == "service_completed_successfully") is has_end
    for mounted in (line for line in service.get("entrypoint", []) if line.startswith("/deploy/")):
        assert (DEPLOY.parent / mounted.removeprefix("/")).exists()


def test_workers_have_much_longer_to_stop_than_trials_have_to_save():
    """Users often set the one and forget the other."""
    for name in ("worker", "worker-gpu"):
        command = [plain(word) for word in SERVICES[name]["command"]]
        grace = int(command[command.index("--grace") + 1])
        assert int(plain(SERVICES[name]["stop_grace_period"]).removesuffix("s")) >= 10 * grace


def test_workers_that_share_a_disk_can_be_told_how_much_each_may_use():
    for name in ("worker", "worker-gpu"):
        command = SERVICES[name]["command"]
        assert command[command.index("--disk-bytes") + 1] == "${TUNEMQ_WORKER_DISK:-0}"


def test_memory_of_the_proxy_does_not_depend_on_the_number_of_processors():
    text = (DEPLOY / "proxy" / "nginx.conf").read_text(encoding="utf-8")
    assert re.search(r"(?m)^worker_processes \d;", text)
    assert "mem_limit" in SERVICES["proxy"]


@pytest.mark.parametrize("page", ["compose.md", "monitoring.md"])
def test_pages_set_variables_where_the_next_command_finds_them(page: str):
    """Commands without `--profile` miss services, an `up` without `--scale` ends workers."""
    text = (REPOSITORY / "docs" / "deploy" / page).read_text(encoding="utf-8")
    typed = re.findall(r"(?m)^(?:head)?[$] (.*docker compose.*)$", text)
    assert typed
    assert not [line for line in typed if "--profile" in line or "--scale" in line]


def test_files_that_pages_copy_into_a_checkout_are_ignored_by_git():
    if not (REPOSITORY / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is not a clone")
    pages = [
        (REPOSITORY / "docs" / "deploy" / name).read_text(encoding="utf-8")
        for name in ("compose.md", "monitoring.md")
    ]
    copied = set(re.findall(r"(?m)^(?:head)?[$] .* setup:\S+ (\S+)$", "".join(pages)))
    assert {"tunemq-submitter", "tunemq-grafana-password"} <= copied
    secret = sorted({*copied, ".env", "farm.tar"})
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *secret],
        check=False,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.stdout.split() == secret


def test_workers_share_a_volume_with_separate_folders(tmp_path: Path):
    need("flock (of util-linux)", shutil.which("flock"))
    assert SERVICES["worker"]["entrypoint"] == SERVICES["worker-gpu"]["entrypoint"]
    folders = tmp_path / "folders"
    folders.mkdir()
    program = tmp_path / "tunemq-entrypoint"
    program.write_text('#!/bin/sh\necho "$*"\nread -r line\n')
    program.chmod(0o755)
    *line, script, name = SERVICES["worker"]["entrypoint"][3:]
    assert "/var/cache/tunemq" in script
    script = script.replace("$$", "$").replace("/var/cache/tunemq", str(folders))

    with contextlib.ExitStack() as stack:

        def started() -> tuple[subprocess.Popen[str], str]:
            worker = subprocess.Popen(
                [*line, script, name, "--grace", "30"],
                env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(worker.communicate)  # it ends when its stdin closes
            assert worker.stdout
            return worker, worker.stdout.readline().strip()

        workers = [started() for _ in range(3)]
        said = [
            f"worker --name worker-{n} --workdir {folders}/{n} --grace 30" for n in (1, 2, 3, 4)
        ]
        assert [one for _, one in workers] == said[:3]
        workers[1][0].kill()
        workers[1][0].wait()
        assert [started()[1] for _ in range(2)] == [said[1], said[3]]


def test_example_of_settings_has_all_of_them_with_their_defaults():
    example = (DEPLOY / "compose" / "example.env").read_text(encoding="utf-8")
    said: dict[str, set[str]] = {}
    for name, value in re.findall(r"(?m)^#([A-Z_]+)=(.*)$", example):
        said.setdefault(name, set()).add(value)
    used: dict[str, set[str]] = {}
    for name, value in _VARIABLE.findall(TEXT):
        used.setdefault(name, set()).update({value} - {""})
    assert set(said) == set(used) | {"COMPOSE_PROFILES"}  # this one is of Compose itself
    for name, values in used.items():
        assert values <= said[name], name
    assert not re.search(r"(?m)^[^#\n]", example), "a copy of it changes nothing"


def test_store_is_the_one_of_the_policies():
    command = SERVICES["scheduler"]["command"]
    assert command[command.index("--store") + 1] == "s3://tunemq/farm"
    policy = (DEPLOY / "minio" / "scheduler-policy.json").read_text(encoding="utf-8")
    assert "arn:aws:s3:::tunemq/farm/*" in policy


@pytest.mark.parametrize("line", [["docker", "compose"], ["docker-compose"]], ids=" ".join)
def test_compose_accepts_the_file(line: list[str], tmp_path: Path):
    """Checks the current Compose, and the last release of the previous one."""
    if not shutil.which(line[0]) or not _runs([*line, "version"]):
        pytest.skip(f"{' '.join(line)} is not installed")
    given = ["--file", str(FILE), "--project-directory", str(REPOSITORY)]
    profiles = ["--profile", "gpu", "--profile", "grafana"]
    done = subprocess.run(
        [*line, *given, *profiles, "config"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)


def _runs(line: list[str]) -> bool:
    return subprocess.run(line, check=False, capture_output=True).returncode == 0
