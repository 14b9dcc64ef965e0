"""Pods as Kubernetes would run them, in Docker: volumes, users, side containers, probes.

A kubelet's part, as far as the chart uses it. Secrets look as they do there: links to files of
root, which the pod's group may read. Claims are folders. Memory is limited, processors are not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any, Final

from tests.support.waiting import eventually

_GROUP: Final = 10001

Manifest = dict[str, Any]


def docker(*arguments: str, check: bool = True, within: float = 120.0) -> str:
    """Run Docker; return its output and errors."""
    done = subprocess.run(
        ["docker", *arguments],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within,
    )
    if check and done.returncode:
        raise AssertionError(f"docker {' '.join(arguments)}:\n{done.stdout}")
    return done.stdout


class Namespace:
    """A network, Secrets and claims; ``close`` removes all that was started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"tunemq-test-{uuid.uuid4().hex[:8]}"
        self.secrets: dict[str, Path] = {}
        self.config_maps: dict[str, Path] = {}
        self._containers: list[str] = []
        docker("network", "create", self.name)

    def close(self) -> None:
        for container in reversed(self._containers):
            docker("rm", "-f", "-v", container, check=False)
        docker("network", "rm", self.name, check=False)

    def secret(self, name: str, files: Path) -> None:
        """Make or change a Secret from a folder of files; in pods that run, too."""
        place = self.folder / "secrets" / name
        data = place / f"..{uuid.uuid4().hex}"
        data.mkdir(parents=True)
        for file in files.iterdir():
            shutil.copyfile(file, data / file.name)
            _give(data / file.name, 0o440)
            link = place / file.name
            if not link.is_symlink():
                link.symlink_to(f"..data/{file.name}")
        _give(data, 0o750)
        _give(place, 0o750)
        new = place / "..new"
        new.symlink_to(data.name)
        new.rename(place / "..data")
        self.secrets[name] = place

    def config_map(self, manifest: Manifest) -> None:
        """Make a ConfigMap."""
        name = manifest["metadata"]["name"]
        self.config_maps[name] = place = self.folder / "config-maps" / name
        place.mkdir(parents=True)
        for key, text in manifest["data"].items():
            (place / key).write_text(text)
            _give(place / key, 0o444)
        _give(place, 0o755)

    def start(self, manifest: Manifest, pod: Manifest, *aliases: str, number: int = 0) -> Pod:
        """Start a pod of a Deployment or StatefulSet, or a Pod, and wait for its startup probes."""
        return Pod(self, manifest, pod, aliases, number)

    def run(self, *arguments: str) -> str:
        """Start a container; returns its name."""
        name = f"{self.name}-{len(self._containers)}"
        self._containers.append(name)
        docker("run", "-d", "--name", name, *arguments)
        return name


class Pod:
    """A pod, with its volumes in folders."""

    def __init__(
        self,
        namespace: Namespace,
        manifest: Manifest,
        pod: Manifest,
        aliases: tuple[str, ...],
        number: int,
    ) -> None:
        self.name = f"{manifest['metadata']['name']}-{number}"
        self._namespace = namespace
        self._pod = pod
        self._claims = [
            one["metadata"]["name"] for one in manifest["spec"].get("volumeClaimTemplates", ())
        ]
        self._folder = namespace.folder / "pods" / self.name
        self._containers: dict[str, str] = {}
        for container in pod.get("initContainers", ()):
            assert container["restartPolicy"] == "Always"
            self._start(container, "--network", "none")
        [main] = pod["containers"]
        network = ["--network", namespace.name]
        for alias in aliases:
            network += ["--network-alias", alias]
        self._main = main["name"]
        self._start(main, *network, "--hostname", self.name)

    def execute(self, *command: str, check: bool = True, container: str = "") -> str:
        """Run a command in a container of the pod, its main one unless another is named."""
        return docker("exec", self._containers[container or self._main], *command, check=check)

    def probe(self, kind: str) -> bool:
        """Whether a probe of the main container succeeds."""
        [main] = self._pod["containers"]
        return self._probe(main, kind)

    def logs(self, container: str = "") -> str:
        """The output of a container."""
        return docker("logs", self._containers[container or self._main], check=False)

    def stop(self) -> int:
        """End it as Kubernetes does, the side containers last; returns the main one's exit code."""
        grace = self._pod.get("terminationGracePeriodSeconds", 30)
        for name in [self._main, *(one for one in self._containers if one != self._main)]:
            docker("stop", "-t", str(grace), self._containers[name], within=grace + 60.0)
        return self.wait()

    def wait(self) -> int:
        """Wait until the main container has ended; returns its exit code."""
        return int(docker("wait", self._containers[self._main]))

    def _start(self, container: Manifest, *more: str) -> None:
        security = self._pod["securityContext"]
        arguments = [
            *more,
            *("--user", f"{security['runAsUser']}:{security['runAsGroup']}"),
            *("--memory", _bytes(container["resources"]["limits"]["memory"])),
        ]
        if container["securityContext"]["readOnlyRootFilesystem"]:
            arguments += ["--read-only"]
        for capability in container["securityContext"]["capabilities"]["drop"]:
            arguments += ["--cap-drop", capability]
        if not container["securityContext"]["allowPrivilegeEscalation"]:
            arguments += ["--security-opt", "no-new-privileges"]
        for variable in container.get("env", ()):
            arguments += ["--env", f"{variable['name']}={variable['value']}"]
        for mount in container["volumeMounts"]:
            how = ":ro" if mount.get("readOnly") else ""
            arguments += ["--volume", f"{self._volume(mount)}:{mount['mountPath']}{how}"]
        if "workingDir" in container:
            arguments += ["--workdir", container["workingDir"]]
        command = [*container.get("command", ()), *container.get("args", ())]
        if "command" in container:
            arguments += ["--entrypoint", command.pop(0)]
        started = self._namespace.run(*arguments, container["image"], *command)
        self._containers[container["name"]] = started
        if "startupProbe" in container:
            eventually(
                lambda: self._probe(container, "startup"),
                within=90,
                every=0.5,
                message=lambda: (
                    f"{container['name']} does not start: {self.logs(container['name'])}"
                ),
            )

    def _probe(self, container: Manifest, kind: str) -> bool:
        command = container[f"{kind}Probe"]["exec"]["command"]
        done = subprocess.run(
            ["docker", "exec", self._containers[container["name"]], *command],
            check=False,
            capture_output=True,
        )
        return done.returncode == 0

    def _volume(self, mount: Manifest) -> Path:
        name = mount["name"]
        if name in self._claims:
            return self._made(self._folder / name, mount)
        [volume] = [one for one in self._pod["volumes"] if one["name"] == name]
        if "secret" in volume:
            return self._secret(volume["secret"])
        if "configMap" in volume:
            return self._namespace.config_maps[volume["configMap"]["name"]]
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            return self._made(self._namespace.folder / "claims" / claim, mount)
        if "emptyDir" in volume:
            return self._made(self._folder / name, mount)
        raise AssertionError(f"a volume of another kind: {volume}")

    def _secret(self, volume: Manifest) -> Path:
        place = self._namespace.secrets[volume["secretName"]]
        if "items" not in volume:
            return place
        chosen = self._folder / str(volume["secretName"])
        for item in volume["items"]:
            path = chosen / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(place / item["key"], path)
            _give(path, 0o440)
            _give(path.parent, 0o750)
        _give(chosen, 0o750)
        return chosen

    def _made(self, folder: Path, mount: Manifest) -> Path:
        """A folder for everybody of the pod; a part of it stays as the pod has made it."""
        for place in (folder, folder / str(mount.get("subPath", ""))):
            if not place.exists():
                place.mkdir(parents=True)
                _give(place, 0o2777)
        return place


def _give(path: Path, mode: int) -> None:
    os.chown(path, 0, _GROUP)
    path.chmod(mode)


def _bytes(amount: str) -> str:
    return amount.removesuffix("i").lower()
