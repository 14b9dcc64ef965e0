"""A launcher like torchrun, without torch: two ranks that resist ending add up their numbers.

``launcher.py MEMBERS``: each process appends its pid to the file MEMBERS. Each rank has a clean
environment, a separate session and process group, and no parent. It ignores the signals that ask it
to end. The ranks talk through a socket and never end. The launcher prints their sum, and waits.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def note(members: str) -> None:
    with open(members, "ab", buffering=0) as file:
        file.write(b"%d\n" % os.getpid())


def rank(number: int, members: str, port: int) -> None:
    """Leave the parent, add up, and wait for ever."""
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    note(members)
    if number == 0:
        server = socket.create_server(("127.0.0.1", 0))
        print(server.getsockname()[1], flush=True)
        other, _ = server.accept()
        print(7 + int(other.recv(20)), flush=True)
    else:
        other = socket.create_connection(("127.0.0.1", port))
        other.send(b"35")
    while True:
        signal.pause()


def start(number: int, members: str, port: int = 0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", __file__, members, str(number), str(port)]
    return subprocess.Popen(command, env={}, start_new_session=True, stdout=subprocess.PIPE)


def main() -> None:
    members, *more = sys.argv[1:]
    if more:
        rank(int(more[0]), members, int(more[1]))
    note(members)
    first = start(0, members)
    assert first.stdout is not None
    start(1, members, int(first.stdout.readline()))
    print(int(first.stdout.readline()), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
