"""`ExperimentForkservers`: one forkserver for each interpreter and environment of experiments.

A program gets its environment when it starts: setting a variable later does not change its meaning
for the interpreter, the dynamic loader or a library that is already loaded.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tunemq_scheduler.farm.ipc.forkserver_process import ForkserverProcess
from tunemq_scheduler.farm.ipc.watched_process import ExperimentProcess
from tunemq_shared.base.errors import ConfigError

#: How long an unused forkserver is kept; an experiment whose process died returns sooner.
_UNUSED_S: Final = 60.0


class ExperimentForkservers:
    """Starts experiments' processes.

    A thread that lives as long as the supervisor must use it; see `ForkserverProcess`.

    Args:
        store: the farm's store, whose client the forkservers load.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._servers: list[ForkserverProcess] = []

    def prepare(self) -> None:
        """Start the usual forkserver, so that the first experiment does not wait for it.

        Raises:
            ConfigError: it cannot be started; says why.
        """
        self._server(sys.executable, {})

    def start(
        self,
        folder: Path,
        sock: socket.socket,
        *,
        python: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> ExperimentProcess:
        """Start an experiment's process.

        Args:
            folder: for its output.
            sock: its end of the connection; closed here.
            python: the interpreter; empty for this one.
            variables: for its environment.

        Raises:
            ConfigError: it cannot be started; says why.
        """
        with sock:
            server = self._server(python or sys.executable, variables)
            try:
                return ExperimentProcess(server, folder, sock)
            except OSError as error:
                raise ConfigError(
                    f"the experiment's process cannot be started: {error}."
                ) from error

    def close_unused(self) -> None:
        """End forkservers that are not needed, and forget ended ones; called once a second."""
        now = time.monotonic()
        for server in [one for one in self._servers if not one.uses]:
            is_usual = server.python == sys.executable and not server.variables
            if server.has_ended:
                self._servers.remove(server)
                server.close()
            elif not is_usual and now >= server.unused_since + _UNUSED_S:
                server.kill("is not needed")

    def close(self) -> None:
        """End all forkservers, and with them their experiments."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def _server(self, python: str, variables: Mapping[str, str]) -> ForkserverProcess:
        for server in self._servers:
            if server.python == python and server.variables == variables and server.is_alive:
                return server
        try:
            server = ForkserverProcess(python, variables, self._store)
        except (OSError, ValueError) as error:  # a variable with "=" in its name, or a NUL
            raise ConfigError(
                f"the experiment's process cannot be started with {python}: {error}."
            ) from error
        self._servers.append(server)
        return server
