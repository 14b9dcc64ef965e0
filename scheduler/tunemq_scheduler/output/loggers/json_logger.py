"""`JsonLoggerCallback`: writes each trial's ``params.json``, ``params.pkl``, ``result.json``."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from tunemq_scheduler.output.loggers.appended_files import AppendedFile, AppendedFiles
from tunemq_scheduler.output.loggers.logger import LoggerCallback
from tunemq_scheduler.output.pending_fsyncs import UnsyncedFiles
from tunemq_scheduler.results.json_encoding import result_to_json, to_json
from tunemq_scheduler.storage.folders import (
    PARAMS_JSON,
    PARAMS_PICKLE,
    RESULT_JSON,
    make_trial_folder,
    write_file,
)
from tunemq_shared.base.failure_text import one_line

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_view import TrialView


_log = logging.getLogger(__name__)


class _Log:
    """One running trial's file, and its configuration as JSON."""

    __slots__ = ("config", "encoded", "file", "nulls")

    def __init__(self, path: str) -> None:
        self.file = AppendedFile(path)
        self.config: Any = None
        self.encoded = msgspec.Raw(b"null")
        self.nulls = 1

    def take(self, config: Any) -> None:
        self.config = config
        encoded = to_json(config)
        self.encoded = msgspec.Raw(encoded)
        self.nulls = encoded.count(b"null")


class JsonLoggerCallback(LoggerCallback):
    """Write each result as one line of JSON, and the configuration as JSON and as a pickle.

    Values that JSON cannot represent are written as their ``repr``; NaN and infinities as ``NaN``,
    ``Infinity`` and ``-Infinity``, which Python's ``json`` reads. A trial that continues after a
    restart appends to its file.

    Args:
        unsynced: records which files are written.

    Raises:
        StoreError: a file cannot be written.
    """

    def __init__(self, unsynced: UnsyncedFiles | None = None) -> None:
        self._unsynced = UnsyncedFiles() if unsynced is None else unsynced
        self._files = AppendedFiles(self._unsynced)
        self._logs: dict[str, _Log] = {}

    def log_trial_start(self, trial: TrialView) -> None:
        """Write the configuration; for a retry only if it changed."""
        log = self._logs.get(trial.trial_id)
        if log is None:
            self._begin(trial)
        elif to_json(trial.config) != log.encoded:  # users' values may not be comparable
            log.take(trial.config)
            self._write_params(trial, log)

    def log_trial_result(self, iteration: int, trial: TrialView, result: dict[str, Any]) -> None:
        """Append the result."""
        del iteration
        log = self._logs.get(trial.trial_id)
        if log is None:
            log = self._begin(trial)
        config = result.get("config")
        if config is not log.config:
            log.take(config)
        self._files.append(log.file, result_to_json(result, log.encoded, log.nulls))

    def log_trial_end(self, trial: TrialView, failed: bool = False) -> None:
        """Write buffered results and close the file."""
        del failed
        log = self._logs.pop(trial.trial_id, None)
        if log is not None:
            self._files.close(log.file)

    def flush(self) -> None:
        """Write buffered results."""
        self._files.flush()

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        """Write buffered results and close all files."""
        del trials, info
        self._files.close_all()
        self._logs.clear()

    def _begin(self, trial: TrialView) -> _Log:
        make_trial_folder(trial.local_path)
        log = self._logs[trial.trial_id] = _Log(os.path.join(trial.local_path, RESULT_JSON))
        log.take(trial.config)
        self._write_params(trial, log)
        return log

    def _write_params(self, trial: TrialView, log: _Log) -> None:
        for name in (PARAMS_JSON, PARAMS_PICKLE):
            self._unsynced.note(os.path.join(trial.local_path, name))
        write_params(trial.local_path, trial.trial_id, trial.config, bytes(log.encoded))


def write_params(folder: str, trial: str, config: Any, encoded: bytes) -> None:
    """Write a trial's configuration, as JSON and as a pickle.

    Raises:
        StoreError: a file cannot be written.
    """
    import cloudpickle  # not needed to read results

    text = json.dumps(json.loads(encoded), indent=2, sort_keys=True)
    write_file(os.path.join(folder, PARAMS_JSON), text.encode())
    try:
        pickled = cloudpickle.dumps(config)
    except Exception as error:  # noqa: BLE001  objects raise what they like; recorded here
        reason = one_line(error)
        _log.warning("%s of trial %s is not written: %s", PARAMS_PICKLE, trial, reason)
        return
    write_file(os.path.join(folder, PARAMS_PICKLE), pickled)
