"""Searches of `chain` on a store: start them, kill parts of them, check their results."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from tests.support.searches.chain import executed, expected
from tests.support.searches.killed_searches import NODE, RunningSearch
from tests.support.stores.object_servers import ObjectServer
from tunemq_scheduler.cli.experiment_checkpoints import ExperimentCheckpoints, opened
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.protocol import messages as m

SCRIPT: Final = Path(__file__).parents[2] / "faults" / "scripts" / "chain_search.py"


class ChainSearch(RunningSearch):
    """A search of chains with the options of ``chain_search.py``."""

    def __init__(self, folder: Path, **given: Any) -> None:
        about = {"trials": 2, "steps": 30, "save_every": 3}
        self.trials, self.steps_each, self.save_every = (
            given.get(name, default) for name, default in about.items()
        )
        super().__init__(folder, script=SCRIPT, **given)

    def results(self) -> list[dict[str, Any]]:
        """The results of the trials, in their order."""
        told: list[dict[str, Any]] = json.loads((self.folder / "results.json").read_text())
        return told

    def is_undisturbed(self) -> None:
        """Check that the results are those of an undisturbed run."""
        results = self.results()
        assert len(results) == self.trials
        for result in results:
            assert result["status"] == "TERMINATED", (result, self)
            assert result["step"] == self.steps_each, (result, self)
            assert result["recorded"] == list(range(1, self.steps_each + 1)), (result, self)
            assert result["value"] == expected({"seed": result["seed"]}, self.steps_each), str(self)

    def repeats(self) -> list[int]:
        """For each time that any trial began again: how many steps it executed once more."""
        found = []
        for steps in executed(self.folder / "executed").values():
            assert sorted(set(steps)) == list(range(1, self.steps_each + 1)), steps
            # Where a trial begins again its next step is none that follows the one before.
            for before, step in pairwise(steps):
                if step != before + 1:
                    assert step <= before, (steps, self)
                    found.append(before - step + 1)
        return found

    def store_address(self) -> str:
        """Where its checkpoints are."""
        return read_header(self.folder / "search" / FILE_NAME).store

    # --- its store ------------------------------------------------------------------------------

    def is_whole(self) -> None:
        """Check the store: no incomplete checkpoint, and after a collection no orphan."""
        self.is_restorable()
        with opened(str(self.folder / "search")) as kept:
            manifests_are_complete(kept)
            kept.store.collect(kept.runner.live_checkpoints(), lambda _key: False)
            assert checkpoint_objects(kept) == needed_objects(kept), str(self)

    def is_restorable(self) -> None:
        """Check that every checkpoint that is kept can be got from the store."""
        with opened(str(self.folder / "search")) as kept:
            for one in kept.all():
                target = self.folder / "verified" / one.key
                target.parent.mkdir(parents=True, exist_ok=True)
                kept.store.get_checkpoint(one.key, one.committed.sha256, target)

    def left_nothing_in_the_store(self) -> None:
        """Check that a finished search has removed all objects that it no longer needs."""
        with opened(str(self.folder / "search")) as kept:
            assert checkpoint_objects(kept) == needed_objects(kept), str(self)
            assert open_objects(kept.address).abort_uploads(lambda _key: True) == 0, str(self)

    # --- killing ----------------------------------------------------------------------------------

    def trial_pids(self) -> list[int]:
        """The processes of the trials that run now."""
        running: dict[str, int] = {}
        for seen in self.journal.read():
            event = seen.event
            if isinstance(event, m.TrialStarted):
                running[event.trial] = event.pid
            elif isinstance(event, m.SlotFreed | m.TrialProcessDied):
                running.pop(event.trial, None)
        return [pid for pid in running.values() if psutil.pid_exists(pid)]

    def kill(self, pid: int) -> bool:
        """Kill a process; False if it is gone already."""
        try:
            psutil.Process(pid).send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return False
        return True

    def kill_a_trial(self, chance: random.Random) -> bool:
        """Kill the process of some trial; False if none runs."""
        pids = self.trial_pids()
        if not pids:
            return False
        return self.kill(chance.choice(pids))

    def kill_the_node(self) -> bool:
        """Kill the node's process; False if there is none now."""
        nodes = self.processes(NODE)
        return bool(nodes) and self.kill(nodes[0].pid)

    def pause(self, chance: random.Random, least_s: float, most_s: float) -> bool:
        """Let a random time pass, unless the script ends; whether it still runs."""
        until = time.monotonic() + chance.uniform(least_s, most_s)
        while time.monotonic() < until:
            if self.process.poll() is not None:
                return False
            time.sleep(0.005)  # the moment of the kill is random
        return True


def checkpoint_objects(kept: ExperimentCheckpoints) -> set[str]:
    """The keys of all objects of checkpoints in the experiment's place in the store."""
    keys = {found.key for found in open_objects(kept.address).list()}
    return {key for key in keys if key.count("/") == 2 and "/checkpoint_" in key}


def needed_objects(kept: ExperimentCheckpoints) -> set[str]:
    """The keys of all objects that the live checkpoints consist of."""
    needed = set()
    for key, sha256 in kept.runner.live_checkpoints().items():
        manifest = kept.store.read_manifest(key, sha256)
        needed |= {f"{key}/manifest.json", *manifest.objects.values()}
    return needed


def manifests_are_complete(kept: ExperimentCheckpoints) -> None:
    """Check that all objects of every manifest that is there, known or not, are there."""
    objects = open_objects(kept.address)
    there = {found.key: found.size for found in objects.list()}
    for key in checkpoint_objects(kept):
        if key.endswith("/manifest.json"):
            manifest = json.loads(objects.get_bytes(key, limit=2**24))
            for file in manifest["files"]:
                assert there.get(manifest["objects"][file["sha256"]]) == file["size"], (key, file)


def chain_searches(
    folder: Path, server: ObjectServer, bucket: str
) -> Iterator[Callable[..., ChainSearch]]:
    """For a fixture: starts searches on the server, and ends them with the test."""
    running: list[ChainSearch] = []

    def start(*, same_place: ChainSearch | None = None, **options: Any) -> ChainSearch:
        below = folder / f"search-{len(running)}"
        below.mkdir()
        place = len(running) if same_place is None else running.index(same_place)
        address = server.address(bucket, f"prefix/{place}")
        running.append(ChainSearch(below, storage=address, **options))
        return running[-1]

    yield start
    for one in running:
        one.close()
