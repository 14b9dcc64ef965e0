"""The live table, and the columns of all tables."""

from __future__ import annotations

import io
import math
import sys

import pytest
from rich.console import Console

from tests.unit.scheduler.fake_search import Clock, FakeSearch, failure
from tests.unit.scheduler.fake_trials import FakeTrial
from tests.unit.shared.hostile_values import all_hostile
from tunemq_scheduler.core.trial_decisions import TrialDecision
from tunemq_scheduler.output.terminal.formatting import (
    TableColumn,
    clean,
    duration,
    fit,
    text_table,
    value,
)
from tunemq_scheduler.output.terminal.reporter import CLIReporter, ProgressReporter, display_for
from tunemq_scheduler.output.terminal.rows import (
    TableOptions,
    choose,
    columns_of,
    fair_share,
    row_of,
    sorted_by_metric,
)
from tunemq_scheduler.output.terminal.table_display import TableDisplay
from tunemq_scheduler.results.result import Result
from tunemq_shared.base.errors import ConfigError


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def console(width: int = 100, height: int = 40) -> Console:
    return Console(
        file=Terminal(), width=width, height=height, force_terminal=True, color_system=None
    )


def drawn(search: FakeSearch, options: TableOptions | None = None, **size: int) -> str:
    screen = console(**size)
    display = TableDisplay(options or TableOptions(), console=screen)
    for trial in search.trials:
        if trial.status in {"ERROR", "TERMINATED"}:
            display.trial_ended(trial, "")
    with screen.capture() as captured:
        screen.print(display.frame(search))
    return captured.get()


def test_table_shows_a_wait_for_the_store_instead_of_the_state():
    search = FakeSearch()
    search.trials[1].waits = ("save", "connection refused")
    search.notes = ["a trial waits for the store: connection refused"]
    shown = drawn(search)
    (line,) = [line for line in shown.splitlines() if "ab12_00001" in line]
    assert "saving: waits for the store" in line
    assert "RUNNING" not in line
    assert "a trial waits for the store: connection refused" in shown


@pytest.mark.parity(76, 134)
def test_table_shows_states_resources_best_and_trials():
    search = FakeSearch()
    search.trials[0].result(7, loss=0.25, accuracy=0.5)
    search.trials[1].status = "PENDING"
    search.trials[2].result(3, loss=0.5)
    search.trials[2].status = "TERMINATED"
    search.best = (search.trials[0].trial_id, 0.25, search.trials[0].config)
    search.elapsed_s = 65
    search.notes = ["trial ab12_00001 waits for a cpu"]
    text = drawn(search)
    assert "train_mnist" in text
    assert "1/3 trials over  1 running  1 pending" in text
    assert "00:01:05   cpu 1/2" in text
    assert "gpu" not in text
    assert "best loss 0.25  ab12_00000" in text
    head, first, *_ = [
        line.split() for line in text.splitlines() if "trial " in line or "ab12" in line
    ][1:]
    assert head == ["trial", "status", "lr", "iter", "time", "loss", "accuracy"]
    assert first == ["*", "ab12_00000", "RUNNING", "0", "7", "3.5s", "0.25", "0.5"]
    assert "waits for a cpu" in text


@pytest.mark.parity(77, 78)
def test_table_has_at_most_twenty_rows_running_first_and_counts_the_others():
    search = FakeSearch(100)
    for trial in search.trials[8:]:
        trial.status = "PENDING" if trial.number < 12 else "TERMINATED"
    text = drawn(search)
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("ab12")]
    states = [row[1] for row in rows]
    assert len(rows) == 20
    assert states == ["RUNNING"] * 8 + ["PENDING"] * 4 + ["TERMINATED"] * 8
    assert "... 80 more not shown" in text


def test_table_on_a_low_terminal_has_fewer_rows():
    assert len(drawn(FakeSearch(50), height=15).splitlines()) <= 14


@pytest.mark.parametrize("width", [40, 80, 120])
def test_table_lines_are_no_wider_than_the_terminal(width):
    search = FakeSearch()
    for trial in search.trials:
        trial.evaluated_params = {f"parameter_{n}": 0.123456 * n for n in range(30)}
        trial.result(1, loss=1.0, **{f"metric_{n}": float(n) for n in range(30)})
    search.best = ("ab12_00000", 1.0, search.trials[0].evaluated_params)
    lines = drawn(search, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("loss" in line and "iter" in line for line in lines)


def test_table_shows_names_and_values_of_users_literally():
    search = FakeSearch(1)
    search.name = "[red]run[/red]"
    search.trials[0].evaluated_params = {"[bold]": "[/nonsense]", "esc": "\x1b[31mred\u202e\nline"}
    text = drawn(search)
    assert "[red]run[/red]" in text
    assert "[bold]" in text
    assert "[/nonsense]" in text
    assert "\x1b[31m" not in text.replace("\x1b[0m", "")
    assert "\u202e" not in text
    assert "[31mred line" in text


def test_table_with_hostile_values_in_a_configuration_is_drawn():
    search = FakeSearch(1)
    for hostile in all_hostile():
        search.trials[0].config = search.trials[0].evaluated_params = {"a": hostile}
        search.best = ("ab12_00000", 1.0, {"a": hostile})
        assert "ab12_00000" in drawn(search)


def test_table_costs_the_same_to_draw_after_thousands_of_trials():
    display = TableDisplay(TableOptions(), console=console())
    for number in range(5000):
        trial = FakeTrial(number)
        trial.status = "TERMINATED"
        display.trial_ended(trial, "")
    assert len(display._finished) == 20
    assert display._finished[0].number == 4999


def test_table_is_drawn_when_due_and_less_often_when_drawing_is_slow():
    clock, screen, search = Clock(), console(), FakeSearch()
    display = TableDisplay(TableOptions(), console=screen, now=clock)
    frames = []

    def frame(view):
        frames.append(clock.now)
        clock.now += slow
        return TableDisplay.frame(display, view)

    display.frame = frame
    slow = 0.0
    display.begin(search)
    try:
        for _ in range(100):
            clock.now += 0.01
            display.update(search)
        assert 2 <= len(frames) <= 3
        slow = 0.1
        clock.now += 1
        display.update(search)
        clock.now += 4
        display.update(search)
        assert len(frames) <= 4
    finally:
        display.close()


def test_table_keeps_prints_of_the_script_above_it_and_restores_stdout(monkeypatch):
    screen = console()
    monkeypatch.setattr(sys, "stdout", screen.file)
    display = TableDisplay(TableOptions(), console=screen)
    display.begin(FakeSearch())
    sys.stdout.write("printed by the script\n")
    display.close()
    display.close()
    assert sys.stdout is screen.file
    assert "printed by the script" in screen.file.getvalue()


def test_table_on_a_closed_terminal_does_not_end_the_search():
    class Gone(Terminal):
        is_gone = False

        def write(self, text: str) -> int:
            if self.is_gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    stream, search = Gone(), FakeSearch()
    clock = Clock()
    screen = Console(file=stream, force_terminal=True, width=80, height=30)
    display = TableDisplay(TableOptions(), console=screen, now=clock)
    display.begin(search)
    stream.is_gone = True
    clock.now += 10
    display.update(search)
    display.end(search, [])


def test_table_at_the_end_shows_the_best_the_errors_and_the_folder():
    search = FakeSearch(30)
    results = []
    for trial in search.trials:
        trial.result(2, loss=math.nan if trial.number == 3 else 30.0 - trial.number, accuracy=0.5)
        trial.status = "TERMINATED"
        results.append(
            Result(
                metrics=trial.last_result,
                path=trial.local_path,
                trial_id=trial.trial_id,
                status=trial.status,
            )
        )
    search.log.add(failure(search.trials[0]))
    screen = console(width=90)
    display = TableDisplay(TableOptions(), console=screen)
    display.begin(search)
    display.end(search, results)
    text = screen.file.getvalue()
    rows = [line.split() for line in text.splitlines() if line.lstrip("* ").startswith("ab12")]
    assert len(rows) == 20
    assert rows[0][:2] == ["*", "ab12_00029"]
    assert "... 10 more not shown" in text
    assert "best loss: 1.0" in text
    assert "lr = 2.9" in text
    assert "ValueError: too small" in text
    assert "once on node-a; trials train_ab12_00000" in text
    assert f"see {search.trials[0].local_path}/error.txt" in text
    assert "results in /results/train_mnist" in text


def test_table_sorts_nan_behind_every_number():
    trials = [FakeTrial(n) for n in range(4)]
    for trial, loss in zip(trials, (2.0, math.nan, 1.0, None), strict=True):
        trial.result(1, loss=loss)
    rows = [row_of(trial) for trial in trials]
    assert [row.number for row in sorted_by_metric(rows, "loss", "min")] == [2, 0, 1, 3]
    assert [row.number for row in sorted_by_metric(rows, "loss", "max")] == [0, 2, 1, 3]


@pytest.mark.parity(78, 79)
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
def test_table_row_shares_are_fair_and_use_every_row(limit):
    groups = {"RUNNING": range(2), "ERROR": range(50), "TERMINATED": range(50)}
    share = fair_share(groups, limit)
    assert sum(share.values()) == limit
    assert max(share.values()) - min(share.values()) <= 1 or share["RUNNING"] == 2


def test_table_examines_a_bounded_number_of_live_trials():
    def endless():
        number = 0
        while True:
            yield FakeTrial(number)
            number += 1

    assert len(choose(endless(), (), 20)) == 20


def test_table_columns_can_be_chosen_and_renamed():
    reporter = CLIReporter(metric_columns={"loss": "L"}, parameter_columns=["lr"])
    reporter.add_metric_column("eval/f1", "F1")
    trial = FakeTrial(0, lr=0.1, hidden=3)
    trial.result(1, loss=1.0, eval={"f1": 0.5}, other=2)
    columns = columns_of([row_of(trial)], reporter.options, "loss")
    assert [column.header for column in columns] == [
        "trial",
        "status",
        "lr",
        "iter",
        "time",
        "L",
        "F1",
    ]


def test_table_with_invalid_options_is_rejected_with_the_fix():
    with pytest.raises(ConfigError, match="max_progress_rows=0"):
        CLIReporter(max_progress_rows=0)
    with pytest.raises(ConfigError, match="'min' or 'max'"):
        CLIReporter(mode="best")
    with pytest.raises(ConfigError, match="a list of column names, not 'loss'"):
        CLIReporter(metric_columns="loss")


def test_custom_reporter_is_asked_every_turn_and_sees_ended_trials(capsys):
    class Own(CLIReporter):
        def should_report(self, trials, done=False):
            return done or sum(trial.status == "TERMINATED" for trial in trials) == 1

    display, search = display_for(Own(), stream=io.StringIO()), FakeSearch(2)
    display.begin(search)
    display.update(search)
    assert not capsys.readouterr().out
    search.trials[0].status = "TERMINATED"
    display.trial_ended(search.trials[0], "")
    display.update(search)
    shown = capsys.readouterr().out
    assert "== Status ==" in shown
    assert "ab12_00000  TERMINATED" in shown
    display.end(search, [])
    assert "== Result ==" in capsys.readouterr().out


def test_custom_reporter_needs_only_its_base_class():
    reported = []

    class Own(ProgressReporter):
        def report(self, trials, done, *sys_info):
            reported.append((len(trials), done))

    display, search = display_for(Own(), stream=io.StringIO()), FakeSearch(2)
    display.begin(search)
    display.update(search)
    display.end(search, [])
    assert reported == [(2, False), (2, True)]


def test_table_is_drawn_only_on_a_capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(display_for(stream=Terminal()), TableDisplay)
    assert not isinstance(display_for(stream=io.StringIO()), TableDisplay)
    assert not isinstance(display_for(stream=Terminal(), verbose=2), TableDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert not isinstance(display_for(stream=Terminal()), TableDisplay)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (0.123456, "0.1235"),
        (0, "0"),
        (1e-7, "1.000e-07"),
        (12345.678, "12345.7"),
        (True, "True"),
        (None, ""),
        (math.nan, "nan"),
        (10**30, "1e+30"),
        ("x" * 30, "x" * 19 + "…"),
    ],
)
def test_table_values_are_short(item, text):
    assert value(item) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.50s"), (12.34, "12.3s"), (65, "1m 05s"), (7380, "2h 03m"), (273600, "3d 04h")],
)
def test_table_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_table_counts_wide_characters_as_two_columns():
    assert clean("漢字漢字", 5) == "漢字…"
    lines = text_table(
        [TableColumn(header="a", cells=["漢字", "x"]), TableColumn(header="b", cells=["1", "2"])]
    )
    assert lines == ["a     b", "----  -", "漢字  1", "x     2"]


def test_table_drops_the_least_important_columns_first():
    columns = [
        TableColumn(header=name * 5, cells=[], rank=rank)
        for name, rank in (("a", 0), ("b", 9), ("c", 1))
    ]
    assert [column.header for column in fit(columns, 12)] == ["aaaaa", "ccccc"]


def test_texts_that_may_be_cut_share_the_width_that_the_others_leave():
    columns = [
        TableColumn(header="a", cells=["x" * 10]),
        TableColumn(header="b", cells=["y" * 40], rank=9, least_width=6),
    ]
    for width, told in ((60, "y" * 40), (30, "y" * 17 + "…"), (18, "y" * 5 + "…")):
        assert fit(columns, width)[1].cells == [told]
    assert [column.header for column in fit(columns, 17)] == ["a"]


@pytest.mark.parametrize(
    ("width", "told"),
    [
        (120, "stopped at step 9: loss 0.33 is not in the best third of 12 trials"),
        (70, "stopped at step 9: loss…"),
        (50, None),
    ],
)
def test_table_shows_the_newest_decision_of_a_trial_cut_to_the_width(width, told):
    search = FakeSearch()
    for trial in search.trials:
        trial.result(9, loss=0.33)
    reason = "lo\x1bss 0.33 is not in the best third of 12 trials"
    search.trials[1].decisions = (
        TrialDecision(3, "PAUSE", "it waits"),
        TrialDecision(9, "STOP", reason),
    )
    lines = drawn(search, width=width).splitlines()
    (line,) = [line for line in lines if "ab12_00001" in line]
    assert max(map(len, lines)) <= width
    assert "\x1b" not in line
    assert line.rstrip().endswith(told) if told else "stopped" not in line
    assert sum("decision" in one for one in lines) == bool(told)


def test_table_without_decisions_has_no_column_for_them():
    assert "decision" not in drawn(FakeSearch())


def test_table_keeps_printed_notices_above_it():
    search, screen = FakeSearch(), console()
    display = TableDisplay(TableOptions(), console=screen)
    display.begin(search)
    display.notices("[red]numpy[/red] is not preloaded")
    display.close()
    assert "[red]numpy[/red] is not preloaded" in screen.file.getvalue()


def test_custom_reporter_gets_each_notice_once(capsys):
    told = []

    class Own(ProgressReporter):
        def should_report(self, trials, done=False):
            return done

        def report(self, trials, done, *sys_info):
            told.append(sys_info)

    display = display_for(Own())
    search = FakeSearch()
    display.begin(search)
    display.notices("the node was started again")
    display.update(search)
    display.end(search, [])
    display.end(search, [])
    assert [info[1:] for info in told] == [("the node was started again",), ()]
