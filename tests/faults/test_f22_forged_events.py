"""F22: trials whose processes break their clocks, or send forged events to their nodes.

Each of them ends in ERROR with a reason that names the field; all other trials are correct.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

import tunemq as tune
from tests.support.journal_records import read_records
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of
from tunemq.schedulers import ASHAScheduler
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_frames import JournalFrames, pack
from tunemq_shared.protocol import messages as m

__all__ = ["ended_searches"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


def line():
    """Return the trial's channel to its node, and the trial's name there."""
    from tunemq_shared.trial.session import current

    session = current()
    return session._channel._sock, session.trial, session.attempt


def sends(*frames):
    """Write frames of (kind, value as msgpack) to the node, and wait for the end."""
    import time

    from tunemq_workers.runtime.frames import frame

    written = [
        frame(ord(kind), value if isinstance(value, bytes) else msgspec.msgpack.encode(value))
        for kind, value in frames
    ]
    line()[0].sendall(b"".join(written))
    time.sleep(600)


def a_result(**changes):
    """Return the frame of a second report, with changed fields."""
    _, trial, attempt = line()
    whole = m.ResultReported(trial, attempt, 2, {"x": 2}, time.time(), 0.1, 0.2, 0.2, 2)
    return ["result", *(msgspec.structs.asdict(whole) | changes).values()]


def reports_with_a_clock_of(clock):
    time.time = clock
    tune.report({"x": 2})


def takes_nanoseconds():
    reports_with_a_clock_of(time.time_ns)


def takes_2_to_the_63():
    reports_with_a_clock_of(lambda: 2**63)


def takes_no_number():
    reports_with_a_clock_of(lambda: float("nan"))


def goes_back_before_1970():
    reports_with_a_clock_of(lambda: -1.0)


def takes_a_text():
    reports_with_a_clock_of(lambda: "noon")


def takes_bytes():
    reports_with_a_clock_of(lambda: b"noon")


def runs_backwards():
    now = iter([100.0, 0.0, -100.0, -200.0] * 100)
    time.monotonic = lambda: next(now)
    tune.report({"x": 2})
    tune.report({"x": 3})


def reports_bytes():
    sends(("E", a_result(metrics={"x": b"bytes"})))


def nests_deeply():
    whole = msgspec.msgpack.encode(a_result(metrics={"x": 1}))
    sends(("E", whole.replace(b"\xa1x\x01", b"\xa1x" + b"\x91" * 50_000 + b"\x01")))


def takes_a_huge_step():
    sends(("E", a_result(step=2**64 - 1)))


def repeats_a_step():
    sends(("E", a_result(step=1)))


def leaves_steps_out():
    sends(("E", a_result(step=200)))


def speaks_for_another_trial():
    sends(("E", a_result(trial="another")))


def speaks_for_another_attempt():
    sends(("E", a_result(attempt=2)))


def frees_its_slot():
    _, trial, attempt = line()
    sends(("E", ["freed", trial, attempt]))


def loses_the_node():
    sends(("E", ["lost", "node", "because", True]))


def sends_a_huge_text():
    _, trial, attempt = line()
    sends(("F", ["failed", trial, attempt, "user", "x" * 3 * 2**19, "", time.time()]))


def keeps_what_is_not_its_own():
    _, trial, attempt = line()
    key, sha256 = "other/checkpoint_1-000001", "0" * 64
    sends(("E", ["checkpoint", trial, attempt, 1, 1, key, sha256, 1]))


def keeps_what_has_no_hash():
    _, trial, attempt = line()
    sends(("E", ["checkpoint", trial, attempt, 1, 1, "of/checkpoint_1-000001", "\0", 1]))


def sends_noise():
    sends(("E", b"\xc1\xff" * 100))


def says_that_it_is_free():
    sends(("I", b""))


def sends_an_endless_frame():
    line()[0].sendall(b"\xff" * 100)
    time.sleep(600)


def says_that_it_is_paused():
    _, trial, attempt = line()
    sends(("F", ["paused", trial, attempt]))


#: What a trial does, and the field or the words in its error.
FORGED = {
    takes_nanoseconds: "'timestamp'",
    takes_2_to_the_63: "'timestamp'",
    takes_no_number: "'timestamp'",
    goes_back_before_1970: "'timestamp'",
    takes_a_text: "'at': Expected `float`, got `str`",
    takes_bytes: "'at': Expected `float`, got `bytes`",
    runs_backwards: "'time_this_iter_s'",
    reports_bytes: "'metrics'",
    nests_deeply: "recursion",
    takes_a_huge_step: "'step'",
    repeats_a_step: "step (training_iteration) 1, expected 2",
    leaves_steps_out: "step (training_iteration) 200, expected 2",
    speaks_for_another_trial: "names trial 'another'",
    speaks_for_another_attempt: "attempt 2",
    frees_its_slot: "'kind'",
    loses_the_node: "'kind'",
    sends_a_huge_text: "'error'",
    keeps_what_is_not_its_own: "has the key 'other/checkpoint_1-000001'",
    keeps_what_has_no_hash: "'sha256'",
    sends_noise: "cannot be read",
    says_that_it_is_free: "said that it is free",
    sends_an_endless_frame: "a frame of the trial's process cannot be read",
    says_that_it_is_paused: "was not told to pause",
}
STEPS = 30


def trains():
    for step in range(2, STEPS + 1):
        time.sleep(0.05)
        tune.report({"x": step})


def continues_after_its_end():
    _, trial, attempt = line()
    finished = ["finished", trial, attempt]
    sends(("F", finished), ("E", a_result()), ("F", finished), ("E", a_result(step=3)))


DEEDS = {deed.__name__: deed for deed in (*FORGED, continues_after_its_end, trains)}
NAMES = [*(deed.__name__ for deed in (*FORGED, continues_after_its_end)), *["trains"] * 3]


def train(config):
    tune.report({"x": 1})
    DEEDS[NAMES[config["number"]]]()


@pytest.fixture(scope="module")
def forged(tmp_path_factory):
    """A search of all these trials, and some that train."""
    folder = tmp_path_factory.mktemp("forged")
    before = os.environ.get("TUNEMQ_CPUS")
    os.environ["TUNEMQ_CPUS"] = "6"
    try:
        results = fit(
            train,
            {"number": tune.grid_search(list(range(len(NAMES))))},
            storage_path=str(folder),
            name="forged",
        )
    finally:
        del os.environ["TUNEMQ_CPUS"]
        if before is not None:
            os.environ["TUNEMQ_CPUS"] = before
    return folder / "forged", dict(enumerate(results))


@pytest.mark.parametrize("deed", FORGED, ids=lambda deed: deed.__name__)
def test_f22_a_trial_that_forges_an_event_ends_in_error_and_the_field_is_named(forged, deed):
    _, results = forged
    result = results[NAMES.index(deed.__name__)]
    assert result.status == "ERROR"
    assert "the node refused what the trial's process sent" in str(result.error)
    assert FORGED[deed] in str(result.error)
    assert [row["x"] for row in results_of(result)] == [1], "what came before it stands"


def test_f22_trials_beside_one_that_forges_events_have_right_results(forged):
    _, results = forged
    *_, late = [one for one in results.values() if one.status == "TERMINATED"]
    decent = [results[number] for number, name in enumerate(NAMES) if name == "trains"]
    assert late.trial_id == decent[-1].trial_id
    for result in decent:
        assert (result.status, result.error) == ("TERMINATED", None)
        assert [row["x"] for row in results_of(result)] == list(range(1, STEPS + 1))


def test_f22_events_that_a_trial_sends_after_its_end_are_ignored(forged):
    _, results = forged
    late = results[NAMES.index("continues_after_its_end")]
    assert (late.status, late.error) == ("TERMINATED", None)
    assert [row["x"] for row in results_of(late)] == [1]


def test_f22_no_node_is_lost_by_forged_events_and_the_search_can_be_restored(forged):
    folder, _ = forged
    events = [entry.event for entry in read_records(folder / FILE_NAME)]
    assert not any(isinstance(event, m.NodeLost) for event in events)
    assert sum(isinstance(event, m.NodeJoined) for event in events) == 1
    failures = [event for event in events if isinstance(event, m.TrialFailed)]
    assert len(failures) == len(FORGED)
    assert {failure.kind for failure in failures} == {"metric"}
    again = tune.Tuner.restore(str(folder), train).get_results()
    assert [result.status for result in again].count("ERROR") == len(FORGED)


def forges_a_derived_metric(config):
    tune.report({"mean_loss": 1.0})
    if config["metrics"]:
        sends(("E", a_result(metrics=config["metrics"])))
    tune.report({"mean_loss": 2.0})


@pytest.mark.parametrize(
    "metrics",
    [
        {"neg_mean_loss": "x", "mean_loss": 1.0},
        {"neg_mean_loss": {"a": 1}, "mean_loss": 1.0},
        {"mean_loss": math.nan},
    ],
)
def test_f22_a_trial_that_forges_a_derived_metric_ends_alone(tmp_path, metrics):
    forger, other = fit(
        forges_a_derived_metric,
        {"metrics": tune.grid_search([metrics, {}])},
        metric="neg_mean_loss",
        mode="max",
        scheduler=ASHAScheduler(max_t=2, grace_period=1),
        storage_path=str(tmp_path),
    )
    assert forger.status == "ERROR"
    assert "'neg_mean_loss'" in str(forger.error)
    assert (other.status, other.error) == ("TERMINATED", None)


def fails_once(config):
    for step in range(1, 6):
        tune.report({"x": step})
    if not os.path.exists(config["marker"]):
        with open(config["marker"], "w"):
            raise ValueError("once")


def saves_and_fails_once(config):
    saved, done = tune.get_checkpoint(), 0
    if saved is not None:
        with saved.as_directory() as folder:
            done = len(os.listdir(folder))
    for step in range(done + 1, 6):
        with tempfile.TemporaryDirectory() as folder:
            for number in range(step):
                Path(folder, f"{number}").touch()
            tune.report({"x": step}, checkpoint=tune.Checkpoint.from_directory(folder))
    if not os.path.exists(config["marker"]):
        with open(config["marker"], "w"):
            raise ValueError("once")


def restored(trainable, folder, change):
    """Return the only result of a search after a restore from a journal with changed events."""
    space = {"marker": str(folder / "marker")}
    fit(trainable, space, storage_path=str(folder), name="old")
    (turns,) = (folder / "old" / FILE_NAME).glob("*.turns")
    turns.write_bytes(b"".join(as_it_was(frame, change) for frame in JournalFrames(turns)))
    for file in (folder / "old").glob("*/result.json"):
        file.unlink()  # what the files lack is appended from the journal

    tuner = tune.Tuner.restore(str(folder / "old"), trainable, resume_errored=True)
    (result,) = tuner.fit()
    return result


@pytest.mark.parametrize("timestamp", [1.795e18, float("nan"), float("inf"), -1e300])
def test_f22_a_journal_that_holds_a_time_of_no_clock_can_be_restored(tmp_path, timestamp):
    def change(event):
        """As a version wrote it that trusted its trials' clocks."""
        if isinstance(event, m.ResultReported):
            return msgspec.structs.replace(event, timestamp=timestamp)
        if isinstance(event, m.TrialStarted | m.TrialFailed):
            return msgspec.structs.replace(event, at=timestamp)
        return event

    result = restored(fails_once, tmp_path, change)
    assert (result.status, result.error) == ("TERMINATED", None)
    assert [row["x"] for row in results_of(result)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("first", [1, 5])
def test_f22_a_journal_with_checkpoints_that_no_order_can_name_can_be_restored(tmp_path, first):
    def change(event):
        """As a version wrote it that trusted its trials' hashes."""
        is_forged = isinstance(event, m.CheckpointCommitted) and event.n >= first
        return msgspec.structs.replace(event, sha256="\0") if is_forged else event

    result = restored(saves_and_fails_once, tmp_path, change)
    assert (result.status, result.error) == ("TERMINATED", None)
    assert [row["x"] for row in results_of(result)] == [1, 2, 3, 4, 5]


def as_it_was(frame, change):
    """Return a frame of the journal with changed events."""
    try:
        entries = m.decode_records(frame.payload)
    except msgspec.DecodeError:
        return pack(frame.number, frame.payload)  # the header
    changed = [msgspec.structs.replace(entry, event=change(entry.event)) for entry in entries]
    return pack(frame.number, m.encode(changed))
