"""F25: large, odd or endless input in whole experiments.

Usable input, however large or strange, arrives unchanged. Unusable input is rejected with a message
that names it and says what to do. Neither harms a file, a table or a terminal.
"""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import psutil
import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import farm_processes, fit, results_of, table_of
from tunemq_scheduler.embedded import warm_farms
from tunemq_shared.base.errors import ConfigError, SearchSpaceError

__all__ = ["ended_searches"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: Clears a terminal, names its window, turns the writing around, forges a line, changes a colour.
ODD = "\x1b[2J\x1b]0;owned\x07\u202e\r\nFORGED \x9b31m\x00,\"';=1+1 [bold] <b>\u2028"
MIB = 2**20


def measures(config):
    sizes = {"keys": len(config), "length": sum(len(str(value)) for value in config.values())}
    tune.report({"loss": 1.0, **sizes})


class HasNoText:
    def __repr__(self):
        raise RuntimeError("this value has no text")

    __str__ = __format__ = __repr__

    def __eq__(self, other):
        raise RuntimeError("this value cannot be compared")

    __hash__ = None


def test_f25_search_with_unprintable_values_ends_with_all_its_trials(capfd):
    grid = fit(
        lambda config: tune.report({"loss": 1.0}),
        {
            "a": tune.grid_search([HasNoText(), 2]),
            "b": HasNoText(),
            "c": tune.choice([HasNoText()]),
        },
        metric="loss",
        mode="min",
        verbose=2,
    )

    assert [result.status for result in grid] == ["TERMINATED"] * 2
    assert "a=<tests.faults.test_" in "".join(capfd.readouterr())
    for result in grid:
        assert len(results_of(result)) == len(table_of(result)) == 1


def test_f25_recursive_parameter_space_is_refused_with_its_place():
    space = {"model": {"layers": [1]}}
    space["model"]["layers"].append(space)
    with pytest.raises(
        SearchSpaceError, match=r"64 levels.*param_space\['model'\]\['layers'\]\[1\]"
    ):
        fit(measures, space, metric="loss", mode="min")


# --- large ----------------------------------------------------------------------------------------


def test_f25_configuration_of_one_megabyte_arrives_and_is_shown_shortened(capfd):
    (result,) = fit(
        measures,
        {"text": tune.grid_search(["x" * 1_000_000]), "n": 1},
        metric="loss",
        mode="min",
        verbose=2,
    )

    assert result.metrics["length"] == 1_000_001
    assert result.config == {"text": "x" * 1_000_000, "n": 1}
    said = "".join(capfd.readouterr())
    assert "text=xxxxxxxxxxxxxxxxxxx… n=1" in said
    assert "1 TERMINATED" in said
    assert len(said) < 10_000


def test_f25_configuration_of_many_keys_arrives_and_is_shown_shortened(capfd):
    space = {f"parameter_{n}": n for n in range(30_000)}
    (result,) = fit(measures, space, metric="loss", mode="min", verbose=2)

    assert result.metrics["keys"] == 30_000
    assert result.config == space
    said = "".join(capfd.readouterr())
    assert "and 29950 more" in said
    assert len(said) < 10_000


def test_f25_a_result_of_many_keys_is_recorded_whole(capfd):
    def train(config):
        for step in range(2):
            tune.report({"loss": 1.0, **{f"metric_{n}": n + step for n in range(10_000)}})

    (result,) = fit(train, metric="loss", mode="min", verbose=2)

    for line, row in zip(results_of(result), table_of(result), strict=True):
        step = line["training_iteration"]
        assert [line[f"metric_{n}"] for n in (0, 9_999)] == [step - 1, step + 9_998]
        assert [row[f"metric_{n}"] for n in (0, 9_999)] == [str(step - 1), str(step + 9_998)]
    assert len("".join(capfd.readouterr())) < 10_000


def test_f25_result_that_is_too_large_fails_its_trial_with_the_limit_and_the_fix():
    def train(config):
        tune.report({"loss": 1.0})
        tune.report({"loss": 1.0, "blob": "x" * int(config["mib"] * MIB)})

    large, small = fit(train, {"mib": tune.grid_search([100, 0.9])}, metric="loss", mode="min")

    assert "and 1,048,576 are possible" in str(large.error)
    assert "write large data to a file" in str(large.error)
    assert len(results_of(large)) == 1
    assert (small.error, len(results_of(small))) == (None, 2)


# --- odd ------------------------------------------------------------------------------------------


def test_f25_odd_names_and_values_come_back_as_they_were_and_touch_no_terminal(capfd):
    def train(config):
        tune.report({"loss": 1.0, ODD: 2.0, "said": config[ODD], "more": {ODD: [ODD]}})

    space = {ODD: tune.grid_search([ODD, "plain"])}
    results = fit(train, space, metric="loss", mode="min", verbose=2, name=ODD)

    for result, odd in zip(results, (ODD, "plain"), strict=True):
        assert result.config == {ODD: odd}
        (line,) = results_of(result)
        assert (line[ODD], line["said"], line["more"]) == (2.0, odd, {ODD: [ODD]})
        # Each row is one line: Python's escapes stand for line ends.
        (row,) = table_of(result)
        assert row["said"] == odd.replace("\r", "\\r").replace("\n", "\\n")
        text = Path(result.path, "progress.csv").read_text(encoding="utf-8")
        assert len(list(csv.reader(text.split("\n")[:-1]))) == 2
        params = json.loads(Path(result.path, "params.json").read_text(encoding="utf-8"))
        assert params == {ODD: odd}
    said = "".join(capfd.readouterr())
    assert not {char for char in said if ord(char) < 32 or char in "\x7f\x9b\u202e\u2028"} - {"\n"}
    assert not [line for line in said.splitlines() if line.lstrip().startswith("FORGED")]


@pytest.mark.parametrize(
    ("metrics", "place"),
    [
        ({"lo\udcffss": 1.0}, r"the name 'lo\udcffss'"),
        ({"inner": {"\ud800": 1.0}}, r"inside 'inner' at step 1 has the name '\ud800'"),
        ({"said": "\udcff"}, r"'said' at step 1 is '\udcff'"),
    ],
)
def test_f25_invalid_unicode_in_a_result_is_refused_with_its_place_and_the_fix(metrics, place):
    (result,) = fit(lambda config: metrics)

    assert place in str(result.error)
    assert "not valid Unicode" in str(result.error)
    assert "errors='replace'" in str(result.error)


def test_f25_parameter_name_that_is_no_unicode_is_refused_before_anything_starts(tmp_path):
    warm_farms.stop_all()
    before = farm_processes()  # of other tests
    with pytest.raises(ConfigError, match=r"the key 'l\\udcffr' .* errors='replace'"):
        fit(measures, {"l\udcffr": 1.0})

    assert not set(farm_processes()) - set(before)
    assert not (tmp_path / "tunemq_results").exists()


def test_f25_a_value_that_is_no_unicode_arrives_as_it_was():
    def train(config):
        tune.report({"same": config["path"] == "a\udcffb" and config["in"] == ["\ud800"]})

    (result,) = fit(train, {"path": tune.grid_search(["a\udcffb"]), "in": ["\ud800"]})

    assert result.metrics["same"] is True
    assert json.loads(Path(result.path, "params.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [".", "..", "x" * 300, "\udcff", "a\0b"])
def test_f25_search_with_an_odd_name_stays_below_its_storage_path(name, tmp_path):
    results = fit(measures, name=name, storage_path=str(tmp_path / "results"))

    assert Path(results.experiment_path).parent == tmp_path / "results"
    assert results[0].status == "TERMINATED"


# --- without end ----------------------------------------------------------------------------------


def test_f25_thousands_of_reports_a_second_are_recorded_in_constant_memory(record_property):
    def train(config):
        until, n = time.monotonic() + 1.0, 0
        while time.monotonic() < until or n < 1_000:
            n += 1
            tune.report({"loss": 1 / n, "n": n})

    before = psutil.Process().memory_info().rss
    results = fit(train, {"a": tune.grid_search([1, 2])}, metric="loss", mode="min")
    taken = psutil.Process().memory_info().rss - before

    for result in results:
        assert result.status == "TERMINATED"
        lines = Path(result.path, "result.json").read_bytes().count(b"\n")
        assert lines == result.metrics["n"] == result.metrics["training_iteration"]
    reported = sum(result.metrics["n"] for result in results)
    record_property("reports", reported)
    assert taken < 60 * MIB, (reported, taken)


def test_f25_nonfinite_numbers_are_recorded_in_metrics_that_are_not_compared():
    odd = [float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 5e-324, 2**64 - 1, -(2**63)]

    def train(config):
        for value in odd:
            tune.report({"loss": 1.0, "odd": value})

    (result,) = fit(train, metric="loss", mode="min")

    assert [repr(line["odd"]) for line in results_of(result)] == [repr(value) for value in odd]
    assert [float(row["odd"]) for row in table_of(result)][1:] == [float(one) for one in odd[1:]]
