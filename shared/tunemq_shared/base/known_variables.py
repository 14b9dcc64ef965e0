"""The names of TuneMQ's environment variables, and warnings about unknown ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

_PREFIX: Final = "TUNEMQ_"
#: Variables that people set for programs, and that programs set for each other and for trials.
_OF_PROGRAMS: Final = """
    CHECKPOINT CHECKPOINT_DIR CONFIG CPUS FAILPOINTS HEALTH HOST KEYS REDIS REDIS_SERVER REPORT
    RESULTS S3_ENDPOINT S3_REACHED_AT TRIAL_DIR TRIAL_ENV TRIAL_ID
    TRIAL_NAME
"""
#: Variables that deploy/ reads (Compose's .env, systemd units, images, SLURM), and `make test`.
_OF_DEPLOYMENTS: Final = """
    CACHE ENVIRONMENT EXPERIMENT GO_IMAGE GPU_SHM GRACE GRAFANA_IMAGE GRAFANA_OWNER GRAFANA_PORT
    MINIO MINIO_IMAGE MINIO_MEMORY OWNER PACKAGES PROGRAM PROMETHEUS_IMAGE PROMETHEUS_PORT
    PROXY_IMAGE PUBLISH REDIS_IMAGE REDIS_MEMORY REDIS_PLACE REDIS_PORT REQUEUE SCHEDULER_IMAGE
    SCHEDULER_MEMORY SCHEDULER_OPTIONS SECRETS SHM STOP_GRACE STORE_OPTIONS STORE_PORT SUBMITTERS
    WORKERS WORKER_CPUS WORKER_DISK WORKER_GPU_IMAGE WORKER_IMAGE WORKER_MEMORY WORKER_OPTIONS
"""
KNOWN_VARIABLES: Final = frozenset(
    f"{_PREFIX}{name}" for name in (_OF_PROGRAMS + _OF_DEPLOYMENTS).split()
)
#: A trial's parameters; and what Kubernetes adds for services named "tunemq...".
_OTHERS: Final = re.compile(r"TUNEMQ_PARAM_.*|.*_SERVICE_(HOST|PORT(_.*)?)|.*_PORT(_\d+_.*)?")


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Describe each variable that has TuneMQ's prefix but that TuneMQ does not read.

    Args:
        names: The names of the variables in an environment.

    Returns:
        One clause per unknown variable.
    """
    unknown = (
        name
        for name in names
        if name.startswith(_PREFIX) and name not in KNOWN_VARIABLES and not _OTHERS.fullmatch(name)
    )
    return [f"no part of TuneMQ reads the variable {name}{_meant(name)}" for name in unknown]


def _meant(name: str) -> str:
    closest = difflib.get_close_matches(name, sorted(KNOWN_VARIABLES), 1, 0.75)
    return f"; did you mean {closest[0]}?" if closest else ""
