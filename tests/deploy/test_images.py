"""The Dockerfiles and their scripts, without Docker."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY: Final = Path(__file__).parents[2]
IMAGES: Final = REPOSITORY / "deploy" / "images"
DOCKERFILES: Final = sorted(IMAGES.glob("*.Dockerfile"))
SCRIPTS: Final = sorted([*IMAGES.glob("*.sh"), *IMAGES.glob("steps/*.sh")])
BASES: Final = {"BASE": "debian:bookworm-slim", "GO_IMAGE": "golang:1.26-bookworm"}


def instructions(file: Path) -> list[str]:
    """Its instructions, each in one line, without comments."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [line for line in joined.splitlines() if line.strip()]


def named(path: Path) -> str:
    return path.name


every_dockerfile = pytest.mark.parametrize("file", DOCKERFILES, ids=named)


@every_dockerfile
def test_there_are_exactly_two_base_images(file):
    stages, defaults = {"scratch"}, {}
    for line in instructions(file):
        match line.split():
            case ["ARG", setting] if not stages - {"scratch"}:
                name, _, defaults[name] = setting.partition("=")
            case ["FROM", source, *rest]:
                assert source in stages or source.strip("${}") in BASES, line
                stages |= set(rest[1:])
    assert defaults.items() <= BASES.items()


def test_recipe_makes_the_bases_that_dockerfiles_name():
    recipe = (IMAGES / "base-images.sh").read_text()

    for base in BASES.values():
        assert f"import_image {base} " in recipe


@every_dockerfile
def test_only_the_fetch_steps_download_and_no_frontend_is_pulled(file):
    assert "syntax=" not in file.read_text()  # BuildKit would ask a registry for that
    for line in instructions(file):
        assert not line.startswith("ADD "), line
        assert not re.search(r"curl|wget|https?://|apt-get|pip install", line), line


@every_dockerfile
def test_minio_is_the_version_of_the_tests(file):
    makefile = (REPOSITORY / "Makefile").read_text()
    pinned = re.search(r"^MINIO_VERSION := (\S+)$", makefile, re.MULTILINE)
    assert pinned

    found = re.findall(r"^ARG MINIO_VERSION=(\S+)$", file.read_text(), re.MULTILINE)

    assert found == ([] if file.name == "tunemq.Dockerfile" else [pinned[1]])


@pytest.mark.parametrize("name", ["tunemq.Dockerfile", "services.Dockerfile"])
def test_no_image_runs_as_root(name):
    users: dict[str, str] = {}
    stage = ""
    for line in instructions(IMAGES / name):
        words = line.split()
        if words[0] == "FROM":
            stage = words[3]
            users[stage] = users.get(words[1], "root")
        elif words[0] == "USER":
            users[stage] = words[1]

    images = {
        stage for stage in users if re.fullmatch(r"(?!.*-(base|venv|build)$)[a-z-]{3,}", stage)
    }
    images -= {"base", "venv"}

    assert images == (
        {"scheduler", "worker", "worker-gpu"}
        if name == "tunemq.Dockerfile"
        else {"redis", "minio", "proxy"}
    )
    assert {users[stage] for stage in images} == {"10001:10001"}


@every_dockerfile
def test_no_secret_is_an_argument_or_a_variable_of_an_image(file):
    for line in instructions(file):
        if line.startswith(("ARG", "ENV", "LABEL")):
            assert not re.search("password|token|secret|credential|_key", line, re.IGNORECASE), line


def test_pip_installs_the_versions_of_the_constraints():
    assert "--constraint constraints.txt" in (IMAGES / "steps" / "pip.sh").read_text()
    for file in DOCKERFILES:
        for line in instructions(file):
            if "pip.sh" in line:
                assert "${PACKAGES}" in line, line


def test_offline_farm_brings_all_packages_that_images_install():
    def packages(file: str, step: str) -> set[str]:
        text = "\n".join(instructions(IMAGES / file))
        found = re.findall(rf"{step}((?: +[a-z/][a-z0-9/-]*)+)", text)
        return {package for words in found for package in words.split()} - {"/debian"}

    brought = packages("offline.Dockerfile", "apt-download.sh")
    needed = packages("tunemq.Dockerfile", "apt-install.sh") | packages(
        "services.Dockerfile", "apt-install.sh"
    )

    assert {"python3", "python3-venv", "redis-server", "nginx-light"} <= needed
    assert brought == needed


def test_wheels_are_brought_for_all_extras():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    text = (IMAGES / "offline.Dockerfile").read_text()

    extras = re.search(r'"\.\[([a-z0-9,]+)\]"', text)

    assert extras
    assert set(extras[1].split(",")) == set(project["project"]["optional-dependencies"])
    for requirement in project["build-system"]["requires"]:
        assert f'"{requirement}"' in text


def required(python: str) -> set[str]:
    """The distributions that TuneMQ with all extras requires under this Python."""
    minor = python.rpartition(".")[0]
    environment = {"python_full_version": python, "python_version": minor}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    waiting = [("", line) for lines in lists for line in lines]
    found: set[tuple[str, str]] = set()
    while waiting:
        extra, line = waiting.pop()
        one = Requirement(line)
        if one.marker is not None and not one.marker.evaluate({**environment, "extra": extra}):
            continue
        for wanted in {"", *one.extras}:
            if (one.name, wanted) not in found:
                found.add((one.name, wanted))
                with contextlib.suppress(metadata.PackageNotFoundError):
                    waiting += [(wanted, line) for line in metadata.requires(one.name) or ()]
    return {canonicalize_name(name) for name, _ in found}


def test_wheels_made_by_the_newest_patch_version_serve_the_first_of_its_line():
    """pip resolves for the Python that runs it; Debian's 3.11.2 may be older than that."""
    assert "redis" in required("3.11.0")
    assert required("3.11.0") == required("3.11.99")
    assert required("3.12.0") == required("3.12.99")


def test_build_context_has_the_copied_files_and_no_keys_or_results():
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    let_in = [rule[1:] for rule in rules if rule.startswith("!")]

    assert rules[0] == "*"
    for path in let_in:
        assert (REPOSITORY / path).exists(), path
    for file in DOCKERFILES:
        for line in instructions(file):
            copied = line.split()[1:-1] if line.startswith("COPY ") else []
            mounted = re.findall(r"type=bind,source=([^, ]+)", line)
            for path in [] if "--from=" in line else [*copied, *mounted]:
                assert any(fnmatch.fnmatch(there, f"{path}*") for there in let_in), path


def test_files_of_a_site_are_never_committed():
    ignored = subprocess.run(
        ["git", "check-ignore", "site/pip.conf", "site/wheels/a.whl", "site/ca.crt"],
        cwd=IMAGES,
        capture_output=True,
        text=True,
        check=False,
    )
    if ignored.returncode == 128:
        pytest.skip("this is no checkout of git")

    assert len(ignored.stdout.split()) == 3


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_script_parses(script):
    subprocess.run(["sh", "-n", script], check=True)


@pytest.mark.parametrize("arguments", [["--mirror"], ["--go"], ["golang"], ["--help", "x"]])
def test_recipe_of_bases_explains_its_use(arguments):
    done = subprocess.run(
        ["sh", IMAGES / "base-images.sh", *arguments], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert done.stderr.startswith("usage: base-images.sh")


def test_base_images_recipe_runs_programs_without_the_callers_tmpdir(tmp_path):
    """A stand-in debootstrap ends the script at its first step, and prints its arguments."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, script in {
        "id": "echo 0",
        "docker": "exit 0",
        "debootstrap": 'echo "TMPDIR=${TMPDIR-unset}" >&2; exit 7',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}

    done = subprocess.run(
        ["sh", IMAGES / "base-images.sh"], capture_output=True, text=True, check=False, env=environ
    )

    assert done.returncode == 7
    assert "TMPDIR=unset" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["programs"]


# --- the entrypoint -------------------------------------------------------------------------------


class Entrypoint:
    """entrypoint.sh with a `tunemq` that prints its arguments."""

    def __init__(self, folder: Path) -> None:
        self.environment = folder / "environment"
        program = folder / "tunemq"
        program.write_text("#!/bin/sh\nprintf 'said %s\\n' \"$@\"\nenv\n")
        program.chmod(0o755)
        self.path = f"{folder}{os.pathsep}{os.environ['PATH']}"

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        named = {"PATH": self.path, "TUNEMQ_ENVIRONMENT": str(self.environment)}
        return subprocess.run(
            ["sh", IMAGES / "entrypoint.sh", *arguments],
            env=named | variables,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def entrypoint(tmp_path):
    return Entrypoint(tmp_path)


def test_entrypoint_runs_without_a_file_of_variables(entrypoint):
    done = entrypoint.run("scheduler", "--store", "s3://a/b c")

    assert done.returncode == 0
    assert done.stdout.startswith("said scheduler\nsaid --store\nsaid s3://a/b c\n")


def test_values_are_taken_literally_and_take_precedence(entrypoint):
    redis = "rediss://worker:a$b`c@redis:6379/0?ssl_ca_certs=/etc/ca.crt&ssl_certfile=/etc/c d"
    entrypoint.environment.write_text(f"# those of a worker\n\nTUNEMQ_REDIS={redis}\nEMPTY=\nX=1=2")

    said = entrypoint.run("doctor", TUNEMQ_REDIS="redis://old").stdout.splitlines()

    assert {f"TUNEMQ_REDIS={redis}", "EMPTY=", "X=1=2"} <= set(said)


@pytest.mark.parametrize(
    "line", ["export NAME=hunter2", "hunter2", "=hunter2", "1A=hunter2", "A-B=hunter2"]
)
def test_invalid_line_is_named_and_not_shown(entrypoint, line):
    entrypoint.environment.write_text(f"A=1\n{line}\n")

    done = entrypoint.run("scheduler")

    assert done.returncode == 64
    assert f"line 2 of {entrypoint.environment} is not NAME=VALUE" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_each_node_gets_a_separate_working_folder_by_default(entrypoint):
    done = entrypoint.run("worker", "--workdir", "/elsewhere", "--cpus", "2")

    said = re.findall(r"^said (.*)$", done.stdout, re.MULTILINE)
    host = os.uname().nodename
    assert said == [
        *("worker", "--workdir", f"/var/cache/tunemq/{host}"),
        *("--workdir", "/elsewhere", "--cpus", "2"),
    ]
