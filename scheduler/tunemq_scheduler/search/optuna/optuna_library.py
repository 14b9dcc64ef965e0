"""Imports Optuna on first use, keeps it from logging, and converts its flat parameter names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from tunemq_shared.base.errors import ConfigError


def import_optuna(who: str) -> ModuleType:
    """Import Optuna.

    Raises:
        ConfigError: Optuna is not installed; the message names the class ``who``, which needs it.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"{who} needs Optuna, which is not installed: pip install 'optuna>=4'"
        ) from error
    module: ModuleType = optuna
    return module


@contextlib.contextmanager
def quiet(optuna: ModuleType) -> Iterator[None]:
    """Keep Optuna from logging every study and trial to the terminal."""
    logging = optuna.logging
    before = logging.get_verbosity()
    logging.set_verbosity(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.set_verbosity(before)


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts from names joined by ``/``."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split("/") if isinstance(name, str) else [name]
        node = nested
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = value
    return nested
