"""A search on a worker whose trials run as another user: everything works, and no secret leaks."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.farm_support import command_line, process_tree_of
from tests.support.farms.farm_service import FarmService, Here, Search, farm_service
from tests.support.other_users import NOBODY, open_folder, reachable
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually

__all__ = ["open_folder"]

pytestmark = [pytest.mark.faults]

#: A trial that leaves all sorts of files behind, among them links to files that only root may read.
CODE = """
def train(config):
    import os, subprocess
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("said by", os.getuid(), os.environ["HOME"], flush=True)
    with open("artifact", "w") as file:
        file.write(str(os.getuid()))
    work.chain(config)
    os.makedirs("locked/below", exist_ok=True)
    os.chmod("locked", 0)
    for name in ("stdout", "leaked"):
        if os.path.lexists(name):
            os.rename(name, "own-" + name)
        os.symlink({keys!r}, name)
"""


@pytest.fixture
def farm(open_folder: Path, minio: ObjectServer, bucket: str) -> Iterator[FarmService]:
    """A farm with a store, whose keys the worker reads from a file that only root may read."""
    with farm_service(open_folder, starts=False) as farm:
        farm.start_scheduler("--store", minio.address(bucket), variables=minio.environ)
        for home in ("laptop", "one"):
            keys = keys_file(farm, home)
            keys.parent.mkdir(parents=True)
            keys.touch(0o600)
            keys.write_text(
                f"[default]\naws_access_key_id = {minio.access_key}\n"
                f"aws_secret_access_key = {minio.secret_key}\n"
            )
        user = ("--trial-user", f"{NOBODY}:{NOBODY}")
        # A service may have a better priority than its trials may set.
        machine = Here(("nice", "-n", "-5", *reachable()))
        farm.add_worker("one", 2, *user, "--workdir", str(workdir(farm)), machine=machine)
        farm.has_nodes("one")
        yield farm


def keys_file(farm: FarmService, home: str = "one") -> Path:
    return farm.folder / home / ".aws" / "credentials"


def workdir(farm: FarmService) -> Path:
    return farm.folder / "one" / "node"


def trial_pids(farm: FarmService) -> list[int]:
    """Return the processes of trials."""
    found = []
    for pid in process_tree_of(farm.workers["one"].pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            is_theirs = f"Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}" in lines
            if is_theirs and "Name:\ttunemq-fork" not in lines:
                found.append(pid)
    return found


def raised_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def test_trials_of_another_user_save_and_restore_without_files_only_root_may_read(
    farm, minio, bucket
):
    search = Search(
        name="search",
        steps=6,
        has_gate=True,
        trainable="train",
        code=CODE.format(keys=str(keys_file(farm))),
    )
    farm.submit(search)
    for folder in (farm.folder / "executed", farm.folder / "executed" / "search"):
        folder.chmod(0o777)
    farm.open_gate("search", 3)
    farm.wait_for_steps("search", 2, 3)
    objects = minio.client()

    def saved() -> int:
        names = [found.object_name for found in objects.list_objects(bucket, recursive=True)]
        return len({name.partition("-000003/")[0] for name in names if "-000003/" in name})

    eventually(lambda: saved() >= 2, within=60, every=0.1, message=lambda: str(farm))
    farm.wait_for_gate("search", 4, 2)
    # Each trial left a daemon in a separate session. One scan may miss it while others end, and
    # sees it under its trial's name until it has executed its program.
    killed: list[int] = []

    def all_are_there() -> bool:
        lines = {pid: command_line(pid) for pid in trial_pids(farm)}
        killed[:] = [pid for pid, line in lines.items() if not line.startswith(b"sleep\0")]
        return len(lines) == 4 and len(killed) == 2

    eventually(all_are_there, message=lambda: str(farm))
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    farm.open_gate("search", 6)
    farm.wait_for("search", "FINISHED")

    farm.check_results("search")
    farm.check_steps("search")  # the third was saved: nothing is repeated
    eventually(lambda: not trial_pids(farm), message=lambda: str(farm))
    root = workdir(farm)
    eventually(lambda: not list((root / "trials").iterdir()), message=lambda: str(farm))
    stored = {
        found.object_name: objects.get_object(bucket, found.object_name).data
        for found in objects.list_objects(bucket, recursive=True)
    }
    artifacts = [data for name, data in stored.items() if name.endswith("/artifact")]
    assert set(artifacts) == {str(NOBODY).encode()}
    assert len(artifacts) >= 4  # of two attempts each, and more if the node was silent for long

    def printed() -> list[str]:
        """Return the output so far; output arrives after all other events."""
        texts = [path.read_text() for path in farm.results.glob("search/*/stdout")]
        return [text for text in texts if text.endswith("\n")]  # else the file is being written

    eventually(lambda: len(printed()) == 2, message=lambda: str(farm))
    assert all(text.startswith(f"said by {NOBODY} ") for text in printed())
    everything = [*stored.values(), *(text.encode() for text in printed())]
    assert not any(minio.secret_key.encode() in data for data in everything)

    assert "run as root" not in (farm.folder / "one" / "worker.log").read_text()
    assert stat.S_IMODE(root.stat().st_mode) == 0o711
    for path in root.iterdir():
        status = path.stat()
        expected = (NOBODY, 0o700) if path.is_dir() else (0, 0o600)
        if path.name == "logs":
            expected = (0, 0o700)
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == expected, path
    for at, folders, files in os.walk(root / "cache", onerror=raised_unless_gone):
        for path in (Path(at, name) for name in (*folders, *files)):
            with suppress(FileNotFoundError):  # the node may be cleaning up
                assert path.stat().st_uid == NOBODY, path


def test_removal_of_a_trials_folder_spares_files_that_its_user_may_not_remove(farm):
    team = farm.folder / "team"  # each may rename it, but only root may change "alice" itself
    (team / "alice").mkdir(parents=True)
    (team / "alice" / "data").touch()
    farm.folder.chmod(0o777)
    team.chmod(0o777)
    code = f"def train(config):\n    os.rename({str(team)!r}, 'team')\n    work.chain(config)\n"
    farm.submit(Search(name="search", trials=1, trainable="train", code=f"import os\n{code}"))
    for folder in (farm.folder / "executed", farm.folder / "executed" / "search"):
        folder.chmod(0o777)
    farm.wait_for("search", "FINISHED")
    trials = workdir(farm) / "trials"
    eventually(lambda: all(one.name.startswith(".trash-") for one in trials.iterdir()))
    assert len([at for at, _, files in os.walk(trials) if files == ["data"]]) == 1


#: Prints what a root process that acts for the account NOBODY reads at a path.
READER = """
import sys
from tunemq_workers.system.trial_user import act_for, find_account
act_for(find_account("65534:65534"))
try:
    print(open(sys.argv[1]).read())
except PermissionError:
    print("refused")
"""


@pytest.mark.parametrize("link", ["cwd", "root"])
def test_process_that_acts_for_a_user_follows_no_link_through_another_process(link, tmp_path):
    inner = tmp_path / "closed" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").write_text("secret")  # the file is open to all, a folder above it is closed
    (tmp_path / "closed").chmod(0o700)
    code = "import os, sys, time; os.chroot('.'); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=inner, stdout=subprocess.PIPE)
    with process as other:
        try:
            other.stdout.readline()
            read = subprocess.run(
                [*reachable(), sys.executable, "-c", READER, f"/proc/{other.pid}/{link}/file"],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
        finally:
            other.kill()
    assert read.stdout.split() == ["refused"]


def test_program_of_another_user_runs_in_a_folder_that_it_cannot_change(farm):
    folder = farm.folder / "laptop" / "project"
    folder.mkdir()
    (folder / "train.sh").write_text("#!/bin/sh\n! touch here && echo loss=1 > $1/a && cat $1/a\n")
    (folder / "train.sh").chmod(0o755)
    (folder / "search.py").write_text(
        "import tunemq as tune\n"
        "program = tune.executable(['./train.sh', '{trial_dir}'])\n"
        "tuner = tune.Tuner(program, tune_config=tune.TuneConfig(metric='loss', mode='min'))\n"
    )
    done = farm.tunemq(
        "submit", str(folder / "search.py"), "--folder", str(folder), "--name", "program"
    )
    assert "TERMINATED" in done
    assert [line["loss"] for line in farm.recorded("program")[0]] == [1]
