"""A farm with keys, through its command line: it works, and its keys change while it does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.farms.farm_service import FarmService, Here, Search, farm_service
from tests.support.keys import key_folder
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.waiting import eventually
from tunemq_scheduler.security.key_folder import SCHEDULER_FILE, WORKER_FILE, KeyFolder
from tunemq_shared.base.errors import RequestRejected
from tunemq_shared.signing.key_files import KEYS_VARIABLE

__all__ = ["open_folder"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


def one_result(config):
    tune.report({"loss": 1.0})


class Keyed:
    """A farm with its scheduler, and the folder with its keys."""

    def __init__(self, farm: FarmService, folder: KeyFolder) -> None:
        self.farm, self.folder = farm, folder

    def rejected(self) -> dict[tuple[str, str, str], int]:
        """The rejected messages, by receiver, kind and reason."""
        rows = self.farm.json("nodes")["rejected"]
        return {(row["node"], row["kind"], row["reason"]): row["times"] for row in rows}

    def serious(self) -> dict[tuple[str, str, str], int]:
        """The rejected messages, without those that honest farms cause, too."""
        return {key: times for key, times in self.rejected().items() if key[2] != "repeated"}


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch) -> Iterator[Keyed]:
    folder = key_folder(tmp_path / "keys")
    with farm_service(tmp_path, starts=False) as farm:
        farm.of_home["head"] = {KEYS_VARIABLE: str(folder.path / SCHEDULER_FILE)}
        farm.of_home["laptop"] = {KEYS_VARIABLE: str(folder.path / "ann.toml")}
        monkeypatch.setenv(KEYS_VARIABLE, str(folder.path / "ann.toml"))  # for our requests
        farm.start_scheduler()
        yield Keyed(farm, folder)


def test_s02_a_search_runs_on_a_farm_with_keys_while_they_are_changed(keyed):
    farm, folder = keyed.farm, keyed.folder
    worker = str(folder.path / WORKER_FILE)
    farm.add_worker("one", 2, "--keys", worker)
    farm.has_nodes("one")
    farm.submit(Search(name="first", trials=2, steps=40, step_s=0.01, has_gate=True))
    farm.open_gate("first", 10)
    farm.wait_for_steps("first", 2, 10)
    for number, change in enumerate((folder.rotate, folder.promote, folder.drop)):
        before = farm.said().count("was read again")
        change()
        eventually(
            lambda: farm.said().count("was read again") > before,  # noqa: B023
            within=60,
            message=lambda: str(farm),
        )
        log = farm.folder / "one" / "worker.log"
        eventually(
            lambda: log.read_text().count("was read again") > number,  # noqa: B023
            within=60,
            message=lambda: str(farm),
        )
        farm.open_gate("first", 20 + 10 * number)
        farm.wait_for_steps("first", 2, 20 + 10 * number)
    farm.wait_for("first", "FINISHED")
    farm.check_results("first")
    assert keyed.serious() == {}
    assert "rejected" not in farm.run("nodes").stderr


def test_s02_node_without_a_farm_key_is_rejected_notified_and_listed(keyed, tmp_path):
    farm = keyed.farm
    others = str(key_folder(tmp_path / "others").path / WORKER_FILE)
    farm.add_worker("keyless")
    farm.add_worker("stranger", 2, "--keys", others)
    farm.add_worker("one", 2, "--keys", str(keyed.folder.path / WORKER_FILE))
    farm.has_nodes("one")
    # Counts vary: a worker that loses Redis for a moment registers again.
    wanted = {("", "registration", "unsigned"), ("", "registration", "unknown_key")}
    eventually(lambda: keyed.serious().keys() == wanted, within=60, message=lambda: str(farm))
    assert list(farm.nodes()) == ["one"]
    told = farm.run("nodes")
    assert re.search(
        r"the scheduler rejected \d+ messages? of the kind registration: unsigned", told.stderr
    )

    def says(name, text):
        log = tmp_path / name / "worker.log"
        eventually(lambda: text in log.read_text(), within=60, message=lambda: str(farm))

    says("keyless", "this worker has no keys")
    says("stranger", "which is not in")
    assert "A node's registration is not signed" in farm.said()
    farm.submit(Search(name="first", trials=1, steps=3))
    farm.wait_for("first", "FINISHED")
    farm.check_results("first")


def test_tuner_fit_on_a_farm_with_keys_signs_with_the_file_of_the_variable(keyed, monkeypatch):
    keyed.farm.await_scheduler()
    tuner = tune.Tuner(one_result, run_config=tune.RunConfig(name="mine"))
    handle = tuner.fit(address=keyed.farm.url, detached=True)
    assert keyed.farm.rows()[handle.name].owner == "ann"
    monkeypatch.delenv(KEYS_VARIABLE)
    with pytest.raises(RequestRejected, match="accepts signed requests only"):
        tuner.fit(address=keyed.farm.url, detached=True)


def test_farm_without_keys_gets_them_by_a_restart_and_its_search_continues(tmp_path, monkeypatch):
    folder = key_folder(tmp_path / "keys")
    (tmp_path / "farm").mkdir()
    with farm_service(tmp_path / "farm") as farm:
        farm.add_worker("one")
        farm.has_nodes("one")
        farm.submit(Search(name="first", trials=1, steps=30, save_every=5, has_gate=True))
        farm.open_gate("first", 10)
        farm.wait_for_steps("first", 1, 10)
        farm.kill_scheduler()
        for home, file in (("head", SCHEDULER_FILE), ("laptop", "ann.toml")):
            farm.of_home[home] = {KEYS_VARIABLE: str(folder.path / file)}
        monkeypatch.setenv(KEYS_VARIABLE, str(folder.path / "ann.toml"))
        farm.start_scheduler()
        log = tmp_path / "farm" / "one" / "worker.log"
        eventually(lambda: "has no keys" in log.read_text(), within=60, message=lambda: str(farm))
        assert farm.nodes() == {}
        farm.open_gate("first", 30)
        farm.add_worker("two", 2, "--keys", str(folder.path / WORKER_FILE))
        farm.wait_for("first", "FINISHED", within=120)
        farm.check_results("first")


def test_rejected_worker_joins_once_its_key_is_known(keyed, tmp_path):
    farm, folder = keyed.farm, keyed.folder
    after = KeyFolder(str(tmp_path / "after"))
    after.path.mkdir(mode=0o700)
    for name in (SCHEDULER_FILE, WORKER_FILE, "ann.toml"):
        (after.path / name).write_bytes((folder.path / name).read_bytes())
        (after.path / name).chmod(0o600)
    after.rotate(["worker"])
    after.promote(["worker"])
    # The worker's keys were changed before the scheduler's.
    farm.add_worker("one", 2, "--keys", str(after.path / WORKER_FILE))
    wanted = ("", "registration", "unknown_key")
    eventually(lambda: wanted in keyed.serious(), within=60, message=lambda: str(farm))
    assert farm.nodes() == {}
    replaced = folder.path / f"{SCHEDULER_FILE}.new"
    replaced.write_bytes((after.path / SCHEDULER_FILE).read_bytes())
    replaced.chmod(0o600)
    replaced.replace(folder.path / SCHEDULER_FILE)
    farm.has_nodes("one")
    farm.submit(Search(name="first", trials=1, steps=3))
    farm.wait_for("first", "FINISHED")
    farm.check_results("first")


def test_worker_without_keys_says_so_and_is_never_ready(keyed, tmp_path):
    farm = keyed.farm
    # With the registration the scheduler announces the key that it signs with.
    farm.add_worker("one", 1, "--keys", str(keyed.folder.path / WORKER_FILE))
    farm.has_nodes("one")
    farm.add_worker("bare", 1)
    log = tmp_path / "bare" / "worker.log"
    eventually(
        lambda: "--keys worker.toml" in log.read_text(), within=60, message=lambda: str(farm)
    )
    assert "Ready" not in log.read_text()


def test_a_worker_whose_trials_run_as_another_user_reads_its_own_keys(keyed, tmp_path, open_folder):
    farm, folder = keyed.farm, keyed.folder
    folder.path.chmod(0o700)
    more = ("--trial-user", f"{NOBODY}:{NOBODY}", "--workdir", str(open_folder / "one"))
    keys = ("--keys", str(folder.path / WORKER_FILE))
    farm.add_worker("one", 2, *keys, *more, machine=Here(reachable()))
    farm.has_nodes("one")
    folder.rotate(["worker"])
    log = tmp_path / "one" / "worker.log"
    eventually(lambda: "was read again" in log.read_text(), within=60, message=lambda: str(farm))
    assert "cannot be" not in log.read_text()
    assert keyed.serious() == {}
