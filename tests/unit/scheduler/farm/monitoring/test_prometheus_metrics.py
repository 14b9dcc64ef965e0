"""The Prometheus metrics of a farm."""

from __future__ import annotations

import contextlib
import http.client
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.waiting import eventually
from tunemq_scheduler.api.farm_answer_types import GpuRow, NodeRow, RejectionRow
from tunemq_scheduler.farm.allocation.allocation_reasons import OwnerAccount
from tunemq_scheduler.farm.ipc.ipc_messages import StoreUse
from tunemq_scheduler.farm.monitoring.metrics_server import MetricsServer
from tunemq_scheduler.farm.monitoring.metrics_snapshot import (
    BUCKETS_S,
    DiskState,
    FarmSnapshot,
    HeadSnapshot,
    NodeSnapshot,
    TurnTimes,
    waiting_snapshot,
)
from tunemq_scheduler.farm.monitoring.prometheus_metrics import metrics_of
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.health.node_metrics import GpuMetrics, NodeMetrics
from tunemq_shared.objects.store_traffic import StoreTraffic

ROW = NodeRow(
    node="one",
    instance_id="inc1",
    state="ready",
    total={"cpu": 4.0, "gpu": 1.0, "memory": 8e9, "licence": 3.0},
    used={"cpu": 2.5, "gpu": 0.5, "memory": 0.0, "licence": 1.0},
    gpus=(
        GpuRow(uuid="GPU-a", model="NVIDIA H200", memory=10, used=0.5),
        GpuRow(uuid="GPU-b", model="NVIDIA H200", withheld="XID 79"),
    ),
    trials=2,
    since=1.0,
)
NODE_METRICS = NodeMetrics(
    "1",
    0.5,
    6e9,
    7e9,
    3,
    11,
    12,
    (GpuMetrics("GPU-a", 0.25, None),),
    store=StoreTraffic(9, 4, 512, 61.5, "away"),
    disk_free_inodes=3e5,
    disk_problem="/w/blobs: Read-only file system",
)
FARM = FarmSnapshot(
    at=100.0,
    experiments={"RUNNING": 2, "QUEUED": 5},
    trials={"exp": {"RUNNING": 3, "PENDING": 1}},
    waiting={"exp": {"cpu": 0, "gpu": 7, "licence": 7}},
    results=42,
    turns=((1,) * (len(BUCKETS_S) + 1), 0.5),
    is_redis_away=False,
    redis_full_s=42.5,
    troubles={"exp": "silent"},
    nodes=(NodeSnapshot(ROW, NODE_METRICS, 0.75),),
    accounts=(
        OwnerAccount("ada", 0, "gpus", 0.5, 0.75, 12.0),
        OwnerAccount("ada", 0, "others", 0.125, 0.25, -3.0),
    ),
    rejected=(
        RejectionRow(kind="registration", reason="unsigned", times=2),
        RejectionRow(node="one", kind="command", reason="altered", times=3),
        RejectionRow(node="one", kind="command", reason="altered", times=4),
    ),
    traffic=StoreTraffic(30, 2),
    store_uses={"exp": StoreUse(StoreTraffic(20, 2), waiting=2, copy_behind_s=7.5)},
    head=HeadSnapshot(
        disks={
            "results": DiskState(free=1e9, size=4e9, free_inodes=5e5, is_writable=True),
            "store": DiskState(is_writable=False),
        },
        certificates={"redis": 2e9},
        backup_at=99.0,
    ),
)


def said(farm: FarmSnapshot = FARM) -> dict[str, float]:
    """Return all samples by name and labels."""
    return {
        f"{one.name}{{{','.join(f'{k}={v}' for k, v in one.labels.items())}}}": one.value
        for family in metrics_of(farm)
        for one in family.samples
    }


def test_metrics_of_a_farm_include_experiments_nodes_and_owners():
    samples = said()
    expected = {
        "tunemq_experiments{state=RUNNING}": 2,
        "tunemq_experiments{state=FAILED}": 0,
        "tunemq_queue_length{}": 5,
        "tunemq_trials{experiment=exp,state=PENDING}": 1,
        "tunemq_trials_waiting{experiment=exp,resource=cpu}": 0,
        "tunemq_trials_waiting{experiment=exp,resource=gpu}": 7,
        "tunemq_trials_waiting{experiment=exp,resource=licence}": 7,
        "tunemq_search_trouble{experiment=exp,kind=silent}": 1,
        "tunemq_results_total{}": 42,
        "tunemq_scheduler_turn_seconds_count{}": 1,
        "tunemq_scheduler_turn_seconds_sum{}": 0.5,
        "tunemq_redis_away{}": 0,
        "tunemq_redis_full_seconds{}": 42.5,
        "tunemq_messages_refused_total{node=,kind=registration,reason=unsigned}": 2,
        "tunemq_messages_refused_total{node=one,kind=command,reason=altered}": 7,
        "tunemq_nodes{state=ready}": 1,
        "tunemq_nodes{state=silent}": 0,
        "tunemq_node_cpus{node=one}": 4,
        "tunemq_node_cpus_used{node=one}": 2.5,
        "tunemq_node_gpus{node=one}": 1,
        "tunemq_node_gpus_used{node=one}": 0.5,
        "tunemq_node_gpus_withheld{node=one}": 1,
        "tunemq_node_memory_bytes{node=one}": 8e9,
        "tunemq_node_resource{node=one,resource=licence}": 3,
        "tunemq_node_resource_used{node=one,resource=licence}": 1,
        "tunemq_node_trials{node=one}": 2,
        "tunemq_node_trial_processes{node=one}": 3,
        "tunemq_node_lease_age_seconds{node=one}": 0.75,
        "tunemq_node_outbox_bytes{node=one}": 11,
        "tunemq_node_cache_bytes{node=one}": 12,
        "tunemq_node_load1{node=one}": 0.5,
        "tunemq_node_memory_available_bytes{node=one}": 6e9,
        "tunemq_node_disk_free_bytes{node=one}": 7e9,
        "tunemq_node_disk_free_inodes{node=one}": 3e5,
        "tunemq_node_disk_unwritable{node=one}": 1,
        "tunemq_gpu_held_ratio{node=one,uuid=GPU-a,model=NVIDIA H200}": 0.5,
        "tunemq_gpu_busy_ratio{node=one,uuid=GPU-a,model=NVIDIA H200}": 0.25,
        "tunemq_store_requests_total{node=}": 30,
        "tunemq_store_failures_total{node=}": 2,
        "tunemq_store_requests_total{node=one}": 9,
        "tunemq_store_failures_total{node=one}": 4,
        "tunemq_store_queue_bytes{node=one}": 512,
        "tunemq_store_failing_seconds{node=}": 0,
        "tunemq_store_failing_seconds{node=one}": 61.5,
        "tunemq_trials_waiting_for_store{experiment=exp}": 2,
        "tunemq_journal_copy_behind_seconds{experiment=exp}": 7.5,
        "tunemq_head_disk_free_bytes{disk=results}": 1e9,
        "tunemq_head_disk_size_bytes{disk=results}": 4e9,
        "tunemq_head_disk_free_inodes{disk=results}": 5e5,
        "tunemq_head_disk_unwritable{disk=results}": 0,
        "tunemq_head_disk_unwritable{disk=store}": 1,
        "tunemq_certificate_expiry_timestamp_seconds{certificate=redis}": 2e9,
        "tunemq_last_backup_timestamp_seconds{}": 99.0,
        "tunemq_owner_gpus_held{owner=ada,priority=0}": 0.5,
        "tunemq_owner_gpus_entitled{owner=ada,priority=0}": 0.75,
        "tunemq_owner_share_held_ratio{owner=ada,priority=0}": 0.125,
        "tunemq_owner_behind_seconds{owner=ada,priority=0,pool=others}": -3.0,
    }
    assert {key: samples.get(key) for key in expected} == expected


def test_scheduler_that_waits_for_a_full_redis_tells_no_state_of_the_farm():
    samples = said(waiting_snapshot(31.5))
    assert samples["tunemq_redis_full_seconds{}"] == 31.5
    assert samples["tunemq_redis_away{}"] == 0
    assert samples["tunemq_scheduler_said_timestamp_seconds{}"] == pytest.approx(time.time(), abs=5)
    farm = ("tunemq_nodes", "tunemq_node_", "tunemq_experiments", "tunemq_trials", "tunemq_results")
    assert not [key for key in samples if key.startswith(farm)]


def test_values_that_a_node_does_not_report_are_left_out():
    silent = NodeSnapshot(ROW, NodeMetrics(), 0.0)
    samples = said(msgspec.structs.replace(FARM, nodes=(silent,)))
    assert not [key for key in samples if "load1" in key or "gpu_busy" in key]
    assert not [key for key in said() if "gpu_memory_used" in key]


def test_farm_whose_backup_was_never_noted_has_no_backup_metric():
    samples = said(msgspec.structs.replace(FARM, head=HeadSnapshot()))
    assert not [key for key in samples if "backup" in key or "head_disk" in key]


def test_newer_of_two_instances_of_a_node_is_shown():
    older = msgspec.structs.replace(ROW, instance_id="inc0", state="silent", trials=9, since=0.0)
    nodes = (*FARM.nodes, NodeSnapshot(older, NodeMetrics(), 60.0))
    samples = said(msgspec.structs.replace(FARM, nodes=nodes))
    assert samples["tunemq_node_trials{node=one}"] == 2
    assert samples["tunemq_nodes{state=silent}"] == 1


def test_loop_turns_are_counted_by_duration():
    turns = TurnTimes()
    for seconds in (0.0001, 0.001, 0.02, 99.0):
        turns.add(seconds)
    counts, total = turns.so_far()
    assert dict(zip((*BUCKETS_S, "more"), counts, strict=True)) == {
        0.001: 2, 0.0025: 2, 0.005: 2, 0.01: 2, 0.025: 3, 0.05: 3, 0.1: 3, 0.25: 3, 0.5: 3, 1.0: 3,
        2.5: 3, "more": 4,
    }  # fmt: skip
    assert total == pytest.approx(99.0211)


# --- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture
def server():
    server = MetricsServer("127.0.0.1:0")
    server.publish(FARM)
    yield server
    server.close()


def scraped(server: MetricsServer) -> dict[str, float]:
    with urllib.request.urlopen(server.address, timeout=60) as answer:
        assert answer.status == 200
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {one.name: one.value for family in families for one in family.samples}


def test_server_without_a_snapshot_answers_503_and_then_serves_the_newest():
    server = MetricsServer("127.0.0.1:0")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        scraped(server)  # Prometheus counts that as down
    server.publish(FARM)
    samples = scraped(server)
    assert samples["process_resident_memory_bytes"] > 0
    assert samples["tunemq_results_total"] == 42
    server.close()


def test_silent_client_is_disconnected_soon(server, monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.farm.monitoring.metrics_server._Handler.timeout", 1.0)
    host, port = "127.0.0.1", int(server.address.rpartition(":")[2].partition("/")[0])
    with socket.create_connection((host, port)):
        assert scraped(server)["process_resident_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example:29472"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "scheduler:9464"}, 200),
        ({"Host": "10.0.0.3:9464"}, 200),
        ({"Host": "[::1]:9464"}, 200),
        ({"Host": "localhost"}, 200),
    ],
)
def test_metrics_server_rejects_requests_for_a_foreign_name_or_from_a_page(headers, status):
    server = MetricsServer("127.0.0.1:0", ["scheduler"])
    server.publish(FARM)
    port = int(server.address.rpartition(":")[2].partition("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    server.close()
    assert answer.status == status
    assert ("process_resident_memory_bytes" in text) == (status == 200)


def dripping_client(server):
    port = int(server.address.rpartition(":")[2].partition("/")[0])
    client = socket.create_connection(("127.0.0.1", port), timeout=0.1)
    client.sendall(b"GET")
    return client


def test_metrics_server_answers_others_beside_a_dripping_client(server, monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.farm.monitoring.metrics_server._Handler.timeout", 60.0)
    began = time.monotonic()
    with dripping_client(server):
        assert scraped(server)["process_resident_memory_bytes"] > 0
        assert time.monotonic() - began < 50  # the client is not hung up on before


def test_metrics_server_hangs_up_on_a_dripping_client(server, monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.farm.monitoring.metrics_server._Handler.timeout", 1.0)

    def is_hung_up():
        try:
            dripping.sendall(b"x")
            return dripping.recv(1000) == b""
        except TimeoutError:
            return False
        except OSError:
            return True

    with dripping_client(server) as dripping:
        eventually(is_hung_up)


def test_metrics_server_holds_few_connections_of_clients_that_say_nothing(server, monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.farm.monitoring.metrics_server._Handler.timeout", 60.0)
    port = int(server.address.rpartition(":")[2].partition("/")[0])
    before = threading.active_count()
    with contextlib.ExitStack() as opened:
        idle = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)
        ]
        idle[35].settimeout(30)
        assert idle[35].recv(1) == b""  # the server closed the oldest connections
        eventually(lambda: threading.active_count() - before <= 2 * 64)  # each with its timer
        assert scraped(server)["process_resident_memory_bytes"] > 0
    eventually(lambda: threading.active_count() <= before)
    assert scraped(server)["process_resident_memory_bytes"] > 0


def test_metrics_server_drops_clients_without_a_request_before_slow_readers(server, monkeypatch):
    monkeypatch.setattr("tunemq_scheduler.farm.monitoring.metrics_server._Handler.timeout", 60.0)
    asking, may_answer = threading.Semaphore(0), threading.Event()

    def app(environ, start_response):
        asking.release()
        may_answer.wait(60)
        start_response("200 OK", [])
        return [b"metrics"]

    server._server.set_app(app)
    port = int(server.address.rpartition(":")[2].partition("/")[0])
    with contextlib.ExitStack() as opened:

        def client(request=b""):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(request)
            return connection

        slow = client(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert asking.acquire(timeout=60)
        idle = [client() for _ in range(64)]
        assert idle[0].recv(1) == b""
        may_answer.set()
        assert slow.makefile("rb").read().endswith(b"metrics")


def test_address_in_use_is_rejected(server):
    taken = server.address.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(ConfigError, match=f"--metrics {taken} cannot be used"):
        MetricsServer(taken)
    with pytest.raises(ConfigError, match="--metrics 'nonsense' is invalid"):
        MetricsServer("nonsense")


def test_missing_library_is_named_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'prometheus-client>=0.22'"):
        MetricsServer("127.0.0.1:0")
