"""Readers of the files that a farm's scheduler writes for itself, with its journals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tests.fuzz.decoder import Bench, Decoder, of_type, samples_of
from tests.unit.scheduler.journals import TURNS, begun
from tunemq_scheduler.api.farm_answer_types import ExperimentDetail
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.core import runner_snapshot, runner_state
from tunemq_scheduler.core.handlers import experiment_resumed
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.experiment import code_package
from tunemq_scheduler.farm.common.last_reports import RunDetails
from tunemq_scheduler.farm.farm_settings import read_settings
from tunemq_scheduler.farm.output.event_stream_registry import EventStreams
from tunemq_scheduler.farm.output.trial_output_files import TrialOutputFiles
from tunemq_scheduler.farm.service import farm_nodes
from tunemq_scheduler.farm.service.done_requests import DoneRequests
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.farm.service.queue_entry import QueueEntry
from tunemq_scheduler.journal import ended_trials, journal_headers, journal_reader
from tunemq_scheduler.output.callback_states import STATES_FILE, CallbackStates
from tunemq_scheduler.results.callback import Callback
from tunemq_scheduler.search import algorithm_states
from tunemq_scheduler.settings import saved_tuner
from tunemq_scheduler.storage import last_run
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import (
    ConfigError,
    JournalError,
)
from tunemq_shared.code.blob_folder import BlobFolder
from tunemq_shared.protocol import messages

_JSON = (b'{"a": 1, "b": [1.5, null], "c": {"d": "e"}}', b'{"state": {"n": 3}}')
_HASH = "0" * 64


def of_scheduler(bench: Bench) -> list[Decoder]:
    """Files of a farm's scheduler."""
    queue = bench.folder / "queue"
    return [
        *_of_journal(bench),
        Decoder(
            "snapshot's state",
            lambda data: runner_snapshot.restore(_runner(), data, {}),
            (JournalError,),
            (runner_snapshot.dump(_runner()),),
            tuple(
                f"tunemq_scheduler.core.runner_snapshot:{name}"
                for name in ("_decode", "_read", "_version_of")
            ),
        ),
        of_type(
            "tunemq_scheduler.core.handlers.experiment_resumed:_decode_settings",
            experiment_resumed._decode_settings,
            RunnerSettings,
        ),
        of_type(
            "tunemq_scheduler.core.runner_state:_unpack_summary",
            runner_state._unpack_summary,
            runner_state.TrialSummary,
        ),
        of_type("tunemq_shared.protocol.messages:decode_records", messages.decode_records,
                list[messages.JournalRecord]),
        Decoder(
            "done requests",
            lambda data: DoneRequests(bench.written("done", data)),
            (JournalError,),
            (_done(bench),),
            ("tunemq_scheduler.farm.service.done_requests:DoneRequests._read",),
        ),
        Decoder(
            "known output",
            lambda data: TrialOutputFiles(
                bench.written("output/.output-known", data).parent, "events", lambda *_: None
            ),
            (),
            (b'[["t",1,"stdout"],[1,5]]\n',),
            ("tunemq_scheduler.farm.output.trial_output_files:TrialOutputFiles._kept_known",),
        ),
        Decoder(
            "details",
            lambda data: (
 bench.written("details/one", data), RunDetails(bench.folder / "details"))[1]
            .read("one"),
            (),
            samples_of(ExperimentDetail),
            ("tunemq_scheduler.farm.common.last_reports:RunDetails.read",),
        ),
        Decoder(
            "nodes' states",
            lambda data: farm_nodes._read(bench.written("nodes", data)),
            (JournalError,),
            (b'{"one": "drain"}',),
            ("tunemq_scheduler.farm.service.farm_nodes:_read",),
        ),
        Decoder(
            "queue",
            lambda data: _read_queue(queue, data),
            (JournalError,),
            samples_of(QueueEntry, as_json=True),
            ("tunemq_scheduler.farm.service.experiment_queue:ExperimentQueue._read",),
        ),
        Decoder(
            "run record",
            lambda data: last_run._decoded(data, "it"),
            (JournalError,),
            (*samples_of(last_run.RunRecord, as_json=True), _a_run_record()),
            ("tunemq_scheduler.storage.last_run:_decoded",),
        ),
        Decoder(
            "trainable of the first run",
            lambda data: code_package._of_first_run(
                BlobFolder(bench.written(f"b/{code_package._FIRST}", data).parent)
            ),
            (),
            samples_of(messages.BlobRef, as_json=True),
            ("tunemq_scheduler.experiment.code_package:_of_first_run",),
        ),
        Decoder(
            "farm settings",
            lambda data: read_settings(str(bench.written("farm.toml", data))),
            (ConfigError,),
            (b"max_running = 3\n[shares]\nada = 2\n[quotas.ben]\ngpu = 4\n",),
            ("tunemq_scheduler.farm.farm_settings:read_settings",),
        ),
        Decoder(
            "streams",
            lambda data: EventStreams(bench.written("streams", data)),
            (JournalError,),
            (b'{"search": "tunemq:events:1"}',),
            ("tunemq_scheduler.farm.output.event_stream_registry:EventStreams.__init__",),
        ),
        Decoder(
            "callbacks' states",
            lambda data: _take_back(bench, data),
            (ConfigError,),
            (b'{"0/_Kept": {"a": 1}}', *_JSON),
            ("tunemq_scheduler.output.callback_states:CallbackStates.take_back",),
        ),
        Decoder(
            "saved tuner",
            lambda data: _read_tuner(bench, data),
            (ConfigError,),
            _tuners(),
            ("tunemq_scheduler.settings.saved_tuner:read_tuner",),
        ),
        Decoder(
            "algorithm's state",
            algorithm_states.unpack_state,
            (ValueError, RecursionError),
            _JSON,
            ("tunemq_scheduler.search.algorithm_states:unpack_state",),
        ),
    ]  # fmt: skip


def _of_journal(bench: Bench) -> Iterator[Decoder]:
    whole = bench.folder / "journal"
    begun(whole, TURNS)
    names = sorted(path.name for path in whole.iterdir() if path.name != "lock")
    for name in names:
        good = (whole / name).read_bytes()
        yield Decoder(
            f"journal's {name}",
            lambda data, name=name, good=good: _recovered(whole, name, data, good),  # type: ignore[misc]
            (JournalError,),
            (good,),
            ("tunemq_scheduler.journal.journal_frames:frame_at",),
        )
    yield Decoder(
        "payload of a snapshot",
        lambda data: journal_headers.readable(data, journal_reader._decode_snapshot, whole),
        (JournalError,),
        samples_of(journal_headers.JournalSnapshot),
        ("tunemq_scheduler.journal.journal_reader:_decode_snapshot",),
    )
    yield Decoder(
        "payload of a history",
        lambda data: journal_headers.readable(data, ended_trials._decode, whole),
        (JournalError,),
        samples_of(list[ended_trials.FinishedTrial]),
        ("tunemq_scheduler.journal.ended_trials:_decode",),
    )
    for kind in (
        journal_headers.SegmentHeader,
        journal_headers.SnapshotHeader,
        journal_headers.HistoryHeader,
    ):
        yield Decoder(
            f"header {kind.__name__}",
            lambda data, kind=kind: journal_headers.decode_header(data, kind, whole),  # type: ignore[misc]
            (JournalError,),
            tuple(map(_of_this_version, samples_of(kind))),
            (
                "tunemq_scheduler.journal.journal_headers:decode_header",
                "tunemq_scheduler.journal.journal_headers:_decode_any_header",
            ),
        )
    yield Decoder(
        "turn of a journal",
        lambda data: journal_headers.readable(data, messages.decode_records, whole),
        (JournalError,),
        tuple(messages.encode(turn) for turn in TURNS),
        (),
    )


def _recovered(folder: Path, name: str, data: bytes, good: bytes) -> object:
    """Recover a journal in which one file has this content."""
    (folder / name).write_bytes(data)
    try:
        return list(journal_reader.recover(folder).turns)
    finally:
        (folder / name).write_bytes(good)


def _of_this_version(header: bytes) -> bytes:
    fields = msgspec.msgpack.decode(header)
    return msgspec.msgpack.encode(
        {
            **fields,
            "version": journal_headers.JOURNAL_VERSION,
            "protocol": messages.PROTOCOL_VERSION,
        }
    )


# --- the farm's files -----------------------------------------------------------------------------

_TUNER = saved_tuner.TUNER_FILE


def _runner() -> Any:
    return runner_state.RunnerState(RunnerSettings())


def _done(bench: Bench) -> bytes:
    path = bench.folder / "done-before"
    done = DoneRequests(path)
    done.add("0" * 32, b"answer")
    done.add("1" * 32, b"")
    return path.read_bytes()


def _read_queue(folder: Path, data: bytes) -> object:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        name = msgspec.json.decode(data)["name"]
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    except (*UNDECODABLE, TypeError, KeyError, OSError, ValueError):
        (folder / "one.json").parent.mkdir(parents=True, exist_ok=True)
        (folder / "one.json").write_bytes(data)
    return ExperimentQueue(folder)


class _Kept(Callback):
    """Has a state that is taken, whatever it is."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


def _take_back(bench: Bench, data: bytes) -> None:
    folder = bench.written(f"callbacks/{STATES_FILE}", data).parent
    CallbackStates(str(folder), [_Kept()]).take_back()


def _read_tuner(bench: Bench, data: bytes) -> None:
    """Read it as it is, and as one whose checksum fits."""
    with suppress(ConfigError):
        saved_tuner.read_tuner(str(bench.written(f"t/{_TUNER}", data).parent))
    content = saved_tuner.with_sum(data[: -saved_tuner._SUM_BYTES])
    saved_tuner.read_tuner(str(bench.written(f"t/{_TUNER}", content).parent))


def _tuners() -> tuple[bytes, ...]:
    ours = {"version": saved_tuner._VERSION, **saved_tuner._versions()}
    found = [msgspec.msgpack.decode(one) for one in samples_of(saved_tuner.SavedTuner)]
    return tuple(saved_tuner.with_sum(msgspec.msgpack.encode({**one, **ours})) for one in found)


def _a_run_record() -> bytes:
    holder = LeaseHolder.this_process()
    return msgspec.json.encode(last_run.RunRecord(holder=holder, term=1, run=1, is_warm=True))
