"""`deploy/redis/certificates.sh`: the keys and certificates of a farm's servers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "redis" / "certificates.sh"


def certificates(folder: Path) -> subprocess.CompletedProcess[str]:
    line = ["sh", str(SCRIPT), "127.0.0.1", str(folder)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def belong_together(folder: Path) -> bool:
    """Whether the certificate is that of the key."""
    keys = [
        subprocess.run(["openssl", *line.split()], cwd=folder, capture_output=True, check=True)
        for line in ("x509 -in redis.crt -noout -pubkey", "pkey -in redis.key -pubout")
    ]
    return keys[0].stdout == keys[1].stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert certificates(tmp_path).returncode == 0
    assert belong_together(tmp_path)
    return tmp_path


def test_renewal_makes_a_new_key_with_its_certificate(folder: Path) -> None:
    before = (folder / "redis.key").read_bytes()
    (folder / "redis.crt").unlink()
    assert certificates(folder).returncode == 0
    assert belong_together(folder)
    assert (folder / "redis.key").read_bytes() != before
    assert sorted(path.name for path in folder.iterdir()) == [
        *("ca.crt", "ca.key", "ca.srl", "client.crt", "client.key", "redis.crt", "redis.key")
    ]


@pytest.mark.parametrize("problem", ["missing", "damaged"])
def test_renewal_that_fails_leaves_the_key_in_use_and_says_why(folder: Path, problem: str) -> None:
    before = (folder / "redis.key").read_bytes()
    (folder / "redis.crt").rename(folder / "redis.crt.old")
    if problem == "missing":
        (folder / "ca.key").unlink()
    else:
        (folder / "ca.key").write_text("no key")
    done = certificates(folder)
    assert done.returncode == 1
    assert ("no ca.key" if problem == "missing" else "ca.key") in done.stderr
    assert (folder / "redis.key").read_bytes() == before
