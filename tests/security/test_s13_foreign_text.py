"""S13: other users' text controls no terminal, runs in no spreadsheet, and is never a web page."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import select
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.fake_trials import FakeTrial
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api import log_following
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.cli import experiment_commands, farm_tables, main, submit_command
from tunemq_scheduler.output.loggers import CSVLoggerCallback
from tunemq_scheduler.output.terminal.harmless import harmless_json, harmless_output, write_output
from tunemq_scheduler.results.csv_cells import columns_of, row_of
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.safe_text import harmless
from tunemq_shared.system.standard_streams import tell

pytestmark = pytest.mark.security

STEERING = [
    "\x1b[2J\x1b[H",  # clears the screen
    "\x1b]0;title\x07",
    "\x1b]52;c;ZXZpbA==\x07",  # writes into the clipboard
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[6n",  # answers into the shell's input
    "\x1bP+q544e\x1b\\",
    "\x9b2J",
    "\x9d0;title\x9c",
    "\x08\x08\x08",
    "\x07",
    "\x00",
    "\x7f",
    "\u202egnp.exe",
    "\u2066a\u2069",
    "\u2028",
    "\x0b\x0c",
]
MARKUP = ["[bold red]x[/]", "[link=http://evil.example]x[/link]", "[/]", "<script>1</script>"]
FORMULAS = [
    "=1+1",
    '=HYPERLINK("http://evil.example","x")',
    "+1+1",
    "-2+3+cmd|' /C calc'!A0",
    "@SUM(1+1)",
    "\t=1+1",
    "'=1+1",
    "\uff1d1+1",
    "=1\r\n=2",
]
BEGINS = "=+-@\t\r\uff1d\uff0b\uff0d\uff20"


def steers(text: str) -> bool:
    return any((ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160 for char in text)


# --- the terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", STEERING)
def test_s13_terminal_control_characters_are_escaped(text):
    for given_text in (text, f"a{text}b\n{text}"):
        assert not steers(harmless(given_text))
        assert not steers(harmless_output(given_text))
    assert harmless("fine\ttext\nä …") == "fine\ttext\nä …"


@given(st.text())
def test_s13_escaped_text_holds_no_control_characters(text):
    assert not steers(harmless(text))
    assert harmless(harmless(text)) == harmless(text)
    left = harmless_output(text).replace("\r", "")
    for number in range(100):
        left = left.replace(f"\x1b[{number}m", "")
    assert "\x1b]" not in left
    assert "\x9b" not in left


@given(st.text() | st.sampled_from(["\x9b2J", "a\u202eb", "\x7f", "\ud7ff\u2066"]))
def test_s13_json_of_any_text_steers_no_terminal_and_means_the_same(text):
    written = harmless_json(json.dumps([text], ensure_ascii=False))
    assert json.loads(written) == [text]
    assert not steers(written)
    assert not set(written) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def test_s13_output_of_trials_keeps_its_colours_and_progress_bars():
    bar = "\r\x1b[32m 50%\x1b[0m\r\x1b[1;31mdone\x1b[m\n"
    assert harmless_output(bar) == bar
    assert harmless_output(f"{bar}\x1b[2J") == f"{bar}\\x1b[2J"
    assert harmless_output("\x1b[8mhidden\n") == "\x1b[8mhidden\n\x1b[0m"


def test_s13_a_log_is_harmless_at_a_terminal_and_whole_in_a_file(tmp_path: Path):
    data = b"\x1b]52;c;ZXZpbA==\x07\x1b[31mred\x1b[0m\n"
    with (tmp_path / "log").open("w") as file:
        write_output(file, data)
    assert (tmp_path / "log").read_bytes() == data
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert terminal.isatty()
        write_output(terminal, data)
        shown = b""
        while not shown.endswith(b"\n") and select.select([ours], [], [], 60)[0]:
            shown += os.read(ours, 1000)
    os.close(ours)
    assert shown == b"\\x1b]52;c;ZXZpbA==\\x07\x1b[31mred\x1b[0m\r\n"


@pytest.mark.parametrize("text", [*STEERING, *MARKUP])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_s13_tables_of_the_command_line_show_names_as_they_are(
    capsys, monkeypatch, text, is_terminal
):
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    row = a.ExperimentRow(
        name=f"n{text}",
        id="1",
        owner=f"o{text}",
        priority=0,
        state=a.ExperimentState.FAILED,
        reason=f"r{text}",
        submitted=0.0,
        started=None,
        ended=None,
        trials={},
        total=None,
        position=None,
    )
    trial = a.TrialRow(
        trial=f"t{text}", name=f"t{text}", status="ERROR", node=f"h{text}", note=f"x{text}"
    )
    stopped = a.TrialRow(trial="s", name="s", status="TERMINATED", decision=f"d{text}")
    detail = a.ExperimentDetail(
        experiment=row,
        folder=f"/f{text}",
        store=f"s3://s{text}",
        notes=(f"w{text}",),
        trials=(trial, stopped),
        metric=f"m{text}",
    )
    farm_tables.show_experiments([row])
    farm_tables.show_detail(detail)
    told = capsys.readouterr().out
    for number in (*range(110),):
        told = told.replace(f"\x1b[{number}m", "")
    assert not steers(told)
    assert "\u202e" not in told
    if text in MARKUP:
        assert f"n{text}" in told
        assert f"r{text}" in told


@pytest.mark.parametrize("text", STEERING)
def test_s13_errors_and_answers_steer_no_terminal_either(capsys, text):
    def fail(_options):
        raise ConfigError(f"there is no experiment {text}.")

    def add_parser(groups):
        groups.add_parser("fail").set_defaults(run=fail)

    assert main.main("1", ["fail"], others=[add_parser]) == 64
    assert not steers(capsys.readouterr().err)

    class Client:
        def ask(self, _request, kind):
            return (
                a.Explanation(lines=(f"because {text}",))
                if kind is a.Explanation
                else a.RequestDone(text=f"did {text}")
            )

    options = main.argparse.Namespace(experiment="n", trial="", json=False)
    experiment_commands.tell_why(Client(), options)
    experiment_commands.resume(Client(), options)
    told = capsys.readouterr().out
    assert "because " in told
    assert "did " in told
    assert not steers(told)


@pytest.mark.parametrize("text", STEERING)
def test_s13_json_answer_of_a_command_steers_no_terminal(capsys, text):
    class Client:
        def ask(self, _request, _kind):
            decided = a.DecisionRow(step=1, action="STOP", reason=text)
            return a.Explanation(lines=(f"because {text}",), decisions=(decided,))

    options = main.argparse.Namespace(experiment="n", trial="", json=True)
    experiment_commands.tell_why(Client(), options)
    told = capsys.readouterr().out
    assert json.loads(told)["lines"] == [f"because {text}"]
    assert json.loads(told)["decisions"][0]["reason"] == text
    assert not steers(told)
    assert not set(told) & set("\u202e\u2066\u2069\u2028")


# --- spreadsheets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", FORMULAS)
def test_s13_no_cell_of_progress_csv_is_a_formula(tmp_path, text):
    trial, logger = FakeTrial(0, tmp_path), CSVLoggerCallback()
    logger.on_trial_result(0, [trial], trial, trial.result(1, **{text: 1.5, "note": text}))
    logger.on_trial_complete(0, [trial], trial)
    with Path(trial.local_path, "progress.csv").open(newline="") as file:
        header, row = csv.reader(file, strict=True)
    assert not [cell for cell in (*header, *row) if cell[:1] and cell[0] in BEGINS]
    assert row[header.index("note")].startswith("'")


def test_s13_numbers_in_progress_csv_stay_numbers(tmp_path):
    trial, logger = FakeTrial(0, tmp_path), CSVLoggerCallback()
    numbers = {"loss": -0.5, "text": "-1.5e-3", "more": "+7", "least": -(10**20)}
    logger.on_trial_result(0, [trial], trial, trial.result(1, **numbers))
    logger.on_trial_complete(0, [trial], trial)
    with Path(trial.local_path, "progress.csv").open(newline="") as file:
        (row,) = csv.DictReader(file, strict=True)
    assert {name: float(row[name]) for name in numbers} == {
        "loss": -0.5,
        "text": -0.0015,
        "more": 7.0,
        "least": -1e20,
    }


@given(st.lists(st.text(st.sampled_from("'=+-@a1\t"), max_size=5), min_size=1, max_size=5))
def test_s13_restored_trial_finds_columns_with_odd_names(names):
    line = row_of(names)
    assert columns_of(line) == names
    (cells,) = csv.reader(io.StringIO(line.decode()))
    assert not [cell for cell in cells if cell[:1] in {"=", "@"}]


def test_s13_commands_print_foreign_text_only_escaped():
    """Commands print a farm's answers with these functions only, never directly."""
    folder = Path(sys.modules[experiment_commands.__name__].__file__).parent
    tools = ("experiment_commands.py", "nodes_command.py", "shared_arguments.py", "run_command.py")
    farm = ("scheduler_service.py", "service/request_server.py")
    files = [folder / name for name in tools]
    files += [folder.parent / "farm" / name for name in farm]
    for file in files:
        for line in file.read_text().splitlines():
            if "stdout.write" in line or "stderr.write" in line:
                assert "harmless" in line or "Permanently remove the results" in line, line


@pytest.mark.parametrize("steering", STEERING)
def test_service_tells_of_foreign_text_without_control_characters(
    capfd: pytest.CaptureFixture[str], steering: str
) -> None:
    tell(f"tunemq worker: the store says {steering}")
    told = capfd.readouterr().err
    assert told == f"tunemq worker: the store says {harmless(steering)}\n"
    assert harmless(steering) != steering


@pytest.mark.parametrize("steering", STEERING)
def test_submit_that_follows_a_search_shows_its_output_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, steering: str
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)

    def follow(*_args: object, show: Callable[[bytes], None], **_more: object) -> a.LogPage:
        show(steering.encode(errors="surrogatepass"))
        state = a.ExperimentState.FINISHED
        return a.LogPage(data=b"", offset=0, end=0, size=0, is_over=True, state=state)

    monkeypatch.setattr(log_following, "follow", follow)
    submitted = a.ExperimentSubmitted(name="s", id="1")
    assert submit_command._attached(FarmClient.__new__(FarmClient), submitted, is_json=False) == 0
    assert terminal.getvalue() == harmless_output(steering)
