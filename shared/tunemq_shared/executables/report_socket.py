"""The socket between ``tunemq report`` and the trial: one line of JSON each way."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Any, Final, Self

from tunemq_shared.base.decoding_errors import NO_JSON
from tunemq_shared.base.errors import MetricError

#: The environment variable with the socket's path.
VARIABLE: Final = "TUNEMQ_REPORT"

_LONGEST: Final = 32 << 20
_READ_S: Final = 5.0


def listen(path: str) -> socket.socket:
    """Listen on a socket at ``path``, however long the path is.

    Raises:
        OSError: The file system has no sockets.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        listener.listen(64)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener


class ReportCall:
    """One call of ``tunemq report``, which waits for `answer`."""

    def __init__(self, line: socket.socket, metrics: dict[str, Any], checkpoint: str) -> None:
        self._line = line
        self.metrics = metrics
        #: The folder that it named; empty if none.
        self.checkpoint = checkpoint

    @classmethod
    def read(cls, line: socket.socket) -> Self | None:
        """Read a call from ``line``; None if the caller disconnected before it was complete.

        Raises:
            MetricError: It is not a message of `report_command`.
        """
        line.settimeout(_READ_S)
        said = bytearray()
        with suppress(OSError):
            while not said.endswith(b"\n") and len(said) < _LONGEST:
                piece = line.recv(65536)
                if not piece:
                    break
                said += piece
        if not said.endswith(b"\n"):
            line.close()
            return None
        try:
            message = json.loads(said)
            return cls(line, dict(message["metrics"]), str(message["checkpoint"]))
        except (*NO_JSON, TypeError, KeyError) as error:
            line.close()
            raise MetricError(
                f"what was sent to ${VARIABLE} cannot be read ({error!r}); send it with `tunemq "
                "report`."
            ) from error

    def answer(self, problem: str = "") -> None:
        """Let the caller continue; ``problem`` says why its report was rejected, if it was."""
        with suppress(OSError):  # the caller may have been killed
            self._line.sendall(json.dumps({"problem": problem}).encode() + b"\n")
        self.close()

    def close(self) -> None:
        """Disconnect without an answer: the trial has ended."""
        self._line.close()
