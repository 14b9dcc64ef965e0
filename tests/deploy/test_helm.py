"""The manifests that the chart renders, and the values that it rejects."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm_parts import (
    CHART,
    ROOT,
    VALUES,
    Manifest,
    containers,
    helm,
    manifests,
    named,
    need_helm,
    pod_of,
    template,
)

need_helm()

#: The first that the chart takes, and the newest that is known here.
KUBERNETES = ("1.29", "1.34")


def pods(values: str) -> Iterator[tuple[str, Manifest]]:
    for manifest in manifests(values):
        pod = pod_of(manifest)
        if pod is not None:
            yield f"{manifest['kind']} {manifest['metadata']['name']}", pod


@pytest.mark.parametrize("values", VALUES)
def test_lint_finds_nothing(values: str) -> None:
    file = str(CHART / "ci" / values)
    done = helm("lint", "--strict", str(CHART), "-f", file, "--kube-version", "1.34.0")
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout + done.stderr


def test_rendered_manifests_are_valid_for_kubernetes() -> None:
    kubernetes = pytest.importorskip(
        "kubernetes_validate",
        reason="Kubernetes' schemas are missing: pip install kubernetes-validate",
    )
    of_others = {"keda.sh", "monitoring.coreos.com"}
    for values in VALUES:
        found = manifests(values)
        ours = [one for one in found if one["apiVersion"].split("/")[0] not in of_others]
        assert ours
        for manifest in ours:
            for version in KUBERNETES:
                kubernetes.validate(manifest, version, strict=True)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("workers.pools.cpu.gpus=two", "'/workers/pools/cpu/gpus': got string, want integer"),
        ("workers.pools.cpu.memory=4Gb", "'/workers/pools/cpu/memory': '4Gb' does not match"),
        ("workers.pools.cpu.grace=3", "'/workers/pools/cpu': additional properties 'grace'"),
        ("workers.pools.GPU_1.gpus=1", "invalid propertyName 'GPU_1'"),
        ("store.adress=s3://farm", "'/store': additional properties 'adress'"),
        ("store.address=", "store.address is empty"),
        ("store.address=s3://key:secret@host/b", "'/store/address'"),
        (
            "workers.pools.cpu.env.WANDB_API_KEY=x",
            "cpu.env.WANDB_API_KEY: `helm get values` shows values",
        ),
        (
            "scheduler.env.TUNEMQ_REDIS=x",
            "scheduler.env.TUNEMQ_REDIS: `helm get values` shows values",
        ),
        ("workers.pools.cpu.autoscaling.max=0", "'/workers/pools/cpu/autoscaling/max'"),
    ],
)
def test_wrong_value_is_named(setting: str, said: str) -> None:
    done = template("--set", setting)
    assert done.returncode != 0
    assert said in done.stderr


def test_variables_that_only_sound_like_secrets_are_accepted() -> None:
    settings = "workers.pools.cpu.env.TOKENIZERS_PARALLELISM=true"
    more = "workers.pools.cpu.env.AWS_WEB_IDENTITY_TOKEN_FILE=/run/token"
    assert template("--set", f"{settings},{more}").returncode == 0


@pytest.mark.parametrize("values", VALUES)
def test_no_secret_is_rendered(values: str) -> None:
    assert "Secret" not in {manifest["kind"] for manifest in manifests(values)}


@pytest.mark.parametrize("values", VALUES)
def test_all_containers_are_as_restricted_as_pods_can_be(values: str) -> None:
    for name, pod in pods(values):
        security = pod["securityContext"]
        assert security["runAsNonRoot"], name
        assert (security["runAsUser"], security["fsGroup"]) == (10001, 10001), name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert "memory" in container["resources"]["limits"], name


@pytest.mark.parametrize("values", VALUES)
def test_only_the_side_container_sees_the_secret_as_kubernetes_mounts_it(values: str) -> None:
    for name, pod in pods(values):
        for container in containers(pod):
            mounts = {one["name"]: one for one in container["volumeMounts"]}
            assert ("secret" in mounts) == (container["name"] == "files"), name
            if container["name"] not in {"files", "redis"}:
                assert mounts["etc"]["readOnly"], name
                assert mounts["etc"]["subPath"] == "files", name


def test_arguments_of_workers_and_scheduler_are_existing_options() -> None:
    found = manifests("gpu-values.yaml")
    told: dict[str, set[str]] = {"scheduler": set(), "worker": set()}
    for manifest in found:
        pod = pod_of(manifest)
        for container in pod["containers"] if pod else []:
            if container["name"] in told:
                told[container["name"]] |= {
                    one for one in container["args"] if one.startswith("--")
                }
    for command, options in told.items():
        assert len(options) > 3
        shown = subprocess.run(
            [sys.executable, "-m", "tunemq", command, "--help"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert not [one for one in options if not re.search(rf"{one}\b", shown)]


@pytest.mark.parametrize("size", ["20Gi", "21474836480"])
def test_worker_is_told_the_size_of_its_volume(size: str) -> None:
    found = manifests("cpu-values.yaml", "--set", f"workers.pools.cpu.storage.size={size}")
    pod = pod_of(named(found, "Deployment", "tunemq-worker-cpu"))
    assert pod is not None
    arguments = pod["containers"][0]["args"]
    assert arguments[arguments.index("--disk-bytes") + 1] == size


@pytest.mark.parametrize("values", VALUES)
def test_pod_of_a_worker_has_longer_than_the_workers_grace(values: str) -> None:
    for name, pod in pods(values):
        [container] = pod["containers"]
        if container["name"] == "worker":
            grace = int(container["args"][container["args"].index("--grace") + 1])
            assert pod["terminationGracePeriodSeconds"] == grace + 30, name


def test_pod_that_never_got_ready_is_replaced() -> None:
    found = [one for one in manifests("gpu-values.yaml") if one["kind"] == "StatefulSet"]
    assert {one["metadata"]["name"] for one in found} == {"tunemq-scheduler", "tunemq-redis"}
    for one in found:
        assert (one["spec"]["replicas"], one["spec"]["podManagementPolicy"]) == (1, "Parallel")


def test_running_worker_is_protected_even_while_redis_is_away() -> None:
    found = manifests("gpu-values.yaml")
    probes = {}
    for kind, name in (("Deployment", "worker-a100"), ("StatefulSet", "scheduler")):
        pod = pod_of(named(found, kind, f"tunemq-{name}"))
        assert pod is not None
        [container] = pod["containers"]
        probes[name] = [
            container[f"{one}Probe"]["exec"]["command"]
            for one in ("startup", "readiness", "liveness")
        ]
    alive, ready = ["tunemq", "health"], ["tunemq", "health", "--ready"]
    assert probes == {"worker-a100": [ready, alive, alive], "scheduler": [alive, ready, alive]}
    budget = named(found, "PodDisruptionBudget", "tunemq-worker-a100")
    # Kubernetes may evict pods that are not ready: such workers run no trials.
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_gpus_are_requested_from_kubernetes_and_hidden_where_none_are_requested() -> None:
    found = manifests("gpu-values.yaml")
    limits, hidden = {}, {}
    for pool in ("cpu", "a100", "mig"):
        pod = pod_of(named(found, "Deployment", f"tunemq-worker-{pool}"))
        assert pod is not None
        [container] = pod["containers"]
        limits[pool] = container["resources"]["limits"]
        hidden[pool] = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
    assert limits["a100"] == {"memory": "256Gi", "nvidia.com/gpu": 8}
    assert limits["mig"] == {"memory": "16Gi", "nvidia.com/mig-1g.10gb": 1, "cpu": 4}
    assert hidden == {"cpu": True, "a100": False, "mig": False}


def test_image_with_a_registry_keeps_it() -> None:
    found = manifests("gpu-values.yaml")
    images = {}
    for pool in ("cpu", "a100", "mig"):
        pod = pod_of(named(found, "Deployment", f"tunemq-worker-{pool}"))
        assert pod is not None
        [images[pool]] = {container["image"] for container in containers(pod)}
    assert images == {
        "cpu": "registry.example.org/team/tunemq/worker:1.2.3",
        "a100": "registry.example.org/team/torch-worker:2.9",
        "mig": "registry.example.org/team/tunemq/worker-gpu:1.2.3",
    }


def test_scaled_pool_has_no_replica_count() -> None:
    scaled = named(manifests("autoscaling-values.yaml"), "Deployment", "tunemq-worker-gpu")
    assert "replicas" not in scaled["spec"]
    fixed = named(manifests("gpu-values.yaml"), "Deployment", "tunemq-worker-cpu")
    assert fixed["spec"]["replicas"] == 4


def test_alerts_tell_farms_of_two_namespaces_apart() -> None:
    monitor = named(manifests("gpu-values.yaml"), "ServiceMonitor", "tunemq")
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "farm", "replacement": "farm/tunemq"}]


# --- how many workers there are to be -------------------------------------------------------------

_SAID = 'tunemq_scheduler_said_timestamp_seconds{namespace="farm",cluster="one"}'
_WAITING = 'tunemq_trials_waiting{namespace="farm",cluster="one",experiment="a",resource="%s"}'
_BUSY = 'tunemq_node_trials{namespace="farm",cluster="one",node="tunemq-worker-gpu-7f-%s"}'
#: By name of the case: series, and the number of workers of the pool `gpu`; None: no answer.
_CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "nothing waits and no worker is there": ({_SAID: "0+15x20"}, 0),
    "three wait": ({_SAID: "0+15x20", _WAITING % "gpu": "3x20", _WAITING % "cpu": "9x20"}, 3),
    "a busy one stays, an idle one need not": (
        {_SAID: "0+15x20", _WAITING % "gpu": "0x20", _BUSY % "a": "2x20", _BUSY % "b": "0x20"},
        1,
    ),
    "one is busy and two wait": (
        {_SAID: "0+15x20", _WAITING % "gpu": "2x20", _BUSY % "a": "1x20"},
        3,
    ),
    "workers of others do not count": (
        {_SAID: "0+15x20", _BUSY.replace("-gpu-", "-cpu-") % "a": "4x20"},
        0,
    ),
    "workers of a pool whose name begins like its own do not count": (
        {_SAID: "0+15x20", _BUSY.replace("-gpu-", "-gpu-80gb-") % "a": "4x20"},
        0,
    ),
    "the scheduler is scraped every 90 seconds": (
        {_SAID: "0 _x5 90 _x5 180 _x5", _WAITING % "gpu": "3x20"},
        3,
    ),
    "the scheduler hangs": ({_SAID: "0x20", _WAITING % "gpu": "3x20"}, None),
    "the scheduler is away": ({_BUSY % "a": "1x20"}, None),
}


def test_prometheus_queries_use_existing_metrics() -> None:
    scaled = named(manifests("autoscaling-values.yaml"), "ScaledObject", "tunemq-worker-gpu")
    asked = set(re.findall(r"tunemq_\w+", scaled["spec"]["triggers"][0]["metadata"]["query"]))
    assert len(asked) == 3
    told = (ROOT / "docs" / "farm.md").read_text()
    assert {name for name in asked if f"`{name}" not in told} == set()


def test_pool_is_not_scaled_by_pod_names_that_kubernetes_would_cut() -> None:
    pool = "a-pool-of-20-letters"
    release = "tunemq-of-the-laboratory"
    scaled = f"workers.pools.{pool}.autoscaling.enabled=true"
    done = template("--set", scaled, release=release)
    assert f"workers.pools.{pool}: Kubernetes would cut the names of the pods" in done.stderr
    assert "that is 6 letters shorter" in done.stderr
    of_its_own = f"{scaled},workers.pools.{pool}.autoscaling.query=vector(1)"
    assert template("--set", of_its_own, release=release).returncode == 0


def test_number_of_workers_fits_running_and_waiting_trials(
    tmp_path: Path,
) -> None:
    scaled = named(manifests("autoscaling-values.yaml"), "ScaledObject", "tunemq-worker-gpu")
    [trigger] = scaled["spec"]["triggers"]
    if shutil.which("promtool") is None:
        pytest.skip("promtool, of Prometheus, is missing")
    query, tests = trigger["metadata"]["query"], []
    for case, (series, workers) in _CASES.items():
        samples = [] if workers is None else [{"labels": "{}", "value": workers}]
        asked = {"expr": query, "eval_time": "4m", "exp_samples": samples}
        inputs = [{"series": name, "values": values} for name, values in series.items()]
        given = {"name": case, "interval": "15s", "input_series": inputs}
        tests.append({**given, "promql_expr_test": [asked]})
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "tests.yaml")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
