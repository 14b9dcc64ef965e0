"""The whole farm of docker-compose.yml on Docker: used, killed, kept, changed, restored."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.compose_run import run_all

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(3600)]

IMAGES = tuple(f"tunemq/{name}" for name in ("scheduler", "worker", "redis", "minio", "proxy"))


def test_compose_farm_keeps_the_promises_of_its_page(tmp_path: Path):
    if not shutil.which("docker") or not _says("docker", "info"):
        pytest.skip("Docker is missing, or does not answer")
    if not _says("docker", "compose", "version"):
        pytest.skip("Docker has no Compose 2")
    missing = [image for image in IMAGES if not _says("docker", "image", "inspect", image)]
    if missing:
        pytest.skip(f"`docker compose build` has not made {', '.join(missing)}")
    run_all(tmp_path)


def _says(*line: str) -> bool:
    return subprocess.run(line, check=False, capture_output=True).returncode == 0
