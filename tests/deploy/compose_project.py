"""One project of docker-compose.yml on Docker itself: runs commands and records their output.

    run = Run(folder)               # with new ports and names
    run.compose("up", "--detach")
    run.eventually("every service is healthy", lambda: run.are_well(1))

All commands and output go to standard output and to a transcript.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.farms.farm_processes import free_port

REPOSITORY: Final = Path(__file__).parents[2]
#: Services without a profile that run for ever.
SERVING: Final = ("redis", "minio", "proxy", "scheduler", "worker")
#: Generous for busy machines; waits end as soon as their condition holds.
TIMEOUT_S: Final = 300.0
_SHOWN_LINES: Final = 16


class Failed(Exception):
    """A promise of the page does not hold."""


class Run:
    """A new Compose project: runs commands and records their output.

    Args:
        folder: for a user's files.
        transcript: file for all commands and output, in addition to standard output.
    """

    def __init__(self, folder: Path, transcript: Path | None = None) -> None:
        self.folder = folder
        self.project = f"tunemq-{secrets.token_hex(3)}"
        self.variables = {
            "COMPOSE_PROJECT_NAME": self.project,
            "TUNEMQ_SUBMITTERS": "ada",
            "TUNEMQ_REDIS_PORT": str(free_port()),
            "TUNEMQ_STORE_PORT": str(free_port()),
            "TUNEMQ_WORKER_CPUS": "0",
            "COMPOSE_PROFILES": "",
        }
        self._transcript = transcript.open("w", encoding="utf-8") if transcript else None
        self._began = time.monotonic()

    # --- commands ---------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A line of the transcript."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        if self._transcript:
            self._transcript.write(f"{text}\n")
            self._transcript.flush()

    def title(self, text: str) -> None:
        """Write a heading."""
        self.say(f"\n## {text} ({time.monotonic() - self._began:.0f} s)\n")

    def typed(
        self,
        *line: str,
        fails: bool = False,
        is_shown: bool = True,
        cwd: Path = REPOSITORY,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command; return its output.

        Raises:
            Failed: it fails, or succeeds although it should fail.
        """
        beside = sysconfig.get_path("scripts")
        path = f"{beside}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, **self.variables, **(variables or {})}
        done = subprocess.run(
            line, check=False, capture_output=True, text=True, cwd=cwd, env=environ, timeout=900
        )
        said = done.stdout + (done.stderr if fails or done.returncode else "")
        if is_shown:
            self.say(f"$ {shlex.join(line)}")
            lines = (said or _last_states(done.stderr)).splitlines()
            if (more := len(lines) - _SHOWN_LINES) > 1:  # the beginning, and the end
                half = _SHOWN_LINES // 2
                lines[half:-half] = [f"... ({more} more lines)"]
            for one in lines:
                self.say(f"    {one[:160]}")
        if (done.returncode != 0) is not fails:
            raise Failed(f"{shlex.join(line)}: exit code {done.returncode}: {done.stderr}")
        return said

    def compose(self, *line: str, fails: bool = False, is_shown: bool = True) -> str:
        """`docker compose ...`."""
        return self.typed("docker", "compose", *line, fails=fails, is_shown=is_shown)

    def up(self, workers: int) -> None:
        """Run `up`, with `workers` workers in the settings from now on."""
        self.variables["TUNEMQ_WORKERS"] = str(workers)
        self.compose("up", "--detach", "--no-build")
        self.eventually(
            f"every service is healthy, with {workers} workers", lambda: self.are_well(workers)
        )

    def tunemq(
        self, *line: str, who: str = "ada", fails: bool = False, is_shown: bool = True
    ) -> str:
        """`tunemq ...` of a person outside."""
        program = str(self.folder / f"tunemq-{who}" / "with")
        return self.typed(program, "tunemq", *line, fails=fails, is_shown=is_shown, cwd=self.folder)

    def asked(self, *line: str) -> Any:
        """The same, with output for a program."""
        return json.loads(self.tunemq(*line, "--json", is_shown=False))

    def eventually(
        self, what: str, condition: Callable[[], bool], within: float = TIMEOUT_S
    ) -> None:
        """Wait.

        Raises:
            Failed: it did not come true in time.
        """
        deadline = time.monotonic() + within
        while not condition():
            if time.monotonic() > deadline:
                raise Failed(f"{what}: not within {within:g} s")
            time.sleep(1)  # between two checks, each of which costs a process or two
        self.say(f"  seen: {what}")

    # --- observations -----------------------------------------------------------------------------

    def containers(self) -> list[dict[str, Any]]:
        """All containers of the project."""
        said = self.compose("ps", "--all", "--format", "json", is_shown=False)
        if said.startswith("["):  # older ones
            found: list[dict[str, Any]] = json.loads(said)
            return found
        return [json.loads(line) for line in said.splitlines()]

    def are_well(self, workers: int) -> bool:
        """Whether every service is healthy, with `workers` healthy workers."""
        well = [one["Service"] for one in self.containers() if one["Health"] == "healthy"]
        return set(well) == set(SERVING) and well.count("worker") == workers

    def nodes(self) -> list[str]:
        """The names of the ready nodes."""
        return [node["node"] for node in self.asked("nodes")["nodes"] if node["state"] == "ready"]

    def container_of(self, node: str) -> str:
        """Return the id of the container whose worker has this name.

        Raises:
            Failed: no container has such a worker.
        """
        for container in self.ids("ps"):
            said = self.typed("docker", "top", container, "-o", "pid,args", is_shown=False)
            if f"--name {node} " in said:
                return container
        raise Failed(f"no container runs the worker {node}")

    def shown(self, name: str) -> dict[str, Any]:
        """A search, with its trials."""
        found: dict[str, Any] = self.asked("show", name)
        return found

    def copy(self, who: str) -> Path:
        """Copy the files that `setup` made for an outside user to that user's folder."""
        target = self.folder / f"tunemq-{who}"
        shutil.rmtree(target, ignore_errors=True)
        self.compose("cp", f"setup:/secrets/outside/{who}", str(target))
        return target

    def ids(self, *line: str) -> list[str]:
        """Of containers or volumes of this project."""
        mark = f"label=com.docker.compose.project={self.project}"
        return self.typed("docker", *line, "--quiet", "--filter", mark, is_shown=False).split()

    def nameless_volumes(self) -> list[str]:
        """Volumes of containers that the file does not name, which Compose would never remove."""
        said = self.typed("docker", "inspect", *self.ids("ps", "--all"), is_shown=False)
        mounts = [mount for container in json.loads(said) for mount in container["Mounts"]]
        names = [mount["Name"] for mount in mounts if mount["Type"] == "volume"]
        return [name for name in names if not name.startswith(f"{self.project}_")]


def _last_states(progress: str) -> str:
    """The last state of each container in Compose's progress output."""
    ends = ("Started", "Healthy", "Exited", "Removed", "Created", "Running", "Copied", "Recreated")
    seen: dict[str, str] = {}
    for line in progress.splitlines():
        words = line.split()
        if words and words[-1] in ends:
            seen[" ".join(words[:-1])] = words[-1]
    return "\n".join(f"{what}  {state}" for what, state in seen.items())
