"""A node fetches the dependencies of a trial once, before its start, within a share of the disk."""

from __future__ import annotations

import os
import sys

import pytest

from tests.unit.workers.fakes import FakeDisk, order, start
from tests.unit.workers.trials.test_trial_supervisor import Node
from tunemq_shared.protocol.messages import (
    BlobRef,
    Environment,
    SlotFreed,
    TrialFailed,
    TrialWaits,
)
from tunemq_workers.checkpoints.checkpoint_cache import CacheLimits
from tunemq_workers.trials import dependencies
from tunemq_workers.trials.dependencies import DependencyFetcher
from tunemq_workers.trials.localize_order import localised, trial_variables

STORE = "s3://bucket/farm"


class FakeFetcher:
    """Fetches blobs when a test says so."""

    def __init__(self):
        self.asked = []
        self.under_way = {}

    def start(self, fetch, on_done, on_failed, on_trouble, on_disk_failed):
        self.asked.append(fetch)
        self.under_way[len(self.asked)] = fetch, on_done, on_failed, on_trouble, on_disk_failed
        return len(self.asked)

    def cancel(self, number):
        self.under_way.pop(number, None)

    def finish(self, sha256):
        for number in self._of(sha256):
            fetch, on_done, *_ = self.under_way.pop(number)
            path = os.path.join(fetch.folder, sha256)
            if fetch.is_bundle:
                os.makedirs(path, exist_ok=True)
            else:
                os.makedirs(fetch.folder, exist_ok=True)
                with open(path, "wb") as file:
                    file.write(bytes(fetch.blob.size))
            on_done(None)

    def fail(self, sha256, reason, *, is_corrupt=False):
        for number in self._of(sha256):
            self.under_way.pop(number)[2](reason, is_corrupt)

    def fail_by_disk(self, sha256, reason):
        for number in self._of(sha256):
            self.under_way.pop(number)[4](reason)

    def _of(self, sha256):
        return [n for n, (fetch, *_) in self.under_way.items() if fetch.blob.sha256 == sha256]


class World(Node):
    """A node's trial processes, with dependencies in a folder of the test."""

    def __init__(self, folder, disk_bytes=0):
        super().__init__()
        self.folder, self.disk, self.fetcher = str(folder), FakeDisk(), FakeFetcher()
        self.dependencies = DependencyFetcher(
            self.disk, self.fetcher, self.folder, {}, CacheLimits(disk_given=disk_bytes)
        )
        self.dependencies.in_use = self.supervisor._starts_in_use
        self.supervisor._dependencies = self.dependencies
        self.dependencies.start()
        self.disk.settle()

    def obey(self, orders):
        self.supervisor.obey(orders)
        self.disk.settle()

    def kept(self, name):
        return sorted(one for one in os.listdir(os.path.join(self.folder, name)))


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def far(sha, size=1):
    return BlobRef(sha, size, "", STORE)


def begin(code="c", *, bundle=None, blobs=(), **how):
    return start(code=far(code), bundle=bundle, blobs=blobs, **how)


def test_process_starts_when_all_its_dependencies_are_there(world):
    world.obey([order("a", begin(bundle=far("b"), blobs=(far("p"),)))])
    assert [(fetch.blob.sha256, fetch.is_bundle) for fetch in world.fetcher.asked] == [
        ("c", False),
        ("p", False),
        ("b", True),
    ]
    for sha256 in "cpb":
        assert world.started == []
        world.fetcher.finish(sha256)
    assert world.started == ["a"]
    (told,) = world.forkservers.started.values()
    assert told.start.code == BlobRef("c", 1, f"{world.folder}/blobs/c")
    assert told.start.blobs == (BlobRef("p", 1, f"{world.folder}/blobs/p"),)


def test_blobs_are_looked_for_by_a_disk_job_since_a_trial_can_lock_their_folder(world, monkeypatch):
    jobs = []
    monkeypatch.setattr(world.disk, "run", lambda place, job, then: jobs.append((job, then)))
    world.supervisor.obey([order("a", begin())])
    world.supervisor.obey([order("a")])
    assert (len(jobs), world.fetcher.asked) == (1, [])
    job, then = jobs.pop()
    then(job())
    assert [fetch.blob.sha256 for fetch in world.fetcher.asked] == ["c"]


def test_order_that_is_withdrawn_while_its_blobs_are_looked_for_fetches_none(world):
    world.supervisor.obey([order("a", begin())])
    world.supervisor.obey([])
    world.disk.settle()
    assert world.fetcher.asked == []


def test_repeated_orders_fetch_nothing_again(world):
    for _ in range(3):
        world.obey([order("a", begin())])
    assert len(world.fetcher.asked) == 1
    world.fetcher.finish("c")
    world.obey([order("a"), order("b", begin())])
    assert world.started == ["a", "b"]
    assert len(world.fetcher.asked) == 1


def test_code_that_can_be_read_in_place_is_not_fetched(world):
    world.obey([order("a", start())])
    assert world.fetcher.asked == []
    assert world.started == ["a"]


@pytest.mark.parametrize("is_corrupt", [True, False])
def test_failed_fetch_fails_only_its_trial(world, is_corrupt):
    world.obey([order("a", begin(bundle=far("b")))])
    world.fetcher.fail("c", "it is not there.", is_corrupt=is_corrupt)
    failed, freed = world.events
    assert isinstance(failed, TrialFailed)
    assert (failed.trial, failed.kind) == ("a", "fetch")
    assert failed.error == (
        "The trial's process could not start: the trial's code cannot be fetched from "
        "s3://bucket/farm/blobs/c: it is not there."
    )
    assert freed == SlotFreed("a", 1)
    assert world.fetcher.under_way == {}
    world.obey([order("a", begin(bundle=far("b")))])
    assert len(world.fetcher.asked) == 2, "it has ended"


def test_fetch_that_fails_by_the_nodes_disk_names_it(world):
    world.obey([order("a", begin(bundle=far("b")))])
    world.fetcher.fail_by_disk("c", "No space left on device.")
    failed, freed = world.events
    assert (failed.trial, failed.kind) == ("a", "disk")
    assert failed.error.endswith("s3://bucket/farm/blobs/c: No space left on device.")
    assert freed == SlotFreed("a", 1)
    assert world.fetcher.under_way == {}


def test_store_that_makes_trials_wait_is_reported(world):
    world.obey([order("a", begin())])
    world.fetcher.under_way[1][3]("no answer")
    world.fetcher.under_way[1][3]("")
    assert world.events == [TrialWaits("a", 1, "code", "no answer"), TrialWaits("a", 1, "", "")]


def test_trial_that_is_no_longer_wanted_stops_waiting(world):
    world.obey([order("a", begin())])
    world.obey([])
    assert world.fetcher.under_way == {}
    world.obey([order("b", begin())])
    world.obey([order("b", stop=True)])
    assert world.fetcher.under_way == {}
    assert world.events == [SlotFreed("b", 1)]
    assert world.started == []


def test_least_recently_used_files_are_removed_first_and_files_in_use_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(dependencies, "_size_of", lambda path: 10)
    world = World(tmp_path, disk_bytes=250)
    for number, code in enumerate("xyz"):
        trial = f"t{number}"
        world.obey([order("used", begin("u")), order(trial, begin(code))])
        world.fetcher.finish("u")
        world.fetcher.finish(code)
        world.disk.settle()
        world.forkservers.started.clear()
        assert world.kept("blobs") == ["u", code], "the older one has gone"
    world.obey([order("used", begin("u")), order("t3", begin("v", bundle=far("b")))])
    for sha256 in "vb":
        world.fetcher.finish(sha256)
    world.disk.settle()
    assert (world.kept("blobs"), world.kept("code")) == (["u", "v"], ["b"]), "more than it may"


def test_files_of_an_earlier_node_count_and_its_unfinished_ones_are_removed(tmp_path):
    for name in ("blobs", "code/done", "code/.half", "blobs/.x"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "blobs/.half").write_bytes(b"x")
    (tmp_path / "blobs/c").write_bytes(b"x")
    (tmp_path / "code/.half").chmod(0o500)
    world = World(tmp_path)
    assert world.kept("blobs") == ["c"]
    assert world.kept("code") == ["done"]
    assert set(world.dependencies._sizes) == {f"{tmp_path}/blobs/c", f"{tmp_path}/code/done"}
    world.obey([order("a", begin("c", bundle=far("done")))])
    assert world.started == ["a"], "nothing is fetched again"


def test_oldest_files_of_an_earlier_node_are_removed_if_there_are_too_many(tmp_path, monkeypatch):
    """Each costs the node's loop time, and a trial can link one large file very often."""
    monkeypatch.setattr(dependencies, "_MOST_LEFT", 2)
    (tmp_path / "blobs").mkdir()
    for age in range(5):
        file = tmp_path / "blobs" / str(age)
        file.touch()
        os.utime(file, (1000 - age, 1000 - age))
    world = World(tmp_path)
    assert world.kept("blobs") == ["0", "1"]
    assert len(world.dependencies._sizes) == 2


def test_file_being_fetched_is_no_leftover_of_an_earlier_node(tmp_path):
    for name in ("blobs", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".old").write_bytes(b"x")
    disk = FakeDisk()
    taken = DependencyFetcher(disk, FakeFetcher(), str(tmp_path), {}, CacheLimits())
    taken.start()
    for name in ("blobs", "code"):
        (tmp_path / name / ".new").write_bytes(b"x")
    disk.settle()
    assert sorted(path.name for path in tmp_path.glob("*/*")) == [".new", ".new"]
    assert taken._sizes == {}


def test_file_that_is_cut_short_is_fetched_again(world):
    with open(f"{world.folder}/blobs/c", "wb"):
        pass
    world.obey([order("a", begin())])
    assert [fetch.blob.sha256 for fetch in world.fetcher.asked] == ["c"]


# --- in the node's terms --------------------------------------------------------------------------


def test_order_without_paths_gets_those_of_the_node(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("TUNEMQ_REDIS", "redis://")
    monkeypatch.setenv("OTHER", "mine")
    environment = Environment("", ("numpy",), {"A": "1"}, ("scripts", ""), inherits=True)
    given = begin(bundle=far("b"), environment=environment, folder="exp/t")
    here = localised(given, "/node", trial_variables())
    assert here.folder == "/node/trials/exp/t"
    assert here.environment.python == sys.executable
    assert here.environment.sys_path == ("/node/code/b/scripts", "/node/code/b")
    variables = here.environment.variables
    assert (variables["A"], variables["OTHER"]) == ("1", "mine")
    assert not {"AWS_SECRET_ACCESS_KEY", "TUNEMQ_REDIS"} & variables.keys()


@pytest.mark.parametrize(
    ("python", "given", "path"),
    [
        ("/venv/bin/python", {}, "/venv/bin:/opt/bin"),
        ("/venv/bin/python", {"PATH": "/mine"}, "/mine"),
        ("", {}, "/opt/bin"),
    ],
)
def test_programs_that_run_python_get_the_interpreter_that_a_search_names(python, given, path):
    environment = Environment(python, (), given, ("",), inherits=True)
    spec = begin(bundle=far("b"), environment=environment)
    assert localised(spec, "/node", {"PATH": "/opt/bin"}).environment.variables["PATH"] == path


def test_order_with_paths_keeps_them():
    given = start(environment=Environment("/py", (), {"A": "1"}, ("/x", "")))
    assert localised(given, "/node", {"B": "2"}) == given
