"""A proxy for a Redis that reports another version, as tests have no such server.

python lying_redis.py ADDRESS TARGET_ADDRESS TARGET_PORT VERSION    # prints its port
"""

from __future__ import annotations

import socket
import sys
import threading
from typing import Final

#: By the length of the real version, since replies contain their length.
OLDER: Final = {5: "6.0.9", 6: "6.0.16"}
WITH_THE_CVE: Final = {5: "7.2.4", 6: "7.2.10"}


class LyingRedis:
    """Pass all data on, except that it replaces the version.

    Args:
        target: address and port of Redis.
        real: its version.
        said: the version to report, as long as the real one.
        address: to listen at, on any free port.
    """

    def __init__(
        self, target: tuple[str, int], real: str, said: str, address: str = "127.0.0.1"
    ) -> None:
        assert len(real) == len(said)
        self._target = target
        forms = "version:{}\r", f"version\r\n${len(real)}\r\n{{}}\r"  # in INFO, and in HELLO
        self._lies = [(form.format(real).encode(), form.format(said).encode()) for form in forms]
        self._sock = socket.create_server((address, 0))
        self.port: int = self._sock.getsockname()[1]
        self.url = f"redis://{address}:{self.port}/0"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        """Take connections until `close`."""
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:  # it has ended
                client.close()
                continue
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(2**20):
                for truth, lie in self._lies:
                    data = data.replace(truth, lie)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, sink):
                one.close()

    def close(self) -> None:
        """Take no more."""
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


if __name__ == "__main__":
    address, target, port, real, said = sys.argv[1:]
    lying = LyingRedis((target, int(port)), real, said, address)
    print(lying.port, flush=True)
    threading.Event().wait()
