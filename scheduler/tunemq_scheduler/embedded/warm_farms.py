"""Which embedded farms this script has: a second ``fit()`` finds the first one's still warm."""

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
    """This script's farm for the length of one experiment: the warm one, or a new one.

    A node serves one experiment at a time, so searches that run side by side, in threads, get a
    farm each. So does one for which the environment says something else about stores: a node has
    their keys from there. Warm farms end with the script. Redis may still be starting: see
    `EmbeddedFarm`.

    Args:
        cpus: what the node offers; see `EmbeddedFarm`.
        prewarm: what the first trials will need; a new farm gets ready for it meanwhile, a warm
            one takes no notice.
        gpus: whether trials may ask for GPUs.

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
        if farm not in _busy:  # the script forked, and this is the child
            return
        _busy.remove(farm)
        if farm.is_usable:
            _idle.append(farm)
            return
    farm.stop()


@atexit.register
def stop_all() -> None:
    """End this script's farms; returns when nothing of them is left."""
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
