"""A real Prometheus scrapes a real farm: each query of ours finds something, and alerts fire."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gpu_fixtures import uuids
from tests.support.fake_gpus import FakeGpus, gpu
from tests.support.farms.farm_processes import TcpRedis, free_port
from tests.support.farms.farm_service import FarmService, Search
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys

__all__ = ["uuids"]

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(420)]

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES_TEST = Path(__file__).parent / "tunemq.rules.test.yml"


def program(name: str) -> str:
    """A program of Prometheus', which machines for tests need not have."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: apt-get install prometheus")
    return found


class Prometheus:
    """Our configuration, sped up: it scrapes each second, and alerts do not wait.

    Args:
        folder: for its files.
        target: the scheduler's metrics.
    """

    def __init__(self, folder: Path, target: str) -> None:
        self.folder, self.port = folder, free_port()
        shutil.copytree(DEPLOY / "prometheus", folder)
        self._change("prometheus.yml", r"(interval|timeout): \d+s", r"\1: 1s")
        self._change("prometheus.yml", "localhost:9090", f"127.0.0.1:{self.port}")
        self._change("targets/tunemq.yml", "scheduler:9464", target)
        for rules in folder.glob("*.rules.yml"):
            self._change(rules.name, r"(?m)^( *)for: .*$", r"\1for: 0s")
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )

    def _change(self, name: str, pattern: str, to: str) -> None:
        file = self.folder / name
        changed, times = re.subn(pattern, to, file.read_text())
        assert times, f"{pattern} is not in {name}"
        file.write_text(changed)

    def ask(self, path: str, **query: str) -> Any:
        """The answer of Prometheus's API; None if it does not answer."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{query}: {error.read().decode()}")
        except OSError:
            return None

    def finds(self, query: str) -> list[Any]:
        """The samples that an expression finds now."""
        return (self.ask("query", query=query) or {"result": []})["result"]

    def rules(self) -> dict[str, dict[str, Any]]:
        """All alerting rules, by name."""
        groups = (self.ask("rules") or {"groups": []})["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def fires(self, alert: str) -> None:
        """Wait for an alert."""
        eventually(
            lambda: self.rules()[alert]["state"] == "firing",
            within=120,
            every=0.5,
            message=lambda: f"{alert}: {self.rules()[alert]}",
        )

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


class Watched:
    """A farm that exports all metrics, and its Prometheus."""

    def __init__(self, folder: Path, uuids: list[str]) -> None:
        self.redis = TcpRedis(folder)
        self.farm = farm = FarmService(folder, self.redis.url)
        self.gpus = FakeGpus(folder / "gpus.json", [gpu(uuid, utilisation=70) for uuid in uuids])
        seen = self.gpus.environment()
        paths = [seen["PYTHONPATH"], farm.environ("gpu")["PYTHONPATH"]]
        farm.of_home["gpu"] = {**seen, "PYTHONPATH": ":".join(paths)}
        self.prometheus: Prometheus | None = None

    def start(self) -> Prometheus:
        """Start all of it; two owners have searches, one waits, and a message is rejected."""
        farm = self.farm
        (farm.folder / "head" / "farm.toml").write_text("max_running = 2\n")
        farm.start_scheduler("--metrics", "127.0.0.1:0")
        farm.add_worker("gpu", 4, "--resources", '{"licence": 3}')
        farm.add_worker("cpu", 2, "--gpus", "0")
        farm.has_nodes("gpu", "cpu")
        found = re.search(r"Metrics are at http://([\d.:]+)/metrics", farm.said())
        assert found is not None, farm.said()
        self.prometheus = Prometheus(farm.folder / "prometheus", found[1])
        needs = {"cpu": 1, "gpu": 1, "licence": 1}
        farm.submit(Search(name="a", trials=3, steps=9999, resources=needs), "--owner", "ada")
        farm.submit(Search(name="b", trials=9, steps=9999), "--owner", "ben")
        farm.submit(Search(name="c", steps=9999), "--owner", "ben")
        self.redis.client.xadd(redis_keys.REQUESTS, {"unreadable": "request"})
        return self.prometheus

    def close(self) -> None:
        """End all of it, in any state."""
        if self.prometheus is not None:
            self.prometheus.end()
        self.redis.process.send_signal(signal.SIGCONT)
        self.farm.close()
        self.redis.end()


@pytest.fixture
def watched(tmp_path: Path, uuids: list[str]) -> Iterator[Watched]:
    program("prometheus")
    watched = Watched(tmp_path, uuids)
    yield watched
    watched.close()


def queries() -> dict[str, str]:
    """The dashboard's queries with the choices that it begins with; by panel and letter."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "tunemq.json").read_text())
    chosen = {"$__rate_interval": "5s", "$farm": ".*", "$node": ".*"}
    found: dict[str, str] = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in chosen.items():
                query = query.replace(name, value)
            found[f"{panel['title']} {target['refId']}"] = query
    return found


def test_every_query_of_the_dashboard_finds_data_and_alerts_fire(watched, uuids):
    prometheus = watched.start()
    watched.farm.results.joinpath(".farm", "last-backup").touch()
    left = queries()
    alerts_now = left.pop("Alerts now A")
    del left["Certificates A"]  # nothing here has one: tests/integration/test_head_watch.py

    def all_found() -> bool:
        for name in [name for name, query in left.items() if prometheus.finds(query)]:
            del left[name]
        return not left

    eventually(all_found, within=150, every=1, message=lambda: f"nothing: {left}{watched.farm}")
    assert {rule["health"] for rule in prometheus.rules().values()} <= {"ok", "unknown"}
    assert prometheus.finds('sum(tunemq_trials_waiting{resource="gpu"}) > 0')

    watched.gpus.xid(uuids[0], 79)
    prometheus.fires("TunemqGpusWithheld")
    watched.farm.workers["cpu"].kill()
    prometheus.fires("TunemqNodeSilent")
    assert prometheus.finds(alerts_now)
    watched.redis.process.send_signal(signal.SIGSTOP)
    prometheus.fires("TunemqRedisAway")
    watched.redis.process.send_signal(signal.SIGCONT)
    watched.farm.kill_scheduler()
    prometheus.fires("TunemqSchedulerAway")
    rules = prometheus.rules()
    assert {rule["health"] for rule in rules.values()} == {"ok"}, rules


def test_alerts_fire_only_when_they_should():
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(RULES_TEST)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
