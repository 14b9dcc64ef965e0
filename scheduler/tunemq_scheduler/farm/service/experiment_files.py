"""`ResultsFolders`: finds logs in experiments' folders, explains trials, deletes the folders."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import msgspec

from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.farm.common.small_files import make_folder
from tunemq_scheduler.farm.ipc.experiment_processes import ERRORS, FARM_KEYS, OUTPUT
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_headers import JournalHeader
from tunemq_scheduler.journal.journal_reader import read_header
from tunemq_scheduler.storage.last_run import RECORD_KEY, stored_record
from tunemq_shared.base.errors import ConfigError, JournalError, RequestRejected, StoreError
from tunemq_shared.base.failure_text import one_line, shortened
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects.store_address import is_remote, join, without_settings
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS
from tunemq_shared.signing.key_files import journal_signer
from tunemq_shared.system.folder_trees import remove_tree

#: How many journals are read at once for explanations, and for how long each may take.
_MOST_EXPLANATIONS: Final = 4
_EXPLAINED_WITHIN_S: Final = 60.0

_decode: Final = msgspec.json.Decoder(a.Explanation).decode


class ResultsFolders:
    """Finds logs at once, and deletes folders in a thread because they may be large.

    Args:
        results: the folder of all experiments.
        trash: where folders wait for deletion; leftovers of an earlier process are deleted, too.
        store: the farm's store.
    """

    def __init__(self, results: Path, trash: Path, store: str) -> None:
        self._results, self._trash, self._store = results, trash, store
        self._explaining = threading.BoundedSemaphore(_MOST_EXPLANATIONS)
        make_folder(trash)
        for left in trash.iterdir():
            _start(remove_tree, left)

    def log(self, name: str, trial: str) -> Path | None:
        """Return the path of an experiment's log, or of a trial's; None if there is none yet.

        Raises:
            ConfigError: the experiment has no such trial.
        """
        folder = self._results / name
        path = folder / OUTPUT
        if trial:
            found = next((one for one in _folders(folder) if trial in _names_of(one)), None)
            if found is None:
                raise ConfigError(f"experiment {name} has no trial {trial}.")
            path = found / "stdout"
        return path if path.exists() else None

    def explain(self, name: str, trial: str) -> Future[a.Explanation] | None:
        """Begin to explain a trial by the experiment's journal; None if there is no journal.

        A process without the farm's keys reads it, because it may be long.

        Raises:
            ConfigError: there can be no such trial.
            RequestRejected: too many explanations are on their way.
        """
        folder = self._results.absolute() / name
        if not (folder / FILE_NAME).exists():
            return None
        if trial.startswith("-"):  # an option of the command
            raise ConfigError(f"experiment {name} has no trial {trial}.")
        if not self._explaining.acquire(blocking=False):
            raise RequestRejected("the scheduler reads other journals now; repeat the command.")
        told: Future[a.Explanation] = Future()
        told.add_done_callback(lambda _told: self._explaining.release())
        _start(_explain, folder, trial, told)
        return told

    def free_name(self, name: str) -> None:
        """Remove the folder of an experiment that never began, which would block its name.

        It has only the output of the start that failed.
        """
        folder = self._results / name
        if not (folder / FILE_NAME).exists():
            with contextlib.suppress(OSError):  # it has other files
                for file in (OUTPUT, ERRORS):
                    (folder / file).unlink(missing_ok=True)
                folder.rmdir()

    def remove(self, name: str, entry_id: str) -> Future[str]:
        """Delete an experiment's results at once, and begin to delete what the store has of it.

        The farm's store may have another experiment of this name: one that this farm never ran, or
        that another farm took over. It stays.

        Args:
            name: the experiment's name.
            entry_id: the beginning of its id, unless it was taken over from a store.

        Returns:
            Done when the store has nothing of it, or with the reason why it has; the result is its
            place in an object store, or empty.

        Raises:
            ConfigError: its folder cannot be moved.
        """
        place = self._trash / f"{name}-{os.urandom(4).hex()}"
        header = _header(self._results / name)
        experiment_id = entry_id if header is None else header.experiment_id
        try:
            (self._results / name).rename(place)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(
                f"{self._results / name} cannot be removed: {error.strerror}."
            ) from error
        _start(remove_tree, place)
        done: Future[str] = Future()
        stored = join(self._store, name) if is_remote(self._store) else ""
        if header is not None and header.store not in {"", stored}:
            place_of = without_settings(header.store)
            done.set_exception(StoreError(f"{place_of} is not the farm's store: remove it there"))
        elif stored:
            _start(_delete_stored, stored, experiment_id, done)
        else:
            done.set_result("")
        return done


def _start(target: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, name="results", daemon=True).start()


def _explain(folder: Path, trial: str, told: Future[a.Explanation]) -> None:
    """Run ``tunemq why`` on a folder."""
    command = [sys.executable, "-P", "-m", "tunemq", "why", "--json", f"{folder}/", trial]
    environment = {name: text for name, text in os.environ.items() if name not in FARM_KEYS}
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=_EXPLAINED_WITHIN_S,
        )
        if done.returncode:
            problem = done.stderr.decode(errors="replace").strip().removeprefix("tunemq: ")
            raise ConfigError(shortened(problem, LINE_CHARACTERS))
        told.set_result(_decode(done.stdout))
    except ConfigError as error:
        told.set_exception(error)
    except Exception as error:  # noqa: BLE001  told to the person who asked for it
        told.set_exception(RequestRejected(f"{folder} cannot be read: {one_line(error)}."))


def _header(folder: Path) -> JournalHeader | None:
    try:
        return read_header(folder / FILE_NAME)
    except JournalError:
        return None


def _delete_stored(address: str, experiment_id: str, done: Future[str]) -> None:
    try:
        with open_objects(address) as objects:
            record = stored_record(objects, journal_signer())
            if record is not None and not record.experiment_id.startswith(experiment_id):
                raise StoreError(f"it belongs to another experiment, which {record.holder} ran")
            keys = [one.key for one in objects.list()]
            # Other searches may have places below this one's.
            others = {
                key.removesuffix(RECORD_KEY) for key in keys if key.endswith(f"/{RECORD_KEY}")
            }
            ours = [key for key in keys if not key.startswith(tuple(others))]
            # The record goes last, so that a removal that is cut off can be repeated.
            objects.delete([key for key in ours if key != RECORD_KEY])
            objects.delete([RECORD_KEY])
    except Exception as error:  # noqa: BLE001  told to the person who asked for it
        done.set_exception(StoreError(f"{without_settings(address)} is not removed: {error}"))
    else:
        done.set_result(without_settings(address))


def _folders(folder: Path) -> Iterator[Path]:
    try:
        return (Path(one.path) for one in os.scandir(folder) if one.is_dir(follow_symlinks=False))
    except OSError:
        return iter(())


def _names_of(folder: Path) -> tuple[str, str]:
    """Return the name and the id of a folder's trial."""
    return folder.name, "_".join(folder.name.split("_")[-2:])
