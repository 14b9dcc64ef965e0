"""`tunemq doctor` on a farm without problems, and with wrong arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.farms.examined_farm import ExaminedFarm, farm
from tunemq_scheduler.cli.doctor_command import shown
from tunemq_scheduler.security.findings import Finding, FindingLevel, ok, problem, warning

__all__ = ["farm"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


def test_doctor_of_a_healthy_farm_has_no_problem_and_no_warning(farm: ExaminedFarm):
    found = farm.examined()
    assert all(one.level is FindingLevel.OK for one in found.findings), str(found)
    assert (found.problems, found.warnings) == (0, 0)
    said = farm.doctor()
    assert said.returncode == 0
    assert said.stderr == ""
    *lines, last = said.stdout.splitlines()
    assert re.fullmatch(r"\d+ checks: no problem found\.", last)
    assert len(lines) == int(last.split()[0])
    assert all(re.match(r"ok       [a-z-]+  +\S", line) for line in lines), said.stdout


def test_doctor_runs_every_check_on_the_healthy_farm(farm: ExaminedFarm):
    said = {one.check: one.what for one in farm.examined().findings}
    assert "one" in said["nodes"]
    assert "ada" in said["keys"]
    assert "scheduler.toml" in said["key-files"]
    assert "3 agree" in said["clocks"]
    assert "free" in said["results-disk"]
    wanted = {
        "celery-remote-control",
        "keys-in-arguments",
        "node-disk",
        "node-gpus",
        "node-libraries",
        "node-python",
        "redis-aof",
        "redis-cve",
        "redis-default-user",
        "redis-eviction",
        "redis-lua",
        "redis-password",
        "redis-tls",
        "redis-version",
        "redis-writes",
        "scheduler",
        "store-anonymous",
        "store-clock",
        "store-keys",
        "store-tls",
        "store-unsigned-trailer",
    }
    assert wanted <= set(said)


def test_doctor_page_explains_each_check(farm: ExaminedFarm):
    page = (Path(__file__).parents[2] / "docs" / "farm.md").read_text(encoding="utf-8")
    section = page.partition("## Checking a farm")[2].partition("\n## ")[0]
    checks = {one.check for one in farm.examined().findings}
    assert not [check for check in checks | {"redis", "store"} if f"`{check}`" not in section]


def test_doctor_prints_each_problem_with_its_fix(farm: ExaminedFarm):
    with farm.redis_says("maxmemory-policy", "allkeys-lru"):
        done = farm.doctor()
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    at = lines.index("problem  redis-eviction")
    assert "allkeys-lru" in lines[at + 1]
    assert lines[at + 2].startswith("         fix: redis-cli CONFIG SET maxmemory-policy")
    assert lines[-1].endswith("checks: 1 problem, no warnings.")


def test_doctor_changes_nothing_on_the_farm(farm: ExaminedFarm):
    client = farm.server.client()

    def objects() -> set[str]:
        return {str(one.object_name) for one in client.list_objects(farm.bucket, recursive=True)}

    before = objects()
    farm.examined()
    assert objects() == before


def test_doctor_without_redis_reports_it_and_runs_the_other_checks(farm: ExaminedFarm):
    found = farm.examined("--redis", "redis://127.0.0.1:1/0", "--store", farm.store)
    (finding,) = found.of("redis")
    assert finding.level is FindingLevel.PROBLEM
    assert "127.0.0.1:1" in finding.what
    assert "TUNEMQ_REDIS" in finding.fix
    assert "store-keys" in {one.check for one in found.findings}


def test_doctor_without_store_reports_a_problem(farm: ExaminedFarm):
    away = "s3://tunemq/farm?endpoint=http://127.0.0.1:1"
    found = farm.examined("--store", away)
    assert [one.check for one in found.findings if one.fix] == ["store"], str(found)
    assert "AWS_ACCESS_KEY_ID" in found.of("store")[0].fix


def test_doctor_with_invalid_arguments_names_them_and_ends_with_2(farm: ExaminedFarm):
    for line, text in (
        (("--redis", "http://nowhere"), "redis://"),
        (("--store", "s3://NO"), "bucket"),
        (("--results", "s3://bucket/results"), "folder"),
        (("--no-such-option",), "unrecognized"),
    ):
        done = farm.doctor(*line)
        assert done.returncode == 2, (line, done)
        assert text in done.stderr, (line, done)
        assert not done.stdout, (line, done)
    done = farm.doctor(variables={"TUNEMQ_REDIS": ""})
    assert done.returncode == 2
    assert "TUNEMQ_REDIS" in done.stderr


def test_doctor_output_holds_no_secret(farm: ExaminedFarm):
    for variables in ({}, {"AWS_SECRET_ACCESS_KEY": "canary-" * 4}):
        secrets = [farm.environ("head", variables)["AWS_SECRET_ACCESS_KEY"]]
        secrets += re.findall(r'"([^"]+)"', (farm.keys / "scheduler.toml").read_text())
        for done in (farm.doctor(variables=variables), farm.doctor("--json", variables=variables)):
            assert not [one for one in secrets if one in done.stdout + done.stderr], done


# --- how it is shown ------------------------------------------------------------------------------


def test_doctor_prints_a_line_for_each_check_with_problems_below():
    text = shown(
        [
            ok("a", "fine"),
            problem("bb", "it is broken", "fix it"),
            warning("a", "it creaks", "oil it"),
            ok("c", "good"),
        ]
    )
    assert text.splitlines() == [
        "warning  a",
        "         it creaks",
        "         fix: oil it",
        "problem  bb",
        "         it is broken",
        "         fix: fix it",
        "ok       c   good",
        "3 checks: 1 problem, 1 warning.",
    ]


def test_doctor_escapes_text_from_other_machines():
    text = shown([problem("a", "node \x1b[2J\nok  all", "\r\x9b31m")])
    assert text.splitlines()[1:3] == [
        "         node ?[2J?ok  all",
        "         fix: ??31m",
    ]


def test_finding_has_a_fix_only_where_something_is_wrong():
    for level, fix in (
        (FindingLevel.OK, "do"),
        (FindingLevel.WARNING, ""),
        (FindingLevel.PROBLEM, ""),
    ):
        with pytest.raises(ValueError, match="fix"):
            Finding(check="a", level=level, what="b", fix=fix)


def test_doctor_with_a_misspelt_variable_names_the_one_that_was_meant(farm: ExaminedFarm):
    finding = farm.has_only(
        "variables",
        "correct its name",
        level=FindingLevel.WARNING,
        variables={"TUNEMQ_TRIAL_ENVS": "X"},
    )
    assert "did you mean TUNEMQ_TRIAL_ENV?" in finding.what


def test_doctor_json_is_one_line(farm: ExaminedFarm):
    said = farm.doctor("--json").stdout
    assert said.count("\n") == 1
    found = json.loads(said)
    assert set(found) == {"findings", "problems", "warnings"}
    assert set(found["findings"][0]) == {"check", "level", "what", "fix", "refuses"}
