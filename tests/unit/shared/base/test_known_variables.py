"""The list of TuneMQ's environment variables, and warnings about misspelt ones."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tunemq_shared.base.known_variables import KNOWN_VARIABLES, unknown_variables

ROOT = Path(__file__).parents[4]
PLACES = ("scheduler", "workers", "shared", "tunemq", "deploy", "docs", "docker-compose.yml")


def test_known_variables_are_those_that_code_and_documentation_name():
    listed = subprocess.run(
        ["git", "ls-files", *PLACES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no checkout")
    found: set[str] = set()
    for name in listed.stdout.split():
        file = ROOT / name
        is_text = file.is_file() and file.suffix != ".gz"
        if is_text and file.name != "known_variables.py":
            found.update(re.findall(r"TUNEMQ_[A-Z0-9_]*[A-Z0-9]\b", file.read_text("utf-8")))
    found = {one for one in found if not one.startswith("TUNEMQ_PARAM")}
    of_make_test = {"TUNEMQ_CACHE"}
    assert found - {"TUNEMQ_S3", "TUNEMQ_STORE"} | of_make_test == KNOWN_VARIABLES


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TUNEMQ_KEY", "TUNEMQ_KEYS"),
        ("TUNEMQ_TRIAL_ENVS", "TUNEMQ_TRIAL_ENV"),
        ("TUNEMQ_RESULT", "TUNEMQ_RESULTS"),
        ("TUNEMQ_XYZZY_PLUGH", ""),
    ],
)
def test_unknown_variables_names_the_closest_known_one(name: str, meant: str):
    (said,) = unknown_variables([name])
    assert f"the variable {name}" in said
    assert (f"did you mean {meant}?" in said) == bool(meant)


def test_unknown_variables_exclude_ours_and_those_of_kubernetes():
    of_kubernetes = {"TUNEMQ_REDIS_SERVICE_HOST", "TUNEMQ_REDIS_PORT_6379_TCP_ADDR"}
    ours = {*KNOWN_VARIABLES, *of_kubernetes, "TUNEMQ_PARAM_LR", "PATH", "TUNE_X"}
    assert unknown_variables(ours) == []
