"""S15: every message has a size limit before it is decoded, installs use tested versions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tunemq_shared.protocol import farm_requests, message_limits

pytestmark = pytest.mark.security

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
#: Imports all of a package, and exits with the network calls of the import.
_IMPORTS = """
import importlib, pkgutil, sys

asked = []
sys.addaudithook(lambda event, _: event.startswith(("socket.connect", "socket.getaddrinfo",
    "socket.gethostby", "socket.sendto", "urllib.", "http.client.")) and asked.append(event))
modules = [package] = [importlib.import_module(sys.argv[1])]
if hasattr(package, "__path__"):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            modules.append(importlib.import_module(found.name))
print(len(modules))
sys.exit(" ".join(asked) or 0)
"""


@pytest.mark.parametrize(
    ("package", "least"),
    [("tunemq", 1), ("tunemq_shared", 80), ("tunemq_scheduler", 200), ("tunemq_workers", 70)],
)
def test_s15_import_makes_no_network_request(package: str, least: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORTS, package],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout.split()[-1]) >= least


def test_s15_import_with_a_network_request_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(
        "import socket\nsocket.getaddrinfo('127.0.0.1', 9)\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, "telling"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stderr == "socket.getaddrinfo\n"


def test_s15_every_test_dependency_is_pinned() -> None:
    groups = [
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
    ]
    asked = {
        re.split(r"[\[<>=;~! ]", one.lower(), maxsplit=1)[0] for group in groups for one in group
    }
    assert len(asked) > 15
    assert asked - PINS.keys() == set()
    for name, version in PINS.items():
        assert re.fullmatch(r"[0-9][0-9a-z.+-]*", version), name
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "://" not in pinned  # from the index that one's pip is set to, and from nowhere else


def test_s15_network_libraries_have_upper_version_bounds() -> None:
    """Libraries that use the network have an upper version bound, too."""
    asked = {re.split(r"[\[<>=; ]", one, maxsplit=1)[0]: one for one in _dependencies()}
    for name in ("celery", "redis", "minio", "urllib3"):
        assert re.search(r"<\d|==\d", asked[name]), asked[name]


def _dependencies() -> list[str]:
    found: list[str] = PROJECT["project"]["dependencies"]
    return found


def test_s15_each_message_type_has_a_length_limit_checked_first() -> None:
    """What happens to longer messages: tests/security/test_ten_thousand_messages.py."""
    known = {name: size for name, size in vars(message_limits).items() if "BYTES" in name}
    assert len(known) >= 10
    assert all(2**7 < size <= 64 * 2**20 for size in known.values())
    assert farm_requests.MAX_REQUEST_BYTES <= 2**20
