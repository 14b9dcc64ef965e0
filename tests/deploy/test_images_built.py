"""The images, built and run on Docker: their users, exit codes, and images built on them.

Needs Docker with BuildKit, the two base images (deploy/images/base-images.sh makes them) and an
index of Python packages; uses the files in deploy/images/site. The first build of MinIO takes
minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.waiting import eventually

REPOSITORY: Final = Path(__file__).parents[2]
#: Each image, its Dockerfile, and the megabytes that it may have.
IMAGES: Final = {
    "scheduler": ("tunemq", 380),
    "worker": ("tunemq", 260),
    "worker-gpu": ("tunemq", 265),
    "redis": ("services", 110),
    "minio": ("services", 230),
    "proxy": ("services", 110),
}
OURS: Final = ("scheduler", "worker", "worker-gpu")
HARDENED: Final = (
    "--read-only",
    "--tmpfs=/tmp",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
)

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1800)]


def docker(*arguments: str, check: bool = True) -> str:
    """Run Docker; return its output."""
    done = subprocess.run(
        ["docker", *arguments],
        env=os.environ | {"DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if check and done.returncode != 0:
        pytest.fail(f"docker {' '.join(arguments)}:\n{done.stdout}{done.stderr}"[-6000:])
    return done.stdout.strip()


def authorities() -> str | None:
    """The file with pip's trusted certificates on this machine, if configured."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.cert"],
        capture_output=True,
        text=True,
        check=False,
    )
    return os.environ.get("PIP_CERT") or said.stdout.strip() or None


class Built:
    """The six images, under separate names."""

    def __init__(self, context: Path) -> None:
        self.context = context
        self.prefix = "tunemq-test"
        for name, (file, _) in IMAGES.items():
            docker(
                *("build", "--quiet", "--target", name, "--tag", self.name(name)),
                *(
                    "--file",
                    str(context / "deploy" / "images" / f"{file}.Dockerfile"),
                    str(context),
                ),
            )

    def name(self, image: str) -> str:
        return f"{self.prefix}/{image}"

    def shell(self, image: str, script: str, *options: str) -> str:
        """Run a script in a container of the image; return its output."""
        return docker("run", "--rm", *options, "--entrypoint=sh", self.name(image), "-c", script)

    def described(self, image: str) -> dict:
        return json.loads(docker("image", "inspect", self.name(image)))[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Iterator[Built]:
    if shutil.which("docker") is None or not docker("version", check=False):
        pytest.skip("there is no Docker here")
    for base in ("debian:bookworm-slim", "golang:1.26-bookworm"):
        if not docker("image", "ls", "--quiet", base):
            pytest.skip(f"there is no image {base}; deploy/images/base-images.sh makes it")
    context = tmp_path_factory.mktemp("context")
    for rule in (REPOSITORY / ".dockerignore").read_text().splitlines():
        source, target = REPOSITORY / rule[1:], context / rule[1:]
        if rule.startswith("!") and source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif rule.startswith("!"):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for file in ("tunemq", "services"):
        shutil.copy(REPOSITORY / f"deploy/images/{file}.Dockerfile", context / "deploy/images")
    trusted, here = authorities(), context / "deploy" / "images" / "site" / "ca.crt"
    if trusted and not here.exists():
        shutil.copy(trusted, here)
    made = Built(context)
    yield made
    docker("image", "rm", "--no-prune", *map(made.name, IMAGES), check=False)


class Farm:
    """A network with a Redis, and containers that go when the test goes."""

    def __init__(self, built: Built) -> None:
        self.built, self.name = built, f"tunemq-test-{uuid.uuid4().hex[:8]}"
        self.containers: list[str] = []
        docker("network", "create", self.name)
        command = ["redis-server", "--protected-mode", "no", "--save", ""]
        self.start("redis", *command, options=["--network-alias=redis"])

    def start(self, image: str, *command: str, options: list[str] | None = None) -> str:
        """A container's id."""
        given = ["--network", self.name, *HARDENED, *(options or [])]
        container = docker("run", "--detach", *given, self.built.name(image), *command)
        self.containers.append(container)
        return container

    def end(self) -> None:
        docker("rm", "--force", "--volumes", *self.containers)
        docker("network", "rm", self.name)


@pytest.fixture
def farm(built) -> Iterator[Farm]:
    farm = Farm(built)
    try:
        yield farm
    finally:
        farm.end()


def ready(container: str) -> None:
    eventually(
        lambda: (
            " is ready" in docker("exec", container, "tunemq", "health", "--ready", check=False)
        ),
        within=90,
        every=0.5,
        message=lambda: docker("logs", container),
    )


@pytest.mark.parametrize("image", IMAGES)
def test_no_user_in_an_image_is_root_or_becomes_root(built, image):
    assert built.shell(image, "id -u; id -g").split() == ["10001", "10001"]
    assert built.described(image)["Config"]["User"] == "10001:10001"


@pytest.mark.parametrize(("image", "most"), [(name, most) for name, (_, most) in IMAGES.items()])
def test_image_is_small(built, image, most):
    assert built.described(image)["Size"] < most * 10**6


@pytest.mark.parametrize("image", IMAGES)
def test_build_files_are_not_in_the_image(built, image):
    left = built.shell(image, "ls -A / /mnt /tmp; ls /var/lib/apt/lists; which gcc go; true")

    assert not {"site", "steps", "src", "site.list", "ca.crt"} & set(left.split())
    assert "_Packages" not in left
    assert not {"/usr/bin/gcc", "/usr/local/go/bin/go"} & set(left.split())
    assert built.described(image)["Config"].get("Volumes") is None


@pytest.mark.parametrize("image", OURS)
def test_python_is_the_same_everywhere_and_installed_packages_fit(built, image):
    said = built.shell(image, "python -V; python -m pip check; tunemq --help | head -n 1")

    assert said.splitlines()[0].startswith("Python 3.11.")
    assert "No broken requirements found." in said
    assert "usage: tunemq" in said


def test_worker_is_healthy_and_stops_within_its_grace(farm):
    options = ["--tmpfs=/var/cache/tunemq:uid=10001,gid=10001,exec", "--hostname=node-1"]
    command = ["--redis", "redis://redis:6379/0", "--insecure", "--cpus", "1", "--grace", "5"]
    worker = farm.start("worker", *command, options=options)
    ready(worker)

    # The image's init adopts orphaned processes.
    docker("exec", worker, "sh", "-c", "(sh -c 'exit 0' &); (true &); exit 0")
    states = "cat /proc/[0-9]*/stat | sed 's/.*) \\([A-Z]\\) .*/\\1/'"
    eventually(lambda: "Z" not in docker("exec", worker, "sh", "-c", states), within=10, every=0.2)

    docker("stop", "--time", "60", worker)

    state = json.loads(docker("inspect", worker))[0]["State"]
    logs = subprocess.run(["docker", "logs", worker], capture_output=True, text=True, check=True)
    assert state["ExitCode"] == 0, logs.stderr
    assert "Stopping (SIGTERM)" in logs.stdout + logs.stderr


def test_scheduler_is_healthy_and_docker_shows_no_secret_of_it(farm, tmp_path):
    secret = "redis://default:hunter2@redis:6379/0"
    (tmp_path / "environment").write_text(f"TUNEMQ_REDIS={secret}\n")
    tmp_path.chmod(0o755)
    redis = farm.containers[0]
    docker("exec", redis, "redis-cli", "config", "set", "requirepass", "hunter2")

    options = [f"--volume={tmp_path}:/etc/tunemq:ro", "--tmpfs=/var/lib/tunemq:uid=10001,gid=10001"]
    scheduler = farm.start("scheduler", "--insecure", "--metrics", ":9464", options=options)
    ready(scheduler)

    assert "hunter2" not in docker("inspect", scheduler)
    assert "hunter2" not in docker("top", scheduler)
    docker("stop", "--time", "60", scheduler)
    assert json.loads(docker("inspect", scheduler))[0]["State"]["ExitCode"] == 0


def test_worker_without_redis_reports_it(built):
    done = subprocess.run(
        ["docker", "run", "--rm", "--network=none", *HARDENED, built.name("worker")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode in {64, 69}
    assert done.stderr.strip()


def test_users_image_is_a_gpu_worker_with_one_more_package(built, tmp_path):
    name = "extra_of_a_user-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        info = "extra_of_a_user-1.0.dist-info"
        wheel.writestr("extra_of_a_user.py", "ANSWER = 42\n")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: extra-of-a-user\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    (tmp_path / "Dockerfile").write_text(
        f"FROM {built.name('worker-gpu')}\n"
        "USER root\n"
        f"COPY {name} /tmp/\n"
        f"RUN pip install --constraint /opt/tunemq/constraints.txt /tmp/{name} && rm /tmp/{name}\n"
        "USER 10001:10001\n"
    )
    tag = f"tunemq-test/users:{uuid.uuid4().hex[:8]}"
    docker("build", "--quiet", "--network=none", "--tag", tag, str(tmp_path))
    try:
        said = docker(
            *("run", "--rm", "--network=none", *HARDENED, "--entrypoint=python", tag, "-c"),
            "import os, extra_of_a_user as x, tunemq; print(x.ANSWER, os.getuid(), tunemq)",
        )
        kept = json.loads(docker("image", "inspect", tag))[0]["Config"]
    finally:
        docker("image", "rm", tag)

    assert said.startswith("42 10001 <module 'tunemq' from '/opt/tunemq/lib/python3.11/")
    assert kept["Entrypoint"][-2:] == ["tunemq-entrypoint", "worker"]
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in kept["Env"]


def test_redis_minio_and_nginx_run_without_rights_and_without_a_writable_image(built):
    script = {
        "redis": "redis-server --version",
        "minio": "minio --version",
        "proxy": "nginx -v 2>&1",
    }
    said = {name: built.shell(name, text, *HARDENED) for name, text in script.items()}

    assert "v=7.0.15" in said["redis"]
    assert "minio version" in said["minio"]
    assert "nginx/1.22" in said["proxy"]
