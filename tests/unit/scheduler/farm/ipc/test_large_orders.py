"""A turn's orders reach the supervisor also if all of them together are too long for one frame."""

from __future__ import annotations

import socket
import threading

from tests.support.searches.plans import PLAN
from tunemq_scheduler.core.commands import StartTrial
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_side import SupervisorConnection
from tunemq_scheduler.farm.ipc.nonblocking_frames import FrameSocket
from tunemq_scheduler.farm.ipc.relayed_executor import RelayedExecutor
from tunemq_shared.protocol.message_limits import START_BYTES
from tunemq_shared.protocol.result_conditions import TO_THE_END


def test_large_starts_of_a_turn_are_sent_in_several_frames():
    ours, theirs = socket.socketpair()
    line, supervisor = SupervisorConnection(ours), FrameSocket(theirs)
    theirs.setblocking(True)
    found: list[str] = []

    def receive() -> None:
        while not supervisor.is_at_end:
            for said in map(r.decode_for_supervisor, supervisor.receive()):
                if isinstance(said, r.TurnOrders):
                    found.extend(one.order.trial for one in said.orders)

    receiving = threading.Thread(target=receive)
    receiving.start()
    executor = RelayedExecutor(line)
    executor.open(PLAN)
    executor.reattach((), (), {})
    config, names = bytes(START_BYTES - 1000), [f"t{number}" for number in range(20)]
    try:
        executor.perform(
            [StartTrial(t, 1, "n", 0, config, {"cpu": 1.0}, TO_THE_END, 0, ()) for t in names]
        )
    finally:
        line.close()
        receiving.join()
        supervisor.close()
    assert found == names
