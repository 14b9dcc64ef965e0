"""The output of trials arrives through a real Redis, even if one experiment has problems."""

from __future__ import annotations

import pytest

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.waiting import eventually
from tunemq_scheduler.farm.output.trial_output_collector import OutputReader
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.output_chunks import OutputChunk, encode
from tunemq_shared.protocol.rejection_counter import RejectionCounter

__all__ = ["server"]

pytestmark = pytest.mark.integration


def test_one_bad_experiment_does_not_stop_the_others(server: RedisServer, tmp_path):
    (tmp_path / "file").write_text("no folder")
    notices = []
    rejected = RejectionCounter()
    (tmp_path / "good" / "train_a").mkdir(parents=True)
    reader = OutputReader(server.url, notices.append, SchedulerSigning().output, rejected.add)
    names = ("file", "stream", "good")
    reader.follow({name: (tmp_path / name, name) for name in names})
    chunk = b"\0" + encode(OutputChunk("a", 1, "train_a", "stdout", 0, b"one\n"))
    server.client.xadd(redis_keys.output("file"), {"o": chunk})
    server.client.set(redis_keys.output("stream"), "no stream")
    server.client.xadd(redis_keys.output("good"), {"o": chunk})
    reader.start()
    try:
        path = tmp_path / "good" / "train_a" / "stdout"
        eventually(lambda: path.exists() and path.read_bytes() == b"one\n")
        server.client.xadd(redis_keys.output("file"), {"o": chunk})
        server.client.xadd(
            redis_keys.output("good"),
            {"o": b"\0" + encode(OutputChunk("a", 1, "train_a", "stdout", 4, b"two"))},
        )
        eventually(lambda: path.read_bytes() == b"one\ntwo")
    finally:
        reader.close()
    assert [line.split()[3] for line in notices] == ["file"], "the error is reported once"
    assert rejected.counts() == (("key", "wrong_type", 1),)


def test_experiment_that_ended_before_the_first_look_is_read(server: RedisServer, tmp_path):
    reader = OutputReader(server.url, print, SchedulerSigning().output, RejectionCounter().add)
    (tmp_path / "quick" / "train_a").mkdir(parents=True)
    reader.follow({"quick": (tmp_path / "quick", "quick")})
    reader.follow({})
    chunk = b"\0" + encode(OutputChunk("a", 1, "train_a", "stdout", 0, b"one\n"))
    server.client.xadd(redis_keys.output("quick"), {"o": chunk})
    reader.start()
    try:
        path = tmp_path / "quick" / "train_a" / "stdout"
        eventually(lambda: path.exists() and path.read_bytes() == b"one\n")
    finally:
        reader.close()
