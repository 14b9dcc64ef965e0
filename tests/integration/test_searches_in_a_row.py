"""Several searches in one script: the second one finds a warm farm, and no traces of the first."""

from __future__ import annotations

import time

import pytest
import redis

from tests.support.searches.searches import fit, results_of
from tests.support.waiting import eventually
from tunemq_scheduler.embedded import warm_farms
from tunemq_scheduler.results.callback import Callback
from tunemq_shared.base.errors import SearchFailed

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _farms_of_its_own():
    """End warm farms before and after."""
    warm_farms.stop_all()
    yield
    warm_farms.stop_all()


def three_results():
    """A trainable that is pickled by value, so that no trial process imports this file."""

    def report(config):
        import tunemq

        for n in range(3):
            tunemq.report({"loss": config["x"] + n})

    return report


def without_end():
    def report(config):
        import tunemq

        while True:
            tunemq.report({"loss": 0.5, "blob": "x" * 1_000})

    return report


def reply_of(farm):
    """Return the scheduler's reply to the farm's node, without the newest version."""
    client = redis.Redis.from_url(farm.url)
    (key,) = client.keys("tunemq:reply:*")
    fields = client.hgetall(key)
    client.close()
    return {name: value for name, value in fields.items() if name != b"v"}


def test_four_searches_in_a_row_are_complete_and_warm_ones_are_quick():
    took = []
    for number in range(4):
        started = time.perf_counter()
        grid = fit(three_results(), {"x": number}, num_samples=2, metric="loss", mode="min")
        took.append(time.perf_counter() - started)
        assert [len(results_of(result)) for result in grid] == [3, 3]
    assert len(warm_farms._idle) == 1
    assert min(took[1:]) < 10.0  # 0.02 s on an idle machine
    (farm,) = warm_farms._idle
    eventually(lambda: not reply_of(farm), message="the node remembers searches that have ended")


class Breaks(Callback):
    """Ends its search while its trials still have many events to send."""

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if result["training_iteration"] == 500:
            raise RuntimeError("enough of this")


def test_unread_events_of_a_search_do_not_delay_the_next():
    with pytest.raises(SearchFailed, match="enough of this"):
        fit(without_end(), {"x": 1}, callbacks=[Breaks()])
    (farm,) = warm_farms._idle
    started = time.perf_counter()
    grid = fit(three_results(), {"x": 1})
    assert time.perf_counter() - started < 20.0  # 0.02 s on an idle machine
    assert len(results_of(grid[0])) == 3
    assert warm_farms._idle == [farm]
    eventually(lambda: not reply_of(farm), message="the node remembers searches that have ended")


def test_warnings_of_a_node_are_shown_at_the_terminal(tmp_path, capfd):
    module = "no_such_module_to_preload"
    fit(three_results(), {"x": 1}, preload=[module], verbose=2)
    said = capfd.readouterr()
    assert f"{module} could not be preloaded" in said.out + said.err


def test_a_search_with_other_keys_for_its_store_gets_a_node_that_knows_them(monkeypatch):
    farms = []
    for secret in ("first", "other", "other"):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        fit(three_results(), {"x": 1.0})
        farms += warm_farms._idle
    assert len(farms) == 3
    assert farms[0] is not farms[1]
    assert farms[1] is farms[2]
