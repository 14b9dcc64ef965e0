"""Progress lines for output that is no terminal."""

from __future__ import annotations

import errno
import io
import math

import pytest

from tests.unit.scheduler.fake_search import Clock, FakeSearch, failure
from tunemq_scheduler.output.terminal.display_base import Display, TerminalOutput
from tunemq_scheduler.output.terminal.line_display import LineDisplay
from tunemq_scheduler.output.terminal.reporter import display_for
from tunemq_scheduler.output.terminal.rows import TableOptions
from tunemq_scheduler.results.result import Result


class Shown:
    def __init__(self, **options: object) -> None:
        self.clock, self.stream, self.search = Clock(), io.StringIO(), FakeSearch()
        self.display = LineDisplay(
            TerminalOutput(self.stream), TableOptions(), now=self.clock, **options
        )

    def lines(self) -> list[str]:
        """Return the lines that were written since the last call."""
        text = self.stream.getvalue()
        self.stream.seek(0)
        self.stream.truncate()
        return text.splitlines()


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.mark.parity(76)
def test_lines_at_the_start_name_the_number_of_trials_and_the_folder(shown):
    shown.display.begin(shown.search)
    assert shown.lines() == [
        "[00:00:00] search train_mnist: 3 trials, results in /results/train_mnist"
    ]


def test_lines_at_the_start_and_end_name_a_remote_store(shown):
    shown.search.store = "s3://bucket/train_mnist"
    shown.display.begin(shown.search)
    assert shown.lines()[0].endswith("train_mnist, checkpoints in s3://bucket/train_mnist")
    shown.display.end(shown.search, [])
    assert "  checkpoints in s3://bucket/train_mnist" in shown.lines()


def test_lines_report_a_long_wait_for_the_store_and_its_end(shown):
    trial = shown.search.trials[0]
    for reason in ("connection refused", "connection refused by 127.0.0.1"):
        trial.waits = ("save", reason)
        shown.display.trial_waits(trial)
    shown.display.update(shown.search)
    assert shown.lines() == []
    shown.clock.now += 2
    for _ in range(2):
        shown.display.update(shown.search)
    assert shown.lines() == [
        "[00:00:02] trial ab12_00000 saving: waits for the store (connection refused by 127.0.0.1)"
    ]
    trial.waits = ("", "")
    for _ in range(2):
        shown.display.trial_waits(trial)
    assert shown.lines() == ["[00:00:02] trial ab12_00000 no longer waits for the store"]


def test_lines_report_a_wait_for_a_gpu_and_its_end(shown):
    trial = shown.search.trials[0]
    trial.waits = ("device", "GPU A: memory not released")
    shown.display.trial_waits(trial)
    shown.clock.now += 2
    shown.display.update(shown.search)
    trial.waits = ("", "")
    shown.display.trial_waits(trial)
    assert shown.lines() == [
        "[00:00:02] trial ab12_00000 starting: waits for its GPU (GPU A: memory not released)",
        "[00:00:02] trial ab12_00000 no longer waits for a GPU",
    ]


def test_lines_do_not_report_a_short_wait_for_an_upload(shown):
    trial = shown.search.trials[0]
    for waits in (("save", "1 of its checkpoints is not in the store yet"), ("", "")):
        trial.waits = waits
        shown.display.trial_waits(trial)
        shown.display.update(shown.search)
        shown.clock.now += 1
    shown.clock.now += 2
    shown.display.update(shown.search)
    assert shown.lines() == []


def test_lines_report_a_wait_again_after_the_trial_died(shown):
    trial = shown.search.trials[0]
    for _ in range(2):
        shown.display.trial_started(trial)
        trial.waits = ("restore", "connection refused")
        shown.display.trial_waits(trial)
        shown.clock.now += 2
        shown.display.update(shown.search)
    assert sum("restoring: waits for the store" in line for line in shown.lines()) == 2


def test_lines_continue_the_clock_of_an_earlier_run(shown):
    shown.search.elapsed_s = 60.0
    shown.display.begin(shown.search)
    shown.clock.now += 5
    shown.lines()
    shown.display.trial_started(shown.search.trials[1])
    assert shown.lines() == ["[00:01:05] trial ab12_00001 started on node-a: lr=0.1"]


@pytest.mark.parametrize(
    ("node", "where"), [("worker-1", "worker-1 (node-a)"), ("node-a", "node-a"), ("", "node-a")]
)
def test_lines_of_a_started_trial_name_its_node_and_the_host_where_it_differs(shown, node, where):
    trial = shown.search.trials[1]
    trial.node = node
    shown.display.trial_started(trial)
    assert shown.lines()[0].endswith(f"started on {where}: lr=0.1")


def test_lines_of_a_retried_trial_name_the_attempt(shown):
    trial = shown.search.trials[0]
    trial.attempt, trial.num_failures = 3, 1
    shown.display.trial_started(trial)
    assert "started again (attempt 2) on node-a" in shown.lines()[0]


def test_lines_of_a_trial_resumed_after_a_pause_name_no_attempt(shown):
    trial = shown.search.trials[0]
    trial.attempt = 2
    shown.display.trial_started(trial)
    assert "started again on node-a" in shown.lines()[0]


def test_lines_of_an_ended_trial_state_steps_time_reason_and_metrics(shown):
    trial = shown.search.trials[0]
    trial.result(4, loss=0.5, note="x")
    trial.status = "TERMINATED"
    shown.display.trial_ended(trial, "ASHA stopped it")
    assert shown.lines() == [
        "[00:00:00] trial ab12_00000 ended after 4 steps, 2.0s (ASHA stopped it): loss=0.5"
    ]


def test_lines_of_a_failure_state_the_users_exception_the_host_and_the_file_once(shown):
    trial = shown.search.trials[0]
    shown.display.trial_failed(trial, failure(trial, is_final=False))
    shown.display.trial_failed(trial, failure(trial))
    trial.status = "ERROR"
    shown.display.trial_ended(trial, "failed")
    told = (
        "[00:00:00] trial ab12_00000 failed: ValueError: too small "
        f"(node-a, {trial.local_path}/error.txt)"
    )
    assert shown.lines() == [f"{told}; it is tried again", told]


def test_lines_of_a_failure_state_its_class_and_budget(shown):
    trial = shown.search.trials[0]
    budget = {"kind": "died", "error": "SIGKILL", "file": None}
    first = failure(trial, is_final=False, verdict="failure 1 of at most 2", **budget)
    shown.display.trial_failed(trial, first)
    shown.display.trial_failed(trial, failure(trial, verdict="failure 2 of at most 2", **budget))
    told = "[00:00:00] trial ab12_00000 failed: SIGKILL (node-a); death of its process: failure"
    assert shown.lines() == [
        f"{told} 1 of at most 2; it is tried again",
        f"{told} 2 of at most 2",
    ]


def test_lines_report_a_new_best_but_not_too_often(shown):
    shown.search.best = ("ab12_00001", 0.5, {"lr": 0.1})
    for _ in range(3):
        shown.display.update(shown.search)
    assert shown.lines() == ["[00:00:00] best loss = 0.5, trial ab12_00001: lr=0.1"]
    shown.search.best = ("ab12_00002", 0.25, {"lr": 0.2})
    shown.display.update(shown.search)
    assert shown.lines() == []
    shown.clock.now += 5
    shown.display.update(shown.search)
    assert shown.lines() == ["[00:00:05] best loss = 0.25, trial ab12_00002: lr=0.2"]


def test_lines_summarise_the_search_at_most_every_thirty_seconds(shown):
    shown.search.notes = ["trial ab12_00002 waits for a gpu"]
    for _ in range(300):
        shown.clock.now += 0.25
        shown.display.update(shown.search)
    assert shown.lines() == [
        "[00:00:30] status: 3 RUNNING of 3 trials; cpu 1/2",
        "[00:00:30]   trial ab12_00002 waits for a gpu",
        "[00:01:00] status: 3 RUNNING of 3 trials; cpu 1/2",
        "[00:01:00]   trial ab12_00002 waits for a gpu",
    ]


def test_lines_report_a_notice_once_and_at_once(shown):
    shown.display.notices("the node\nwas started again")
    assert shown.lines() == ["[00:00:00] the node was started again"]


def test_lines_in_a_flood_are_cut_and_counted_and_hide_no_failure(shown):
    trial = shown.search.trials[0]
    for _ in range(1000):
        shown.display.trial_started(trial)
    shown.display.trial_failed(trial, failure(trial))
    lines = shown.lines()
    assert len(lines) == 41
    assert "failed: ValueError" in lines[-1]
    shown.clock.now += 30
    shown.display.update(shown.search)
    assert shown.lines()[0].endswith("; 960 lines left out")
    shown.display.trial_started(trial)
    assert len(shown.lines()) == 1


def test_lines_report_results_when_asked_for():
    assert not Shown().display.wants_results
    shown = Shown(show_results=True)
    trial = shown.search.trials[0]
    shown.display.trial_result(trial, trial.result(3, loss=math.nan, accuracy=0.5))
    assert shown.display.wants_results
    assert shown.lines() == ["[00:00:00] trial ab12_00000 step 3: loss=nan accuracy=0.5"]


def test_lines_with_escape_codes_and_line_ends_cannot_be_forged(shown):
    trial = shown.search.trials[0]
    error = "ValueError: \x1b[2J\n[00:00:00] trial x ended\r"
    shown.display.trial_failed(trial, failure(trial, error=error))
    (line,) = shown.lines()
    assert "\x1b" not in line
    assert "ValueError: [2J [00:00:00] trial x ended" in line


def test_lines_to_a_closed_or_ascii_stream_do_not_end_the_search():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    output = TerminalOutput(stream)
    output.write("größe")
    assert raw.getvalue() == b"gr\\xf6\\xdfe\n"
    stream.close()
    output.write("written after the stream was closed")


def test_lines_are_written_again_once_the_disk_has_space():
    class Full(io.StringIO):
        is_full = True

        def flush(self):
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")

    stream = Full()
    output = TerminalOutput(stream)
    output.write("while it is full")
    stream.is_full = False
    output.write("later")
    assert stream.getvalue().endswith("later\n")


def test_lines_at_verbosity_zero_show_nothing():
    stream = io.StringIO()
    display, search = display_for(verbose=0, stream=stream), FakeSearch()
    assert type(display) is Display
    display.begin(search)
    display.update(search)
    display.end(search, [])
    display.close()
    assert not stream.getvalue()


def test_summary_is_plain_text(shown):
    results = []
    for trial in shown.search.trials:
        trial.status = "TERMINATED"
        metrics = trial.result(1, loss=1.0 + trial.number)
        results.append(Result(metrics=metrics, path=trial.local_path, trial_id=trial.trial_id))
    shown.search.elapsed_s = 65.0
    shown.display.end(shown.search, results)
    lines = shown.lines()
    assert "best loss: 1.0" in lines
    assert "  trial       ab12_00000" in lines
    assert "  checkpoint  none" in lines
    assert "  3 TERMINATED in 1m 05s" in lines
    assert lines[-1] == "  results in /results/train_mnist"


def test_summary_states_that_no_trial_reported_the_metric(shown):
    results = [
        Result(metrics=trial.result(1), path="", trial_id=trial.trial_id)
        for trial in shown.search.trials
    ]
    shown.display.end(shown.search, results)
    assert "  no trial reported a finite value of loss" in shown.lines()
