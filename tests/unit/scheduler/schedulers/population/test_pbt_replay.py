"""Replays of population based training: where schedules are read, and when they change."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.scheduler.journals import HEADER
from tests.unit.scheduler.scripted_runner import TO_THE_END, Story, result
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.journal.journal_headers import JournalSnapshot
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.schedulers import (
    PopulationBasedTrainingReplay,
    SetConfig,
    create_scheduler,
)
from tunemq_scheduler.schedulers.population.policies import PolicyStep, policy_of
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import first_that_holds

ROWS = [
    # What "c" did before it took over the state of "b", which had no file then, is not in effect.
    ["c", "z", 4, 4, {"lr": 9.0}, {"lr": 8.0}],
    ["b", "a", 4, 4, {"lr": 1.0}, {"lr": 2.0}],
    ["c", "b", 6, 10, {"lr": 2.0}, {"lr": 3.0}],
]


def written(folder: Path, rows: list[Any]) -> str:
    file = folder / "pbt_policy_c.txt"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


class Search:
    """A search with one trial, which follows the actions."""

    def __init__(self, policy_file: str) -> None:
        self.scheduler = PopulationBasedTrainingReplay(policy_file)
        self.trial = SimpleNamespace(trial_id="t0", number=0, config={"lr": 7.0}, last_result={})
        self.follow(self.scheduler.on_trial_add(None, self.trial))

    def follow(self, answer: Any) -> None:
        if isinstance(answer, SetConfig):
            self.trial.config = answer.config

    def configs(self, first: int, last: int, *, always: bool = False) -> list[float]:
        """Do steps; return the learning rate of each."""
        rates = []
        for step in range(first, last + 1):
            rates.append(self.trial.config["lr"])
            horizon = self.scheduler.horizon(self.trial)
            self.trial.last_result = told = {"training_iteration": step}
            if always or first_that_holds(horizon, told):
                self.follow(self.scheduler.on_trial_result(None, self.trial, told))
        return rates


@pytest.mark.parametrize("always", [False, True])
def test_configurations_change_behind_the_steps_of_the_policy_file(
    tmp_path: Path, always: bool
) -> None:
    search = Search(written(tmp_path, ROWS))
    assert search.configs(1, 12, always=always) == [1.0] * 4 + [2.0] * 6 + [3.0] * 2
    assert search.scheduler.horizon(search.trial) == ()
    assert search.scheduler.metric is None


def test_change_is_journalled_with_its_values(tmp_path: Path) -> None:
    search = Search(written(tmp_path, ROWS))
    search.configs(1, 3)
    action = search.scheduler.on_trial_result(None, search.trial, {"training_iteration": 4})
    assert action == SetConfig(
        search.trial,
        "training_iteration 4: configuration 2 of 3 of the schedule, lr 1 to 2",
        {"lr": 2.0},
    )


def test_state_continues_the_schedule_and_a_restart_begins_it_again(tmp_path: Path) -> None:
    file = written(tmp_path, ROWS)
    one, other = Search(file), Search(file)
    one.configs(1, 5)
    other.scheduler.set_state(json.loads(json.dumps(one.scheduler.get_state())))
    other.trial = one.trial
    assert other.scheduler.on_trial_add(None, other.trial) is None
    assert other.configs(6, 11) == [2.0] * 5 + [3.0]
    other.scheduler.on_trial_restart(None, other.trial)
    other.trial.last_result = {}
    other.follow(other.scheduler.on_trial_add(None, other.trial))
    assert other.configs(1, 5) == [1.0] * 4 + [2.0]


def test_second_trial_is_refused_with_the_fix(tmp_path: Path) -> None:
    search = Search(written(tmp_path, ROWS))
    with pytest.raises(ConfigError, match=r"trains one trial.*num_samples=1"):
        search.scheduler.on_trial_add(None, SimpleNamespace(trial_id="t1", config={}))


def test_trial_that_saved_nothing_before_a_change_is_told(tmp_path: Path) -> None:
    search = Search(written(tmp_path, ROWS))
    search.configs(1, 4)
    search.trial.saves_nothing = True
    with pytest.raises(ConfigError, match="had saved no checkpoint before step 5"):
        search.configs(5, 5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("no json", "line 1 of .* is not of a policy file"),
        ('["a", "b", 1, 2, {}]', "line 1 of"),
        ('["a", "b", 1, "2", {}, {}]', "line 1 of"),
        ('["a", "b", 1, 2, {}, 3]', "line 1 of"),
        ("7", "line 1 of"),
    ],
)
def test_file_that_is_no_policy_is_refused_with_the_line(
    tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "policy.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        PopulationBasedTrainingReplay(str(file))


@pytest.mark.parametrize(
    ("given", "told"),
    [("no-such-search", "there is no such file"), ("s3://bucket/search", "is an address")],
)
def test_search_that_is_not_there_is_named(given: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        create_scheduler("pbt_replay", policy_file=given)


def population() -> Story:
    """Return a search whose trial "c" came from "b", which came from "a"."""
    story = Story(cpus=8.0)
    for number, trial in enumerate("abc"):
        story.tell(m.ConfigSuggested(number, trial, config(trial), "", {"cpu": 1.0}), TO_THE_END)
        story.choose(trial)

    def train(trial: str, first: int, last: int) -> None:
        attempt = story.runner.live[trial].attempt
        for step in range(first, last + 1):
            story.tell(result(trial, step, attempt=attempt, is_saved=step == last))
        story.write(trial, last, attempt=attempt)
        story.commit(trial, last, attempt=attempt)

    def exploit(trial: str, source: str, new: str) -> None:
        attempt = story.runner.live[trial].attempt
        story.tell(m.ActionTaken(trial, m.EXPLOIT, "", source, "", config(new)))
        story.free(trial, attempt=attempt)
        story.choose(trial)

    train("a", 1, 4)
    train("b", 1, 2)
    exploit("b", "a", "b2")  # at step 4
    train("b", 5, 6)
    train("a", 5, 9)
    exploit("c", "b", "c2")  # at step 6 of the second lineage of b
    exploit("b", "a", "b3")  # b has another state since
    train("c", 7, 8)
    story.tell(m.ActionTaken("c", m.SET_CONFIG, "", config=config("c3")))
    story.paused("c", attempt=story.runner.live["c"].attempt)
    story.choose("c")
    train("c", 9, 10)
    return story


def test_policy_follows_the_states_that_a_trial_took_over() -> None:
    story = population()
    assert policy_of(story.runner, "a") == [PolicyStep(0, {"name": "a"})]
    assert policy_of(story.runner, "b") == [
        PolicyStep(0, {"name": "a"}),
        PolicyStep(9, {"name": "b3"}),
    ]
    assert policy_of(story.runner, "c") == [
        PolicyStep(0, {"name": "a"}),
        PolicyStep(4, {"name": "b2"}),
        PolicyStep(6, {"name": "c2"}),
        PolicyStep(8, {"name": "c3"}),
    ]


def test_policy_that_a_snapshot_of_an_earlier_version_lacks_is_refused() -> None:
    story = population()
    story.runner.live["b"].former = ()
    with pytest.raises(ConfigError, match="lacks what trial b had in its lineage 1"):
        policy_of(story.runner, "c")


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_policy_is_read_from_a_journal_by_the_name_of_its_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_snapshot: bool
) -> None:
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path))
    story = population()
    (tmp_path / "digits").mkdir()
    with Journal.create(tmp_path / "digits" / "journal", HEADER) as journal:
        journal.append(story.journal_records)
        if has_snapshot:
            story.runner.handle(m.StopRequested("a", "enough"))
            taken = JournalSnapshot(state=dump(story.runner), algorithms={})
            assert journal.snapshot(taken, story.runner.changed_summaries())
    replay = PopulationBasedTrainingReplay("digits", "c")
    assert [one.step for one in replay._policy] == [0, 4, 6, 8]
    assert replay._policy == policy_of(story.runner, "c")
    with pytest.raises(ConfigError, match=r"trial_id='d'\).*which has a, b, c"):
        PopulationBasedTrainingReplay(str(tmp_path / "digits"), "d")


def config(name: str) -> bytes:
    return pack_config({"name": name})
