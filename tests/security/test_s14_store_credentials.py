"""S14: the farm's credentials for its store are sent to no address that a submitter names."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.farm_service import Search, farm_service

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[bytes]]]:
    """The host and port of a server that notes what it is sent, and hangs up."""
    heard: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                guest, _ = listening.accept()
            except OSError:
                return
            with guest:
                heard.append(guest.recv(2**16))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", heard
        listening.shutdown(socket.SHUT_RDWR)


def test_s14_submitted_search_that_names_a_strange_store_fails_and_nothing_is_sent(
    tmp_path: Path, stranger: tuple[str, list[bytes]]
):
    place, heard = stranger
    secrets = {
        "TUNEMQ_STORE_TOKEN": "canary-token-of-the-farm",
        "AWS_ACCESS_KEY_ID": "canary-key",
        "AWS_SECRET_ACCESS_KEY": "canary-secret",
    }
    with farm_service(tmp_path, starts=False) as farm:
        farm.of_home["head"] = farm.of_home["one"] = secrets
        farm.start_scheduler()
        farm.add_worker("one")
        farm.has_nodes("one")
        for name, settings in {
            "served": f"storage_path='http://{place}/x',",
            "bucket": f"storage_path='s3://bucket/x?endpoint=http://{place}',",
            "synced": f"sync_config=tune.SyncConfig(upload_dir='http://{place}/x'),",
        }.items():
            farm.submit(Search(name=name, steps=2, run=settings))
            farm.wait_for(name, "FAILED")
            said = farm.tunemq("show", name)
            assert "credentials may not be sent" in said, said
            assert "stores = " in said
        farm.submit(Search(name="fine", steps=2))
        farm.wait_for("fine", "FINISHED")
    assert heard == []
