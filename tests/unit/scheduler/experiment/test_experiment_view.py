"""What displays show of a search that waits for its store."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.searches.plans import PLAN
from tests.unit.scheduler.fake_trials import FakeTrial
from tests.unit.scheduler.scripted_runner import Story
from tunemq_scheduler.experiment.experiment_view import ExperimentView, UploadNotice
from tunemq_shared.protocol import messages as m


class Search:
    """The parts of a search that determine its progress."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.runner = SimpleNamespace(
            uploading=0,
            counts={"PENDING": 0, "RUNNING": 0, "PAUSED": 0, "TERMINATED": 3},
            aside={},
            nodes={},
            live={},
        )
        self.trials: dict[str, Any] = {}
        address = "s3://bucket/x?endpoint=http://host:9000"
        plan = msgspec.structs.replace(PLAN, store=address)
        executor = SimpleNamespace(notes=lambda: ["Redis is away"])
        self.loop = loop = SimpleNamespace(
            runner=self.runner,
            plan=plan,
            trials=self.trials,
            executor=executor,
            waits_for_search="",
        )
        tune = SimpleNamespace(metric=None, direction=None)
        prepared = SimpleNamespace(tune=tune, trials=3)
        self.view = ExperimentView(
            loop,  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            prepared,  # type: ignore[arg-type]
            lambda: self.now,
        )
        self.uploads = UploadNotice(self.view, self.told.append)


@pytest.fixture
def search() -> Search:
    return Search()


def test_view_shows_the_store_without_its_settings(search):
    assert search.view.store == "s3://bucket/x"


def test_f23_withheld_device_is_a_note_while_trials_wait_for_it(search):
    story = Story(cpus=0.0, request={"gpu": 2.0})
    search.loop.runner = story.runner
    gpus = (m.Gpu("GPU-a"), m.Gpu("GPU-b"))
    resources = {"cpu": 1.0, "gpu": 2.0}
    story.tell(m.NodeJoined("n.1", "n", "host", "127.0.0.1", resources, gpus))
    assert search.view.notes == ["Redis is away"]
    story.tell(m.DevicesWithheld("n.1", {"GPU-b": "XID 79"}))
    told = "trials wait, because GPU GPU-b of node n is set aside: XID 79"
    assert search.view.notes == ["Redis is away", told], "the search requests nothing"
    story.tell(m.SearchExhausted())
    assert search.view.notes == ["Redis is away"]
    story.tell(m.ConfigSuggested(0, "a", b"", "", {"gpu": 2.0}))
    assert search.view.notes == ["Redis is away", told]
    story.tell(m.DevicesWithheld("n.1", {}))
    assert search.view.notes == ["Redis is away"]


def test_f22_node_that_is_set_aside_is_a_note_while_trials_wait(search):
    search.runner.aside = {"n.1": 70.0}
    search.runner.nodes = {"n.1": m.NodeJoined("n.1", "n", "host", "127.0.0.1", {"cpu": 1.0})}
    search.runner.health = {"n": SimpleNamespace(reason="no space left")}
    search.runner.elapsed = 12.0
    assert search.view.notes == ["Redis is away"]
    search.runner.counts["PENDING"] = 2
    assert search.view.notes == [
        "Redis is away",
        "trials wait, because node n on host is set aside for 58 s more: no space left",
    ]


@pytest.mark.parametrize(
    ("count", "note"),
    [
        (1, "trial ab12_00000 waits for the store: connection refused"),
        (2, "trial ab12_00000 and 1 more wait for the store: connection refused"),
    ],
)
def test_view_shows_one_note_for_any_number_of_waiting_trials(search, count, note):
    for n in range(3):
        trial = search.trials[str(n)] = FakeTrial(n)
        trial.waits = ("save", "connection refused") if n < count else ("", "")
    assert search.view.notes == ["Redis is away", note]


@pytest.mark.parametrize(("age_s", "is_told"), [(50.0, False), (70.0, True)])
def test_trial_whose_code_does_not_return_after_its_last_result_is_a_note(search, age_s, is_told):
    story = Story(cpus=1.0)
    search.loop.runner = story.runner
    story.start("a")
    last = m.ResultReported("a", 1, 1, {}, time.time() - age_s, 0.0, 0.0, 0.0, 1, done=True)
    story.tell(last)
    (_, *notes) = search.view.notes
    assert [note.partition(", and")[0] for note in notes] == (
        ["trial a reached the end 70 s ago"] if is_told else []
    )
    story.finish("a")
    assert search.view.notes == ["Redis is away"]


def test_view_shows_uploads_as_a_note_when_only_they_delay_the_end(search):
    search.runner.uploading = 2
    assert search.view.notes[1:] == ["waiting for 2 checkpoints on the way to s3://bucket/x"]
    search.runner.counts["RUNNING"] = 1
    assert search.view.notes == ["Redis is away"]


def test_view_reports_slow_uploads_once(search):
    search.runner.uploading = 1
    for search.now in (0.0, 1.0):
        search.uploads.look()
    search.runner.uploading = 0
    search.uploads.look()
    search.runner.uploading = 1
    for search.now in (1.5, 3.0):
        search.uploads.look()
    assert search.told == []
    for search.now in (3.5, 4.0, 60.0):
        search.uploads.look()
    assert search.told == [
        "waiting for 1 checkpoint on the way to s3://bucket/x; Ctrl-C leaves them on this machine"
    ]


def test_f23_paused_trial_that_waits_for_a_withheld_device_is_a_note(search):
    story = Story(cpus=0.0)
    search.loop.runner = story.runner
    resources = {"cpu": 1.0, "gpu": 1.0}
    story.tell(m.NodeJoined("n.1", "n", "host", "127.0.0.1", resources, (m.Gpu("GPU-a"),)))
    story.tell(m.ConfigSuggested(0, "a", b"", "", {"gpu": 1.0}))
    story.choose("a")
    story.pause("a", 1)
    story.paused("a")
    story.free("a")
    story.tell(m.DevicesWithheld("n.1", {"GPU-a": "XID 79"}))
    assert search.view.notes[1:] == [
        "trials wait, because GPU GPU-a of node n is set aside: XID 79"
    ]
