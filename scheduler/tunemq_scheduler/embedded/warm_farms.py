"""Keeps this script's embedded farms, so that a second ``fit()`` finds a warm one."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tunemq_scheduler.embedded.command_lines import default_cpus
from tunemq_scheduler.embedded.embedded_farm import EmbeddedFarm, about_store, visible_gpus
from tunemq_shared.protocol.messages import Environment

_lock = threading.Lock()
_idle: list[EmbeddedFarm] = []
_busy: list[EmbeddedFarm] = []


@contextmanager
def embedded_farm(
    cpus: int | None = None, *, prewarm: Environment | None = None, gpus: bool = False
) -> Iterator[EmbeddedFarm]:
    """Provide a farm of this script for one experiment: a warm one, or a new one.

    A node serves one experiment at a time, so concurrent searches in threads get a farm each. So
    does a search with other environment variables about stores, because a node takes their keys
    from its environment. Warm farms end with the script. Redis may still be starting: see
    `EmbeddedFarm`.

    Args:
        cpus: the CPUs that the node offers; see `EmbeddedFarm`.
        prewarm: the environment of the first trials; a new farm prepares it, a warm one ignores it.
        gpus: whether trials may request GPUs.

    Raises:
        ConfigError: see `EmbeddedFarm`.
    """
    farm = _take(cpus if cpus is not None else default_cpus(), prewarm, gpus)
    try:
        yield farm
    finally:
        _give_back(farm)


def _take(cpus: int, prewarm: Environment | None, gpus: bool) -> EmbeddedFarm:
    with _lock:
        while _idle:
            farm = _idle.pop()
            fits = farm.cpus == cpus and farm.about_store == about_store()
            has_gpus = not gpus or farm.visible_gpus == visible_gpus()
            if fits and has_gpus and farm.is_usable:
                break
            farm.stop()
        else:
            farm = EmbeddedFarm(cpus, prewarm=prewarm, gpus=gpus)
        _busy.append(farm)
        return farm


def _give_back(farm: EmbeddedFarm) -> None:
    with _lock:
        if farm not in _busy:  # this is a forked child of the script
            return
        _busy.remove(farm)
        if farm.is_usable:
            _idle.append(farm)
            return
    farm.stop()


@atexit.register
def stop_all() -> None:
    """End this script's farms; return when nothing of them is left."""
    with _lock:
        farms = [*_idle, *_busy]
        _idle.clear()
        _busy.clear()
    for farm in farms:
        farm.end_now()
    for farm in farms:
        farm.stop()


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    for farm in (*_idle, *_busy):
        farm.forget()
    _idle.clear()
    _busy.clear()


os.register_at_fork(after_in_child=_forget_in_child)
