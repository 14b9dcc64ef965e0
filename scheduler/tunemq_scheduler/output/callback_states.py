"""Saves callbacks' states and restores them: `Callback.get_state` and `set_state`.

The states are JSON, in a file of the experiment's folder that is replaced atomically now and then,
and at the end. Events after the last save are not repeated to a callback.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Final

from tunemq_scheduler.base.plugin_calls import call_plugin
from tunemq_scheduler.results.callback import Callback
from tunemq_scheduler.storage.folders import replace_file
from tunemq_shared.base.decoding_errors import NO_JSON
from tunemq_shared.base.errors import ConfigError, StoreError

STATES_FILE: Final = "callbacks.json"
#: Seconds between two saves while a search runs.
EVERY_S: Final = 10.0

_log = logging.getLogger(__name__)


class CallbackStates:
    """Save and restore the states of a search's callbacks.

    Args:
        folder: the experiment's folder.
        callbacks: the user's callbacks, in order.
    """

    def __init__(self, folder: str, callbacks: Sequence[Callback]) -> None:
        self._path = os.path.join(folder, STATES_FILE)
        self._stateful = [
            (f"{place}/{type(one).__name__}", one)
            for place, one in enumerate(callbacks)
            if type(one).get_state is not Callback.get_state
        ]
        self._due = time.monotonic() + EVERY_S

    def take_back(self) -> None:
        """Restore each callback's state from an earlier run, before its `setup`.

        Raises:
            ConfigError: the file cannot be read.
            SearchFailed: a callback rejected its state.
        """
        if not self._stateful or not os.path.exists(self._path):
            return
        try:
            with open(self._path, "rb") as file:
                states = json.load(file)
        except (OSError, *NO_JSON) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}.") from error
        if not isinstance(states, dict):
            raise ConfigError(f"{self._path} cannot be read: it is not a table.")
        for name, callback in self._stateful:
            if name not in states:
                continue
            call_plugin(f"{name}.set_state", callback.set_state, states[name])

    def turn_ended(self) -> None:
        """Save the states if a save is due."""
        if self._stateful and time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Save the states; leave out one that is not JSON, and log that."""
        if not self._stateful:
            return
        self._due = time.monotonic() + EVERY_S
        states = {}
        for name, callback in self._stateful:
            try:
                states[name] = json.loads(json.dumps(callback.get_state()))
            except Exception as error:  # noqa: BLE001  plug-in boundary: told in the log, its state is not kept
                _log.warning("the state of callback %s is not kept: %s", name, error)
        kept = {name: state for name, state in states.items() if state is not None}
        try:
            replace_file(self._path, json.dumps(kept).encode())
        except StoreError as error:
            _log.warning("the states of callbacks are not kept: %s", error)
