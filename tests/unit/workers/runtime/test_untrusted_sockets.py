"""A process that runs users' code cannot block its node by descriptors that it sends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tunemq_workers.runtime import frames
from tunemq_workers.runtime.frame_connection import FrameConnection
from tunemq_workers.runtime.untrusted_sockets import socket_pair

#: Linux 6.16 and newer refuse descriptors for a socket that does not want them.
REFUSES_DESCRIPTORS = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 16)

#: Receive, and close unreceived, descriptors of sockets that linger; print how long that took.
LINGERS = """
import os, socket, struct, time
from tunemq_workers.runtime import untrusted_sockets
untrusted_sockets._SO_PASSRIGHTS = 2**20  # as a kernel that does not know it
ours, theirs = untrusted_sockets.socket_pair()
untrusted_sockets.interrupt_lingering()
server, kept = socket.create_server(("127.0.0.1", 0)), []
for _ in range(2):
    lingering = socket.create_connection(server.getsockname())
    lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 15))
    lingering.setblocking(False)
    try:
        while True:
            lingering.send(bytes(65536))
    except BlockingIOError:
        socket.send_fds(theirs, [b"x"], [lingering.fileno()])
        kept.append(lingering.detach())
for descriptor in kept:
    os.close(descriptor)
began = time.monotonic()
assert ours.recvmsg(1)[2] & socket.MSG_CTRUNC
ours.close()
print(time.monotonic() - began)
"""

#: End slowly, with the timer of a kernel that cannot refuse descriptors.
ENDS_SLOWLY = """
import time
from tunemq_workers.runtime import untrusted_sockets
untrusted_sockets._SO_PASSRIGHTS = 2**20
class Slow:
    def __del__(self, sleep=time.sleep, pause_s=3 * untrusted_sockets._INTERRUPT_S):
        sleep(pause_s)
slow = Slow()
untrusted_sockets.interrupt_lingering()
"""


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_descriptors_reach_only_the_other_process(kind):
    ours, theirs = socket_pair(kind)
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [0])
        _, (received,), _, _ = socket.recv_fds(theirs, 1, 1)
        os.close(received)
        if REFUSES_DESCRIPTORS:
            with pytest.raises(PermissionError):
                socket.send_fds(theirs, [b"x"], [0])
        theirs.send(b"y")
        assert ours.recv(10) == b"y"


def test_process_that_sends_descriptors_is_reported_and_its_line_closed():
    ours, theirs = socket.socketpair()
    said: list[object] = []
    connection = FrameConnection(
        SimpleNamespace(watch=lambda *_: None, unwatch=lambda *_: None),
        ours,
        on_other=lambda kind, payload: said.append((kind, payload)),
        on_end=lambda: said.append("end"),
    )
    with theirs:
        socket.send_fds(theirs, [frames.frame(frames.IDLE)], [0])
        connection.drain()
    assert said == [(frames.UNREADABLE, b"descriptors came with it (SCM_RIGHTS)."), "end"]


def test_descriptor_that_lingers_blocks_for_a_moment_only():
    ended = subprocess.run(
        [sys.executable, "-c", LINGERS], capture_output=True, text=True, timeout=100, check=True
    )
    assert float(ended.stdout) < 10


def test_interpreter_that_ends_slowly_is_not_killed_by_the_timer():
    ended = subprocess.run([sys.executable, "-c", ENDS_SLOWLY], check=False, timeout=100)
    assert ended.returncode == 0
