"""Prometheus' rules and Grafana's dashboard use existing series; `deploy` tests run them."""

from __future__ import annotations

import configparser
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunemq_scheduler.api.farm_answer_types import GpuRow, NodeRow, RejectionRow
from tunemq_scheduler.farm.allocation.allocation_reasons import OwnerAccount
from tunemq_scheduler.farm.ipc.ipc_messages import StoreUse
from tunemq_scheduler.farm.monitoring.metrics_snapshot import (
    BUCKETS_S,
    DiskState,
    FarmSnapshot,
    HeadSnapshot,
    NodeSnapshot,
)
from tunemq_scheduler.farm.monitoring.prometheus_metrics import metrics_of
from tunemq_shared.health.node_metrics import GpuMetrics, NodeMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "deploy" / "monitoring.md"
ALERTS = [
    rule
    for file in sorted((DEPLOY / "prometheus").glob("*.rules.yml"))
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "tunemq.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {one["name"]: one for one in DASHBOARD["templating"]["list"]}

#: Labels that Prometheus adds to all series, and its own series.
ADDED = {"farm", "instance", "job", "alertname", "alertstate", "severity"}
OTHERS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}

EVERYTHING = FarmSnapshot(
    at=0.0,
    experiments={},
    trials={"e": {"RUNNING": 1}},
    troubles={"e": "failing"},
    waiting={"e": {"cpu": 1}},
    results=0,
    turns=((0,) * (len(BUCKETS_S) + 1), 0.0),
    is_redis_away=False,
    nodes=(
        NodeSnapshot(
            NodeRow(
                node="a",
                instance_id="i",
                state="ready",
                total={"cpu": 1.0, "licence": 1.0},
                gpus=(GpuRow(uuid="G", model="M", memory=1),),
            ),
            NodeMetrics(
                "1", 0.5, 1.0, 1.0, 1, 1, 1, (GpuMetrics("G", 0.5, 1),), disk_free_inodes=1.0
            ),
            0.0,
        ),
    ),
    accounts=(OwnerAccount("ada", 0, "gpus", 0, 0, 0), OwnerAccount("ada", 0, "others", 0, 0, 0)),
    rejected=(RejectionRow(kind="registration", reason="unsigned", times=1),),
    store_uses={"e": StoreUse()},
    head=HeadSnapshot(
        disks={"results": DiskState(free=1.0, size=2.0, free_inodes=1.0, is_writable=True)},
        certificates={"redis": 1.0},
        backup_at=1.0,
    ),
)


def there_is() -> dict[str, set[str]]:
    """The labels of each series that a scheduler exports, by name."""
    return {
        sample.name: set(sample.labels)
        for family in metrics_of(EVERYTHING)
        for sample in family.samples
    }


def queries() -> Iterator[str]:
    """Return all our expressions."""
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    yield from (note["expr"] for note in DASHBOARD["annotations"]["list"])
    yield from (rule["expr"] for rule in ALERTS)
    yield from (one["definition"] for one in VARIABLES.values() if one["type"] == "query")


def labels_of(query: str) -> set[str]:
    """Return the labels in an expression."""
    found = set(re.findall(r'[{,]\s*(\w+)\s*(?:=~|!~|!=|=)\s*"', query))
    for names in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", query):
        found.update(name.strip() for name in names.split(","))
    return found - {""}


# --- queries and rules name existing series -------------------------------------------------------


def test_queries_use_series_and_labels_of_a_scheduler():
    known = there_is()
    for query in set(queries()):
        series = set(re.findall(r"\b(?:tunemq|process)_\w+", query))
        assert series <= known.keys() | OTHERS, query
        labels = ADDED.union(*(known.get(name, set()) for name in series))
        if "ALERTS" in query:
            labels |= {"node", "experiment"}  # the rules keep these
        assert labels_of(query) <= labels, query


def test_all_series_of_a_scheduler_are_shown_or_watched():
    spoken = " ".join(queries())
    unused = {name for name in there_is() if name not in spoken}
    assert unused == {
        "tunemq_node_memory_used_bytes",  # of nodes that trials ask for memory of
        "tunemq_node_trial_processes",
    }


def test_metrics_page_names_all_series():
    told = (ROOT / "docs" / "farm.md").read_text()
    for name in there_is():
        short = re.sub(r"_(bucket|count|sum)$", "", name)
        ends = [short, short.removeprefix("tunemq_node"), short.removeprefix("tunemq_gpu")]
        ends += [f"_{word}" for word in ("entitled", "used", "entitled_ratio")]
        assert any(f"`{end}" in told for end in ends), name


# --- the rules ------------------------------------------------------------------------------------


def test_alerts_name_problem_and_fix_and_stand_on_the_page():
    page = PAGE.read_text()
    for rule in ALERTS:
        name, said = rule["alert"], rule["annotations"]
        assert name.startswith("Tunemq")
        assert said.keys() == {"summary", "description"}, name
        assert len(said["description"]) > 60, name
        assert f"| `{name}` | {rule['labels']['severity']} |" in page, name
    assert len(set(re.findall(r"\| `(Tunemq\w+)` \|", page))) == len(ALERTS)
    assert {rule["labels"]["severity"] for rule in ALERTS} == {"critical", "warning", "info"}


def test_commands_in_alerts_exist():
    commands = set(re.findall(r"^ {4}(\w+)", help_of(), re.MULTILINE))
    options = help_of("worker") + help_of("scheduler") + help_of("rm")
    text = " ".join(rule["annotations"]["description"] for rule in ALERTS)
    assert set(re.findall(r"`tunemq\s+([a-z]+)", text)) <= commands
    named = set(re.findall(r"--([a-z-]+)", text)) - {"max-depth", "inodes"}  # options of du
    assert {name for name in named if f"--{name}" not in options} == set()
    for page in set(re.findall(r"docs/[a-z-]+\.md", text)):
        assert (ROOT / page).exists()


def help_of(*command: str) -> str:
    """The output of ``--help``."""
    done = subprocess.run(
        [sys.executable, "-m", "tunemq", *command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Prometheus's own program; skips where it is missing."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False)


def test_prometheus_accepts_its_configuration_and_the_rules():
    done = promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(map(int, re.findall(r"(\d+) rules found", done.stdout))) == len(ALERTS)


@pytest.mark.parametrize("every", [10, 15, 60, 120])
def test_alerts_do_not_depend_on_the_scrape_interval(every: int, tmp_path: Path) -> None:
    hour, labels = 3600 // every, 'farm="f",instance="h"'
    gone = 7 * hour // 3  # eleven minutes before the alerts are looked at
    series = {
        'up{job="tunemq",': "1x%d",
        "tunemq_scheduler_said_timestamp_seconds{": f"0+{every}x%d",
        "tunemq_redis_away{": "0x%d",
        "tunemq_results_total{": "5x%d",
        'tunemq_trials{experiment="a",state="RUNNING",': "4x%d",
        "tunemq_queue_length{": "3x%d",
        'tunemq_gpu_busy_ratio{node="n",uuid="G",': "0x%d",
        'tunemq_gpu_held_ratio{node="n",uuid="G",': "1x%d",
        'tunemq_node_cpus{node="gone",': f"8x{gone} stale",
        'tunemq_node_disk_free_bytes{node="n",': f"9e10-{25e9 / hour}x%d",
        'tunemq_head_disk_free_bytes{disk="results",': f"9e10-{25e9 / hour}x%d",
    }
    given = [
        {"series": f"{name}{labels}}}", "values": values.replace("%d", str(3 * hour))}
        for name, values in series.items()
    ]
    named = "NodeDiskFills HeadDiskFills NodeGone SearchesWaitLong GpuIdle NoResults"
    asked = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "151m30s",
        "exp_samples": [
            {"labels": f'{{alertname="Tunemq{name}"}}', "value": 1} for name in named.split()
        ],
    }
    case = {"interval": f"{every}s", "input_series": given, "promql_expr_test": [asked]}
    rules = str(DEPLOY / "prometheus" / "tunemq.rules.yml")
    tests = {"rule_files": [rules], "evaluation_interval": "10s", "tests": [case]}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    done = promtool("test", "rules", str(tmp_path / "tests.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_farm_is_scraped_under_the_job_name_of_the_rules():
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    [files] = jobs["tunemq"]["file_sd_configs"]
    assert files["files"] == ["targets/tunemq*.yml"]
    [target] = yaml.safe_load((DEPLOY / "prometheus" / "targets" / "tunemq.yml").read_text())
    assert target == {"targets": ["scheduler:9464"], "labels": {"farm": "tunemq"}}


def test_snippets_of_the_page_are_valid():
    snippets = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    said = [yaml.safe_load(snippet) for snippet in snippets]
    jobs = [job for one in said if "scrape_configs" in one for job in one["scrape_configs"]]
    assert [job["job_name"] for job in jobs] == ["tunemq"]


# --- the dashboard --------------------------------------------------------------------------------


def test_dashboard_equals_its_description(monkeypatch):
    folder = DEPLOY / "grafana"
    monkeypatch.syspath_prepend(folder)
    made = runpy.run_path(str(folder / "make_dashboard.py"))["text"]()
    sys.modules.pop("parts")
    assert made == (folder / "dashboards" / "tunemq.json").read_text(), (
        "python deploy/grafana/make_dashboard.py writes it anew"
    )


def test_panels_name_their_content_and_unit():
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]


def test_panels_have_distinct_numbers_titles_and_places():
    every = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


def test_any_prometheus_can_be_chosen_and_all_queries_follow_the_choice():
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert VARIABLES["datasource"]["query"] == "prometheus"
    sources: list[Any] = [one["datasource"] for one in DASHBOARD["annotations"]["list"]]
    for panel in PANELS:
        sources += [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    sources += [one["datasource"] for one in VARIABLES.values() if one["type"] == "query"]
    assert all(one == source for one in sources)
    used = set(re.findall(r"\$(\w+)", " ".join(queries())))
    assert used <= {*VARIABLES, "__rate_interval", "value", "labels"}


# --- Grafana's own files --------------------------------------------------------------------------


def test_grafana_finds_prometheus_and_knows_its_scrape_interval():
    folder = DEPLOY / "grafana" / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]


def test_grafana_shows_our_dashboard_first_and_requires_the_generated_password():
    said = configparser.RawConfigParser()
    said.read(DEPLOY / "grafana" / "grafana.ini")
    assert said["auth.anonymous"]["enabled"] == "false"
    assert said["security"]["admin_password"] == "$__file{/run/grafana-secrets/admin-password}"
    assert said["security"]["secret_key"] == "$__file{/run/grafana-secrets/secret-key}"
    folder = DEPLOY / "grafana" / "provisioning"
    [provider] = yaml.safe_load((folder / "dashboards" / "tunemq.yml").read_text())["providers"]
    home = Path(said["dashboards"]["default_home_dashboard_path"])
    assert str(home.parent) == provider["options"]["path"]
    assert (DEPLOY / "grafana" / "dashboards" / home.name).exists()


def test_compose_puts_these_files_where_they_are_read():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounts = {str(one).rpartition(":ro")[0] for one in services["grafana"]["volumes"]}
    for name in ("grafana.ini", "provisioning", "dashboards"):
        assert f"./deploy/grafana/{name}:/etc/grafana/{name}" in mounts
    assert "./deploy/prometheus:/etc/prometheus:ro" in services["prometheus"]["volumes"]
    for name in ("grafana", "prometheus"):
        assert "grafana" in services[name]["profiles"]
        assert all(str(port).startswith("127.0.0.1:") for port in services[name]["ports"])
        assert re.search(r":v?\d+\.\d+\.\d+\}?$", services[name]["image"])
