"""The peers as importable modules: the same code runs on either."""

from __future__ import annotations

import importlib
import os
from typing import Any

PEERS = ("tunemq", "ray")


def load_peer(name: str, cpus: int) -> Any:
    """The module with the peer's public names, on a machine of `cpus` CPUs."""
    if name == "ray":
        import ray

        ray.init(num_cpus=cpus, include_dashboard=False)
        return importlib.import_module("ray.tune")
    os.environ["TUNEMQ_CPUS"] = str(cpus)
    return importlib.import_module("tunemq")
