"""Checks the environment that an experiment asks for."""

from __future__ import annotations

from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.farm_requests import ExperimentEnvironment

#: The most characters of a value to show.
_SHOWN: Final = 80


def check_settings(settings: ExperimentEnvironment) -> None:
    """Reject settings with which no process can be started.

    Raises:
        ConfigError: a setting is invalid; names it and the valid values.
    """
    _check_python(settings.python)
    for name, value in settings.variables.items():
        if not name or "=" in name or "\0" in name:
            raise ConfigError(
                f"settings.variables: {_shown(name)} is not the name of a variable; use one "
                "that is not empty and has neither '=' nor NUL."
            )
        if "\0" in value:
            raise ConfigError(
                f"settings.variables: {_shown(name)} is {_shown(value)}; remove the NUL."
            )
    for module in settings.preload or ():
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(
                f"settings.preload: {_shown(module)} is not the name of a module; write it as "
                "in an import, such as package.module."
            )


def _check_python(python: str) -> None:
    if "\0" in python or ("/" in python and not python.startswith("/")):
        raise ConfigError(
            f"settings.python: {_shown(python)} is invalid; write an absolute path, such as "
            "/opt/venv/bin/python, or a plain name, such as python3."
        )


def _shown(value: str) -> str:
    return repr(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}...")
