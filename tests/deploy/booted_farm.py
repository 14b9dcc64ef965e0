"""A farm on `tests.deploy.booted_machines`, installed as docs/deploy/bare-metal.md describes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

from tests.deploy.booted_machines import Machine
from tests.support.waiting import eventually

PROJECT: Final = Path(__file__).parents[2]
#: The folder below root's home to which the tests copy the files for each machine.
CARRIED: Final = "/root/kit"
PAGE: Final = PROJECT / "docs" / "deploy" / "bare-metal.md"
#: Commands of the page to skip: their packages are installed, or need a network.
_NOT_HERE: Final = ("apt-get ", "tunemq-farm ")
#: Lets the head's root log in to the other machines as root.
_SSH: Final = """
install -d -m 700 /root/.ssh
test -e /root/.ssh/id_ed25519 || ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
echo 'StrictHostKeyChecking accept-new' > /root/.ssh/config
"""


def commands_of(section: str, prompt: str) -> str:
    """The commands after this prompt in a section of the page, as a script."""
    (text,) = re.findall(
        rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    lines = []
    is_ours = False
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith(prompt):
                is_ours = not line.removeprefix(prompt).strip().startswith(_NOT_HERE)
            elif not line.startswith(">"):
                is_ours = False
            if is_ours:
                lines.append(line.removeprefix(prompt).removeprefix(">").strip())
    assert lines, f"nothing to type in {section}"
    return "\n".join(["cd /root", *lines])


class BootedFarm:
    """A head and its workers.

    Args:
        head: has Redis, the store, the scheduler, and a user who submits.
        wheels: of TuneMQ and its dependencies.
    """

    def __init__(self, head: Machine, wheels: Path) -> None:
        self.head = head
        kit = head.root / CARRIED[1:]
        kit.mkdir()
        for name in ("install.sh", "systemd", "redis"):
            source = PROJECT / "deploy" / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, kit / name)
        shutil.copytree(wheels, kit / "wheels")
        head.sh(_SSH)
        head.sh(commands_of("The head", "head#"))
        head.run("useradd", "--create-home", "ada")
        self.install(head, "submitter", "--user", "ada", "--config", "/root/farm/ada")

    def admit(self, machine: Machine, name: str = "") -> None:
        """Allow root of the head to log in to a machine, by its name or another one."""
        key = self.head.sh("cat /root/.ssh/id_ed25519.pub")
        folder = machine.root / "root/.ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "authorized_keys").write_text(key)
        with (self.head.root / "etc/hosts").open("a") as hosts:
            hosts.write(f"{machine.address} {name or machine.name}\n")

    def install(self, machine: Machine, *arguments: str, wheels: str = "") -> str:
        """Run install.sh on a machine; return its output."""
        wheels = wheels or f"{CARRIED}/wheels"
        line = ["nice", "-n", "19", "sh", f"{CARRIED}/install.sh", *arguments, "--wheels", wheels]
        return machine.run(*line)

    def install_worker(self, machine: Machine, *arguments: str) -> str:
        """Install a worker on a machine that has all files."""
        return self.install(machine, "worker", "--config", "/root/worker", *arguments)

    # --- the user Ada -----------------------------------------------------------------------------

    def ada(self, *arguments: str, fails: bool = False, at: Machine | None = None) -> str:
        """Run a command as Ada, on the head by default."""
        line = ["runuser", "-u", "ada", "--", "env", "--chdir=/home/ada", "HOME=/home/ada"]
        return (at or self.head).run(*line, "tunemq-farm", *arguments, fails=fails)

    def submit(self, name: str, script: str, at: Machine | None = None) -> None:
        """Have the farm run a search."""
        ((at or self.head).root / f"home/ada/{name}.py").write_text(script)
        self.ada("submit", f"{name}.py", "--name", name, "--detach", at=at)

    def state(self, name: str) -> str:
        """The state of a search; empty if the farm does not list it."""
        rows = self._asked("ls").get("experiments", [])
        return next((str(row["state"]) for row in rows if row["name"] == name), "")

    def _asked(self, *command: str) -> dict[str, Any]:
        said = self.ada(*command, "--json", fails=True)
        answer: dict[str, Any] = json.loads(said) if said.startswith("{") else {}
        return answer

    def ends_well(self, name: str, within: float = 180.0) -> None:
        """Wait until a search has finished successfully."""
        eventually(
            lambda: self.state(name) == "FINISHED",
            within=within,
            every=0.5,
            message=lambda: f"{self.ada('show', name, fails=True)}{self}",
        )

    def results(self, name: str) -> list[dict[str, Any]]:
        """All lines of all trials of a search."""
        folder = self.head.root / f"var/lib/tunemq/results/{name}"
        files = sorted(folder.glob("*/result.json"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def has_steps(self, name: str, steps: int) -> None:
        """Wait until a search has `steps` results."""
        eventually(
            lambda: len(self.results(name)) >= steps,
            within=60,
            every=0.1,
            message=lambda: f"{self.ada('show', name, fails=True)}{self}",
        )

    def ready(self, *names: str) -> None:
        """Wait until these nodes are there."""

        def are_there() -> bool:
            nodes = self._asked("nodes").get("nodes", [])
            return {node["node"] for node in nodes if node["state"] == "ready"} >= set(names)

        eventually(are_there, within=90, every=0.5, message=lambda: f"no nodes {names}{self}")

    def __str__(self) -> str:
        said = self.head.run("journalctl", "--lines=30", "--output=cat", "-u", "tunemq-scheduler")
        return f"\n{self.ada('nodes', fails=True)}\n{said}"
