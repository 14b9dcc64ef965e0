"""The command lines and the environment of the watchdog and the embedded node."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from tunemq_shared.base.errors import ConfigError

#: All packages of TuneMQ; a source checkout has each in a separate folder.
_PACKAGES: Final = ("tunemq", "tunemq_shared", "tunemq_scheduler", "tunemq_workers")
#: Folders in every interpreter's path; before the standard library they would shadow it.
_SITE_FOLDERS: Final = ("site-packages", "dist-packages")
_ENTER: Final = (
    "import sys; sys.path += sys.argv.pop(1), sys.argv.pop(1);"
    " from tunemq_scheduler.embedded.watchdog import main; main()"
)


def watchdog_command(
    folder: str, control: int, script: int, services: dict[str, Sequence[str]]
) -> list[str]:
    """Return the watchdog's command: isolated and without `site`, which halves its start."""
    command = [sys.executable, "-I", "-S", "-c", _ENTER]
    command += [_folder_of("tunemq_scheduler"), _folder_of("tunemq_shared")]
    command += [folder, str(control), str(script)]
    for name, argv in services.items():
        command += [f"{name}:{len(argv)}", *argv]
    return command


def node_command(
    url: str,
    workdir: str,
    watchdog: str,
    cpus: int,
    prewarm: str | None = None,
    *,
    gpus: bool = False,
) -> list[str]:
    """Return the command of an embedded node; ``watchdog`` is the pid that it watches.

    ``prewarm`` is a file with an environment for which it prepares a forkserver early. With
    ``gpus`` it offers those that the script may use; otherwise it asks no driver, which may be
    slow.
    """
    command = [sys.executable, "-P", "-m", "tunemq_workers.node.node_process", "--redis", url]
    command += ["--name", "local", "--workdir", workdir]
    command += ["--watch-pid", watchdog, "--cpus", str(cpus)]
    if not gpus:
        command += ["--gpus", "0"]
    if prewarm is not None:
        command += ["--prewarm", prewarm]
    return command


def environment() -> dict[str, str]:
    """Return the script's environment, with TuneMQ on PYTHONPATH unless `site` finds it."""
    environ = dict(os.environ)
    given = environ.get("PYTHONPATH", "")
    parts = given.split(os.pathsep) if given else []
    for folder in dict.fromkeys(_source_folders()):
        if folder not in parts:
            parts.append(folder)
    if parts:
        environ["PYTHONPATH"] = os.pathsep.join(parts)
    return environ


def default_cpus() -> int:
    """Return ``$TUNEMQ_CPUS``, or the number of CPUs that this process may use.

    Raises:
        ConfigError: ``$TUNEMQ_CPUS`` is not a positive whole number.
    """
    text = os.environ.get("TUNEMQ_CPUS")
    if not text:
        return len(os.sched_getaffinity(0))
    try:
        cpus = int(text)
    except ValueError:
        cpus = 0
    if cpus < 1:
        raise ConfigError(f"TUNEMQ_CPUS is {text!r}; it must be a positive whole number, or unset.")
    return cpus


def _source_folders() -> Iterator[str]:
    for package in _PACKAGES:
        folder = _folder_of(package)
        if os.path.basename(folder) not in _SITE_FOLDERS:
            yield folder


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise ConfigError(f"The package {package} is not installed; install tunemq as a whole.")
    return os.path.dirname(os.path.abspath(next(iter(places))))
