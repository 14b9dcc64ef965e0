"""The chart's pods, run in Docker as Kubernetes would run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.helm_parts import ROOT, commands, manifests, named, pod_of
from tests.deploy.pods_in_docker import Namespace, Pod, docker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

#: The chart's Redis and submitter pod, and a volume claim that all pods mount.
VALUES: Final = (
    *("--set", "image.tag=latest"),
    *("--set", "redis.enabled=true", "--set", "submitter.enabled=true"),
    *("--set", "store.address=/srv/farm", "--set", "store.claim=farm"),
    *("--set-string", "scheduler.settings=max_running = 3"),
    *("--set", "workers.pools.cpu.memory=1Gi", "--set", "scheduler.resources.limits.memory=1Gi"),
)
_SEARCH: Final = """
import tunemq as tune


def train(config):
    for step in range(3):
        tune.report({"loss": config["x"] + step})


tuner = tune.Tuner(
    train,
    param_space={"x": tune.grid_search([1, 2, 3, 4])},
    tune_config=tune.TuneConfig(metric="loss", mode="min"),
)
"""


class Farm:
    """All pods of the chart."""

    def __init__(self, namespace: Namespace, secrets: Path) -> None:
        self.namespace = namespace
        self.secrets = secrets
        self._found = manifests("cpu-values.yaml", *VALUES)
        for one in self._found:
            if one["kind"] == "ConfigMap":
                namespace.config_map(one)
        self.redis = self.start("StatefulSet", "redis", "tunemq-redis.farm.svc")
        self.scheduler = self.start("StatefulSet", "scheduler")
        self.worker = self.start("Deployment", "worker-cpu")
        self.submitter = self.start("Deployment", "submitter")

    def start(self, kind: str, name: str, *aliases: str, number: int = 0) -> Pod:
        manifest = named(self._found, kind, f"tunemq-{name}")
        pod = pod_of(manifest)
        assert pod is not None
        return self.namespace.start(manifest, pod, *aliases, number=number)

    def submit(self, text: str, *options: str) -> str:
        """Write a search to the submitter pod and submit it; return the output."""
        file = "/submitter/search.py"
        self.submitter.execute("sh", "-c", f'printf %s "$1" > {file}', "sh", text)
        return self.submitter.execute("tunemq-entrypoint", "submit", *options, file)


def typed(script: str, folder: Path) -> None:
    """Run the page's commands in a folder that has a stand-in ``kubectl``."""
    path = f"{folder / 'bin'}:{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-euc", script],
        check=False,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    """Skip where something is missing that only machines need which make images and deploy."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to a pod's user")
    for program in ("docker", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing")
    for image in ("scheduler", "worker", "redis"):
        if '"Id"' not in docker("image", "inspect", f"tunemq/{image}:latest", check=False):
            pytest.skip(f"there is no image tunemq/{image}: deploy/images says how it is built")
    manifests("cpu-values.yaml")  # skips where there is no Helm


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the secrets that the page creates; ``kubectl`` only records its arguments."""
    folder = tmp_path_factory.mktemp("secrets")
    programs = folder / "bin"
    programs.mkdir()
    kubectl = programs / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$*" >> {folder}/kubectl.txt\n')
    kubectl.chmod(0o700)
    (folder / "deploy").symlink_to(ROOT / "deploy")
    for role in ("scheduler", "worker", "submitter"):
        (folder / f"{role}.credentials").write_text("[default]\n")
    typed(commands("Secrets"), folder)
    return folder


@pytest.fixture(scope="module")
def farm(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    namespace = Namespace(tmp_path_factory.mktemp("farm"))
    try:
        for line in (secrets / "kubectl.txt").read_text().splitlines():
            words = line.split()
            if "secret" in words:
                files = words[-1].removeprefix("--from-file=")
                namespace.secret(words[-2], secrets / files)
        yield Farm(namespace, secrets)
    finally:
        namespace.close()


def test_all_started_pods_become_ready(farm: Farm) -> None:
    for pod in (farm.redis, farm.scheduler, farm.worker):
        eventually(
            lambda pod=pod: pod.probe("readiness"),  # type: ignore[misc]
            within=60,
            every=1,
            message=lambda pod=pod: pod.logs(),  # type: ignore[misc]
        )
        assert pod.probe("liveness")


def test_search_submitted_from_a_pod_finishes(farm: Farm) -> None:
    assert "FINISHED" in farm.submit(_SEARCH, "--name", "four")
    shown = farm.submitter.execute("tunemq-entrypoint", "show", "four")
    assert shown.count("TERMINATED") == 4


def test_doctor_finds_no_problem(farm: Farm) -> None:
    doctor = farm.start("Pod", "doctor")
    assert doctor.wait() == 0, doctor.logs()


def test_running_pods_read_new_keys(farm: Farm) -> None:
    typed(commands("Changing keys and passwords"), farm.secrets)
    before = {pod.name: pod.logs() for pod in (farm.scheduler, farm.worker)}
    for role in ("scheduler", "worker", "submitter"):
        farm.namespace.secret(f"tunemq-{role}", farm.secrets / "secrets" / role)
    for pod in (farm.scheduler, farm.worker):
        eventually(
            lambda pod=pod: "key" in pod.logs().removeprefix(before[pod.name]),  # type: ignore[misc]
            within=40,
            every=1,
            message=lambda pod=pod: pod.logs(),  # type: ignore[misc]
        )
    assert "FINISHED" in farm.submit(_SEARCH, "--name", "with-new-keys")


def test_worker_ended_by_kubernetes_deregisters_within_its_grace(farm: Farm) -> None:
    second = farm.start("Deployment", "worker-cpu", number=1)

    def is_known() -> bool:
        return second.name in farm.submitter.execute("tunemq-entrypoint", "nodes")

    eventually(is_known, within=30, every=1)
    assert second.stop() == 0
    eventually(lambda: not is_known(), within=30, every=1)
