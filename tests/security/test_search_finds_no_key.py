"""A submitted search finds no key for orders or events, neither in its process nor outside.

The search runs as the user of the scheduler, whose key file it may read (SECURITY.md, "Not
guaranteed"); it cannot read the scheduler's memory and environment.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import pytest

from tests.support.farms.farm_processes import TcpRedis
from tests.support.farms.farm_service import FarmService, Here, Search
from tests.support.keys import key_folder
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.waiting import eventually
from tunemq_scheduler.security.key_folder import SCHEDULER_FILE
from tunemq_shared.signing.key_files import read_key_file
from tunemq_shared.signing.live_keys import KEYS_VARIABLE

__all__ = ["open_folder"]

pytestmark = [pytest.mark.integration, pytest.mark.security]

#: Runs in the process of the search, and looks into its own and into the supervisor's.
LOOKS = """
import json, os
from pathlib import Path
from tests.security import key_search

def look(about):
    planted = os.environ["PLANTED"] = "".join(about["planted"])
    found = key_search.Search({{"planted": about["planted"]}})
    for name, halves in about["keys"].items():
        found._keys[name] = tuple(map(bytes.fromhex, halves))
    found.environment()
    found.process(os.getpid())
    found.rejected.clear()  # from here on what the supervisor refuses counts
    found.process(about["supervisor"])
    places = {{name: sorted(where) for name, where in found.found.items()}}
    told = {{"found": places, "rejected": dict(found.rejected), "user": os.geteuid()}}
    Path(about["told"]).write_text(json.dumps(told))

ABOUT = Path("{about}")
if os.geteuid() == {user} and not ABOUT.with_name("told").exists():
    look(json.loads(ABOUT.read_text()))
"""


@pytest.fixture
def redis(tmp_path: Path):
    redis = TcpRedis(tmp_path)
    yield redis
    redis.end()


def test_search_finds_no_key_of_its_farm_in_its_process_or_its_supervisor(
    redis: TcpRedis, open_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    keys = key_folder(open_folder / "keys")
    keys.path.chmod(0o755)
    file = keys.path / SCHEDULER_FILE
    held = read_key_file(file)
    # Code travels in a folder, so the submitter runs as the scheduler's user, too.
    head, laptop = Here(reachable(NOBODY)), Here(reachable(NOBODY))
    farm = FarmService(open_folder, redis.url, head, laptop)
    hers = keys.path / "ann.toml"
    for path in (open_folder, file, hers, open_folder / "head", open_folder / "laptop"):
        os.chown(path, NOBODY, NOBODY)
    farm.of_home["head"] = {KEYS_VARIABLE: str(file)}
    farm.of_home["laptop"] = {KEYS_VARIABLE: str(hers)}
    monkeypatch.setenv(KEYS_VARIABLE, str(hers))
    about, told = open_folder / "about", open_folder / "told"
    planted = secrets.token_hex(20)
    try:
        supervisor = farm.start_scheduler().pid
        about.write_text(
            json.dumps(
                {
                    "supervisor": supervisor,
                    "told": str(told),
                    "planted": [planted[:20], planted[20:]],
                    "keys": {
                        name: [key.secret[:16].hex(), key.secret[16:].hex()]
                        for name, key in (("orders", held.orders[0]), ("events", held.events[0]))
                    },
                }
            )
        )
        script = farm.write(Search(name="looks", code=LOOKS.format(about=about, user=NOBODY)))
        command = farm.command("submit", str(script), "--name", "looks", "--detach")
        log = open_folder / "laptop" / "log"
        farm.await_scheduler()
        asking = laptop.start(command, farm.environ("laptop"), log)
        assert asking.wait(60) == 0, log.read_text()
        eventually(lambda: told.exists() and told.read_text(), within=60, message=lambda: str(farm))
        found = json.loads(told.read_text())
        uid = Path(f"/proc/{supervisor}/status").read_text().split("Uid:\t")[1].split()[0]
        assert (found["user"], int(uid)) == (NOBODY, NOBODY)
        assert set(found["found"]) == {"planted"}, found
        assert set(found["found"]["planted"]) >= {"os.environ", "own memory"}
        # It is the same user's, so nothing but the kernel keeps the search out.
        assert {"environ", "mem", "pidfd_getfd"} <= set(found["rejected"]), found
    finally:
        farm.close()
