"""`FarmApi` checks requests and finds the node that a user names."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.farms.farm_api_server import CODE, FakeExperimentControl, FakeNodeControl
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.farm.monitoring.farm_announcement import described
from tunemq_scheduler.farm.service import farm_api
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.farm.service.farm_api import FarmApi, RequestCaller
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol import farm_requests as r

ANN = RequestCaller("ann", "0" * 32)


class SomeNodes(FakeNodeControl):
    """Nodes with these names, instances, states and ages."""

    def __init__(self, *rows):
        super().__init__()
        names = ("node", "instance_id", "state", "since")
        self._rows = tuple(a.NodeRow(**dict(zip(names, row, strict=True))) for row in rows)

    def rows(self):
        return self._rows


@pytest.fixture
def api(tmp_path):
    def api(nodes):
        queue = ExperimentQueue(tmp_path / ".farm" / "experiments")
        farm = described("/srv/store", "a test", str(tmp_path))
        return FarmApi(queue, FakeExperimentControl(tmp_path), nodes, tmp_path, farm)

    return api


def test_experiment_that_could_not_be_started_is_not_queued(api):
    api = api(FakeNodeControl())
    with pytest.raises(ConfigError, match=r"settings\.variables"):
        api.submit(
            r.SubmitExperiment(
                name="exp", code=CODE, settings=r.ExperimentEnvironment(variables={"A=B": ""})
            ),
            ANN,
        )
    assert api.list_experiments(r.ListExperiments(), ANN).experiments == ()


def test_s15_submission_that_is_too_long_is_rejected_with_the_fix(api):
    api = api(FakeNodeControl())
    long = r.ExperimentEnvironment(variables={"A": "x" * 40_000})
    with pytest.raises(ConfigError, match=r"40,\d\d\d bytes, and 32,768 are possible; read long"):
        api.submit(r.SubmitExperiment(name="exp", code=CODE, settings=long), ANN)
    assert api.list_experiments(r.ListExperiments(), ANN).experiments == ()


def test_s15_owner_with_too_many_experiments_is_rejected_and_others_are_not(api, monkeypatch):
    monkeypatch.setattr(farm_api, "_MOST_OF_OWNER", 2)
    api = api(FakeNodeControl())
    for number in range(2):
        caller = RequestCaller("ann", f"{number}")
        api.submit(r.SubmitExperiment(name=f"e{number}", code=CODE), caller)
    with pytest.raises(ConfigError, match="ann has 2 experiments in this farm, which is the limit"):
        api.submit(r.SubmitExperiment(name="e2", code=CODE), RequestCaller("ann", "2"))
    api.submit(r.SubmitExperiment(name="e0", code=CODE), RequestCaller("ann", "0"))  # repeated
    api.submit(r.SubmitExperiment(name="e3", code=CODE), RequestCaller("ben", "3"))
    api.stop(r.StopExperiment(name="e0"), RequestCaller("ann", "4"))
    api.remove(r.RemoveExperiment(name="e0"), RequestCaller("ann", "5"))
    api.submit(r.SubmitExperiment(name="e2", code=CODE), RequestCaller("ann", "6"))


def test_s15_list_shortens_reasons_and_show_has_all(api, monkeypatch):
    api = api(FakeNodeControl())
    monkeypatch.setattr(farm_api, "_REASONS_IN_LISTS", 1000)
    api.submit(r.SubmitExperiment(name="exp", code=CODE), ANN)
    api._queue.explain("exp", "x" * 16_000)
    (row,) = api.list_experiments(r.ListExperiments(), ANN).experiments
    assert 900 < len(row.reason) <= 1000
    api.submit(r.SubmitExperiment(name="other", code=CODE), RequestCaller("ann", "1"))
    rows = api.list_experiments(r.ListExperiments(), ANN).experiments
    assert max(len(one.reason) for one in rows) <= 500
    assert len(api.show(r.ShowExperiment(name="exp"), ANN).experiment.reason) == 16_000


@pytest.mark.parametrize(("asked", "rows"), [(10**9, 1000), (3, 3), (-1, 0)])
def test_answer_has_no_more_trials_than_fit(api, asked, rows):
    api = api(FakeNodeControl())
    api.submit(r.SubmitExperiment(name="exp", code=CODE), ANN)
    api._queue.move("exp", State.RUNNING)
    api._experiments.running.add("exp")
    api._experiments.trials = tuple(f"aaaaa_{number:05d}" for number in range(2000))
    detail = api.show(r.ShowExperiment(name="exp", trials=asked), ANN)
    assert len(detail.trials) == rows
    assert msgspec.msgpack.encode(detail)


def test_name_of_several_nodes_means_the_newest_live_one(api):
    nodes = SomeNodes(
        ("alpha", "alpha-1", "ready", 1.0),
        ("alpha", "alpha-2", "ready", 2.0),
        ("alpha", "alpha-3", "silent", 3.0),
        ("alpha", "alpha-4", "gone", 4.0),
        ("beta", "beta-1", "silent", 1.0),
    )
    api = api(nodes)
    api.drain(r.DrainNode(node="alpha"), ANN)
    api.drain(r.DrainNode(node="alpha-1"), ANN)
    api.drain(r.DrainNode(node="beta"), ANN)
    assert [told[1] for told in nodes.told] == ["alpha-2", "alpha-1", "beta-1"]


def test_missing_node_can_be_resumed_if_a_request_for_it_is_pending(api):
    nodes = FakeNodeControl()
    api = api(nodes)
    api.resume_node(r.ResumeNode(node="delta"), ANN)
    assert nodes.told == [("resume", "delta")]
    with pytest.raises(ConfigError, match="the node 'delte' does not exist; did you mean delta"):
        api.resume_node(r.ResumeNode(node="delte"), ANN)
    with pytest.raises(ConfigError, match="the node 'delta' does not exist"):
        api.drain(r.DrainNode(node="delta"), ANN)
