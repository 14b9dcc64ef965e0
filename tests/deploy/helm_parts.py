"""Helpers for tests of the chart: helm, its output, and the commands of its page."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "tunemq"
PAGE: Final = ROOT / "docs" / "deploy" / "kubernetes.md"
#: Files of values to render; each describes itself in its first lines.
VALUES: Final = sorted(path.name for path in (CHART / "ci").glob("*.yaml"))
#: A Helm that was not made by its makers does not know which Kubernetes it is for.
_FOR: Final = ("--kube-version", "1.34.0", "--namespace", "farm")

Manifest = dict[str, Any]


def need_helm() -> None:
    """Skip the test, or the file, on machines without Helm, CI's too, which need not deploy."""
    if shutil.which("helm") is None:
        reason = "helm is missing, which machines need that deploy on Kubernetes"
        pytest.skip(reason, allow_module_level=True)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm; skips where it is missing."""
    need_helm()
    return subprocess.run(
        ["helm", *arguments], check=False, capture_output=True, text=True, timeout=60
    )


def template(
    *arguments: str, values: str = "cpu-values.yaml", release: str = "tunemq"
) -> subprocess.CompletedProcess[str]:
    """Run `helm template`."""
    return helm(
        "template", release, str(CHART), "-f", str(CHART / "ci" / values), *_FOR, *arguments
    )


@functools.lru_cache
def _manifests(values: str, arguments: tuple[str, ...]) -> list[Manifest]:
    done = template(*arguments, values=values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def manifests(values: str, *arguments: str) -> list[Manifest]:
    """All that is rendered with these values."""
    return _manifests(values, arguments)


def named(found: list[Manifest], kind: str, name: str) -> Manifest:
    """The only one of this kind and name."""
    [one] = [one for one in found if one["kind"] == kind and one["metadata"]["name"] == name]
    return one


def pod_of(manifest: Manifest) -> Manifest | None:
    """The specification of the pods that it makes, if it makes any."""
    if manifest["kind"] == "Pod":
        return dict(manifest["spec"])
    template_of = manifest["spec"].get("template") if "spec" in manifest else None
    return None if template_of is None else dict(template_of["spec"])


def containers(pod: Manifest) -> list[Manifest]:
    """All of a pod's."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def commands(heading: str) -> str:
    """The commands below a heading of the page, as one script."""
    text = PAGE.read_text(encoding="utf-8")
    both = re.MULTILINE | re.DOTALL
    [section] = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, both)
    blocks = re.findall(r"^```console\n(.*?)^```", section, both)
    lines = [line for block in blocks for line in block.splitlines()]
    return "".join(f"{line[2:]}\n" for line in lines if line[:2] in {"$ ", "> "})
