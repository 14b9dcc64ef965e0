"""The chart's files and its page agree with each other and with the program; without Helm."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.deploy.helm_parts import CHART, PAGE, ROOT
from tunemq_shared.base.byte_sizes import parse_bytes
from tunemq_workers.node import node_process


def test_schema_knows_each_value_and_no_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert _paths(values) == _described(schema, schema) - {"global"}


def test_operator_scrapes_the_scheduler_as_the_job_of_the_alerts() -> None:
    monitor = (CHART / "templates" / "servicemonitor.yaml").read_text()
    [label] = re.findall(r"^  jobLabel: (\S+)$", monitor, re.MULTILINE)
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    jobs = re.findall(rf"^{re.escape(label)}: (\S+)$", helpers, re.MULTILINE)
    rules = (ROOT / "deploy" / "prometheus" / "tunemq.rules.yml").read_text()
    assert set(jobs) == set(re.findall(r'job="([^"]+)"', rules)) == {"tunemq"}


def test_operator_names_each_release_of_each_namespace_a_farm() -> None:
    monitor = (CHART / "templates" / "servicemonitor.yaml").read_text()
    [relabeling] = re.findall(r"^ +relabelings:\n +- (.*)\n", monitor, re.MULTILINE)
    assert "targetLabel: farm," in relabeling
    assert "{{ .Release.Namespace }}/{{ .Release.Name }}" in relabeling


def _paths(values: dict[str, Any], before: str = "") -> set[str]:
    """The names of all values, except those below keys that users choose."""
    found = set()
    for name, value in values.items():
        path = f"{before}{name}"
        found.add(path)
        is_free = name in {"resources", "pools"}
        if isinstance(value, dict) and not is_free:
            found |= _paths(value, f"{path}.")
    return found


def _described(schema: dict[str, Any], root: dict[str, Any], before: str = "") -> set[str]:
    found = set()
    for name, given in schema.get("properties", {}).items():
        one = root["$defs"][given["$ref"].rsplit("/", 1)[1]] if "$ref" in given else given
        path = f"{before}{name}"
        found.add(path)
        if name not in {"resources", "pools"}:
            found |= _described(one, root, f"{path}.")
    return found


def test_page_says_with_the_alerts_who_lets_prometheus_in() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["networkPolicy"] | {"enabled": True, "metricsFrom": []} == values["networkPolicy"]
    section = PAGE.read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert "networkPolicy.metricsFrom" in section


def test_chart_has_the_version_of_tunemq() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    ours = (ROOT / "tunemq" / "__init__.py").read_text()
    assert f'__version__ = "{chart["appVersion"]}"' in ours
    told = set(re.findall(r"registry\.example\.org/tunemq/[a-z-]+:(\S+)", PAGE.read_text()))
    assert told == {chart["appVersion"]}


def test_images_are_the_built_ones_and_run_as_their_user() -> None:
    files = [path.read_text() for path in (ROOT / "deploy" / "images").glob("*.Dockerfile")]
    stages = re.compile(r"^FROM .* AS (\S+)$", re.MULTILINE)
    built = {name for text in files for name in stages.findall(text)}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    used = {values[part]["image"] for part in ("redis", "submitter", "scheduler")}
    used |= set(re.findall(r'"(tunemq/worker[a-z-]*)"', helpers))
    assert len(used) == 4
    assert {name.removeprefix("tunemq/") for name in used} <= built
    users = {user for text in files for user in re.findall(r"^USER (\S+)$", text, re.MULTILINE)}
    assert users == {"10001:10001"}
    assert "runAsUser: 10001" in helpers


def test_worker_takes_no_more_of_the_disk_than_its_volume_has() -> None:
    workers = (CHART / "templates" / "workers.yaml").read_text()
    _, _, after = workers.partition("- --disk-bytes\n")
    assert ".storage.size" in after.splitlines()[0]
    options = {f"--{name}" for name in re.findall(r"^ +- --([a-z-]+)$", workers, re.MULTILINE)}
    assert options <= {f"--{name}" for name in node_process._OPTIONS}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert parse_bytes(values["workers"]["defaults"]["storage"]["size"]) == 20 * 2**30


def test_page_explains_a_worker_whose_trial_uses_all_memory() -> None:
    page = PAGE.read_text()
    heading = "When a trial takes too much memory"
    assert f"### {heading}" in page
    [row] = [line for line in page.splitlines() if "`OOMKilled`" in line]
    assert f'"{heading}"' in row
