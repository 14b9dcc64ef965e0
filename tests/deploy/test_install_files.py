"""The files that `install.sh` writes and removes, on an overlay of this machine.

The overlay has no running systemd and no network, and a package of a few lines in TuneMQ's place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.waiting import eventually

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
_TOOLS: Final = ("unshare", "nsenter", "chroot", "useradd", "setpriv", "getent")
_ENVIRON: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_INFO: Final = "tunemq-1.0.dist-info"
_FILES: Final = {
    "tunemq.py": "import os, sys\ndef main():\n    print(*sys.argv[1:], os.getuid())\n"
    "    print(*(os.environ.get(n, '') for n in ('TUNEMQ_REDIS', 'TUNEMQ_RESULTS')))\n"
    "    if sys.argv[1:] == ['sleep']:\n        os.execvp('sleep', ['sleep', '1000'])\n"
    "    try:\n        os.open('/dev/tty', os.O_RDWR)\n        print('has a terminal')\n"
    "    except OSError:\n        pass\n",
    f"{_INFO}/METADATA": "Metadata-Version: 2.1\nName: tunemq\nVersion: 1.0\n"
    "Provides-Extra: metrics\nProvides-Extra: gpu\nProvides-Extra: store\n",
    f"{_INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"
    "Tag: py3-none-any\n",
    f"{_INFO}/entry_points.txt": "[console_scripts]\ntunemq = tunemq:main\n",
}
#: Modules that the script's interpreters import; another user may own those in the current folder.
_MODULES: Final = ("compileall", "ensurepip", "os", "pip", "venv")
_LAYERS: Final = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs {folder}
cd {folder}
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
mount --rbind /proc root/proc
mount --rbind /dev root/dev
mount -t tmpfs tmpfs root/tmp
mount -t tmpfs tmpfs root/run
cp -r {given} root/tmp/given
touch root/tmp/ready
exec sleep infinity
"""


def make_wheel(folder: Path, addition: str = "") -> None:
    """A package named tunemq with one command, which prints its arguments and environment."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tunemq-1.0-py3-none-any.whl", "w") as archive:
        for name, text in _FILES.items():
            archive.writestr(name, text + (addition if name == "tunemq.py" else ""))
        names = [*_FILES, f"{_INFO}/RECORD"]
        archive.writestr(names[-1], "".join(f"{name},,\n" for name in names))


class View:
    """This machine's files, copied when they are written to, without its network."""

    def __init__(self, folder: Path) -> None:
        given, layers = folder / "given", folder / "layers"
        shutil.copytree(DEPLOY / "systemd", given / "systemd")
        shutil.copy(DEPLOY / "install.sh", given)
        make_wheel(given / "wheels")
        make_wheel(given / "newer", "    print('newer')\n")
        config = given / "config"
        config.mkdir()
        for name in _MODULES:
            (given / f"{name}.py").write_text("open('/tmp/executed', 'a').write(__name__)\n")
        (config / "environment").write_text("TUNEMQ_REDIS=redis://a?b&c=/etc/tunemq/ca.crt\n")
        for name in ("keys.toml", "ca.crt"):
            (config / name).write_text(name)
        layers.mkdir()
        script = _LAYERS.format(folder=layers, given=given)
        self._process = subprocess.Popen(["unshare", "-m", "-n", "sh", "-c", script])
        self._root = f"/proc/{self._process.pid}/root{layers}"
        eventually(lambda: Path(f"{self._root}/root/tmp/ready").exists(), within=60)
        self.sh("rm -rf /var/cache/tunemq")  # of a worker that root ran here

    def command(self, script: str) -> list[str]:
        """Return the command that runs lines of shell in the overlay."""
        inside = ["nsenter", "-t", str(self._process.pid), "-m", "-n", "chroot"]
        return [*inside, f"{self._root}/root", "sh", "-euc", script]

    def sh(self, script: str, code: int = 0) -> str:
        """Run lines of shell in the overlay; return their output."""
        ended = subprocess.run(
            self.command(script),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=_ENVIRON,
        )
        assert ended.returncode == code, ended.stdout
        return ended.stdout

    def install(self, line: str) -> str:
        """Run install.sh there; none of the current folder's modules may be executed."""
        return self.sh(f"cd /tmp/given && sh install.sh {line}; [ ! -e /tmp/executed ]")

    def paths(self) -> set[str]:
        """All that could be TuneMQ's."""
        script = "find /etc /opt /usr /var/lib /var/cache -name '*tunemq*'"
        found = set(self.sh(script).split())
        return found | set(self.sh("getent passwd | grep tunemq || true").splitlines())

    def close(self) -> None:
        """Remove the overlay."""
        self._process.kill()
        self._process.wait()


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root, and {', '.join(_TOOLS)}")
    made = View(tmp_path)
    yield made
    made.close()


def test_worker_is_installed_and_removed_without_systemd(view: View):
    before = view.paths()
    line = "worker --wheels wheels --config config"

    said = view.install(line)
    assert "systemd is not running here" in said
    assert (
        "  env PATH=/opt/tunemq/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        " /usr/local/bin/tunemq-farm worker --workdir /var/cache/tunemq/worker --grace 30"
        " --trial-user tunemq-trials" in said
    )
    modes = view.sh("cd /etc/tunemq && stat -c '%U %a %n' . *").splitlines()
    assert set(modes) == {
        *("root 755 .", "root 640 environment", "root 600 keys.toml", "root 644 ca.crt")
    }
    assert view.sh("tunemq-farm ls").splitlines() == ["ls 0", "redis://a?b&c=/etc/tunemq/ca.crt "]
    home = view.sh("stat -c '%U %a' ~tunemq-trials").strip()
    assert home == "tunemq-trials 700"

    said = view.install(line)
    assert "is up to date" in said
    assert "wrote" not in said

    # A new version, and a worker that no service runs.
    runs = "/opt/tunemq/bin/python -c 'import time; time.sleep(600)' & cd /tmp/given"
    line = f"{runs}; code=0; sh install.sh worker --wheels newer || code=$?; kill $!; exit $code"
    said = view.sh(line, code=1)
    assert "cannot upgrade /opt/tunemq while its processes run: " in said
    assert "newer" not in view.sh("tunemq-farm ls")

    assert "installed tunemq==1.0" in view.install("worker --wheels newer --gpu --same-user")
    assert "newer" in view.sh("tunemq-farm ls")
    drop_ins = view.sh("ls /etc/systemd/system/tunemq-worker*.d").split()
    assert drop_ins.count("gpu.conf") == drop_ins.count("same-user.conf") == 2
    assert view.sh("stat -c %U /etc/tunemq/keys.toml").strip() == "tunemq"
    assert view.sh("stat -c '%U %G' /etc/tunemq/environment").strip() == "root tunemq"

    # Any user can make such a link, and the script runs with root's rights.
    view.sh("mkdir /tmp/precious && touch /tmp/precious/file")
    view.sh("mount -t tmpfs tmpfs /dev/shm && ln -s /tmp/precious /dev/shm/tunemq-gpu-root")
    # An administrator's own installation, and a worker that no service runs.
    view.sh("mkdir -p /opt/tunemq/venv /var/cache/tunemq/mine && touch /opt/tunemq/venv/file")
    held = "cd /var/cache/tunemq/mine && echo 77 > lock && flock lock"
    said = view.sh(f"{held} sh /opt/tunemq/share/install.sh uninstall", code=1)
    assert "process 77, a worker that no service runs, works in /var/cache/tunemq/mine" in said
    trials = "/var/cache/tunemq/home/models /var/cache/tunemq/mine/trials/unsent-1"
    view.sh(f"mkdir -p {trials} /var/cache/tunemq/mine/cache && ln -s /tmp/precious {trials}")
    said = view.sh("sh /opt/tunemq/share/install.sh uninstall")
    assert "left /opt/tunemq, which has other files" in said
    assert "left /var/cache/tunemq, which has files of trials" in said
    assert view.sh("cd /var/cache/tunemq && ls . mine mine/trials home").split() == [
        *(".:", "home", "mine", "home:", "models", "mine:", "trials", "mine/trials:", "unsent-1")
    ]
    view.sh("rm -r /var/cache/tunemq")
    assert view.sh("cd /opt/tunemq && find . | sort").split() == [".", "./venv", "./venv/file"]
    view.sh("rm -r /opt/tunemq/venv && rmdir /opt/tunemq")
    assert view.sh("ls /tmp/precious").split() == ["file"]
    assert view.sh("cat /etc/tunemq/keys.toml") == "keys.toml"
    assert {path for path in view.paths() - before if path.startswith(("/opt", "/usr"))} == set()
    cache = "/var/cache/tunemq"
    view.sh(f"mkdir {cache} && mount -t tmpfs tmpfs {cache} && mkdir {cache}/worker")
    said = view.sh("cd /tmp/given && sh install.sh uninstall --purge")
    assert f"left {cache}" in said
    assert view.sh(f"ls {cache} && umount {cache} && rmdir {cache}") == ""
    assert view.paths() == before
    view.sh("cd /tmp/given && sh install.sh uninstall --purge")  # there is nothing: no harm


def test_python_that_is_not_there_differs_or_serves_root_alone_is_refused(view: View):
    base = view.sh("readlink -f $(command -v python3)").strip()
    view.sh(f"mkdir -m 0700 /opt/private && cp {base} /opt/private/python")
    refused = "cd /tmp/given && sh install.sh scheduler --wheels wheels --config config --python"
    assert "--python /nowhere/python not found" in view.sh(f"{refused} /nowhere/python", 1)
    said = view.sh(f"{refused} /opt/private/python", 1)
    assert "only root can run /opt/private/python, but services have other users" in said
    view.install("scheduler --wheels wheels --config config --python python3")
    assert "--python /nowhere/python not found" in view.sh(f"{refused} /nowhere/python", 1)
    said = view.sh(f"{refused} /opt/private/python", 1)
    assert f"/opt/tunemq uses {base}: to replace it, run `install.sh uninstall`" in said
    view.sh("chmod 0700 /opt/tunemq/bin")
    said = view.sh(f"{refused} python3", 1)
    assert f"only root can run {base}, which /opt/tunemq uses" in said


def test_head_that_also_works_and_has_a_submitter_is_installed(view: View):
    view.install("scheduler --wheels wheels --config config")
    view.sh("useradd --create-home ada-of-a-test")
    said = view.install("worker --wheels wheels --config config")
    assert "/bin TUNEMQ_CONFIG=/etc/tunemq/worker /usr/local/bin/tunemq-farm worker" in said
    view.install("submitter --wheels wheels --config config --user ada-of-a-test")
    owners = view.sh("stat -c '%U %n' /etc/tunemq/keys.toml /etc/tunemq/worker/keys.toml")
    assert owners.split() == [
        *("tunemq", "/etc/tunemq/keys.toml", "root", "/etc/tunemq/worker/keys.toml")
    ]
    assert "c=/etc/tunemq/worker/ca.crt" in view.sh("cat /etc/tunemq/worker/environment")
    number = view.sh("id -u tunemq").strip()
    assert view.sh("tunemq-farm doctor").splitlines() == [
        f"doctor {number}",  # root switches to the file's user
        "redis://a?b&c=/etc/tunemq/ca.crt /var/lib/tunemq/results",
    ]
    theirs = view.sh(
        "number=$(id -u ada-of-a-test); home=$(getent passwd $number | cut -d : -f 6);"
        " setpriv --reuid $number --clear-groups env HOME=$home tunemq-farm ls; id -u ada-of-a-test"
    ).split()
    assert theirs[0] == "ls"
    assert theirs[1] == theirs[-1]
    assert "/ada-of-a-test/.config/tunemq/ca.crt" in theirs[2]
    modes = view.sh("stat -c '%a %n' ~ada-of-a-test/.config/tunemq ~ada-of-a-test/.config/tunemq/*")
    assert {line.split()[0] for line in modes.splitlines()} == {"700", "600"}
    assert len(modes.splitlines()) == 4, modes


def test_command_that_root_runs_as_another_user_cannot_type_into_roots_terminal(view: View):
    view.install("scheduler --wheels wheels --config config")
    at_a_terminal = "script --quiet --return --command {} /dev/null < /dev/null"
    assert "has a terminal" in view.sh(at_a_terminal.format("'/opt/tunemq/bin/tunemq x'"))
    said = view.sh(at_a_terminal.format("'tunemq-farm doctor'"))
    assert "doctor" in said
    assert "has a terminal" not in said
    # Ctrl-C reaches the process in the terminal, and with it the command.
    view.sh(
        "(until pid=$(pgrep -u tunemq sleep); do sleep 0.1; done; kill -INT $(ps -o ppid= $pid)) &"
        " script --quiet --command 'tunemq-farm sleep' /dev/null < /dev/null > /dev/null;"
        " while pgrep -u tunemq sleep; do sleep 0.1; done"
    )


def test_printed_commands_of_a_head_run_as_its_user_with_options_and_folders(view: View):
    for role, options in [
        ("store", "--listen 192.0.2.1:7380 --cert /c.crt --key /c.key"),
        ("scheduler", "--store s3://tunemq/farm?a=b&c=d --metrics 127.0.0.1:9464"),
    ]:
        line = f"TUNEMQ_{role.upper()}_OPTIONS={options}"
        view.sh(f"echo '{line}' >> /tmp/given/config/environment")
        said = view.install(f"{role} --wheels wheels --config config")
        command = said[said.index("restart it when it ends:\n") :].splitlines()[1]
        ran = view.sh(command).splitlines()[0].split()
        assert ran[-1] == view.sh("id -u tunemq").strip()
        assert " ".join(options.split()) in " ".join(ran)
    folders = view.sh("stat -c '%U %G %a %n' /var/lib/tunemq /var/lib/tunemq-store")
    assert folders.splitlines() == [
        *("tunemq tunemq 750 /var/lib/tunemq", "tunemq tunemq 700 /var/lib/tunemq-store")
    ]


#: The files of a worker of the user tunemq, with links that its trials may have made.
_WORKDIR: Final = """
touch /var/cache/precious
cd /var/cache/tunemq
setpriv --reuid tunemq --regid tunemq --clear-groups sh -euc '
    mkdir -m 0700 -p worker/logs worker/cache/deep
    touch worker/logs/node.log worker/cache/deep/file
    ln -s /var/cache/precious worker/logs/link
    ln -s /var/cache worker/cache/link
'
ln /var/cache/precious worker/logs/hard
"""
#: Such a worker, as far as it locks its folder.
_WORKER: Final = """
exec setpriv --reuid tunemq --regid tunemq --clear-groups /opt/tunemq/bin/python -c '
import fcntl, os, time
lock = open("/var/cache/tunemq/worker/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print(os.getpid(), file=lock, flush=True)
time.sleep(3600)
'
"""


@pytest.mark.timeout(1200)  # it installs five times
def test_printed_command_of_a_same_user_worker_finds_its_folders(view: View):
    view.install("worker --wheels wheels --config config --same-user")
    folders = view.sh("stat -c '%U %a %n' /var/cache/tunemq /var/lib/tunemq")
    assert folders.splitlines() == ["tunemq 755 /var/cache/tunemq", "tunemq 750 /var/lib/tunemq"]
    separate = "cd /tmp/given && sh install.sh worker --wheels wheels --separate-user"
    view.sh(_WORKDIR)
    worker = subprocess.Popen(view.command(_WORKER), env=_ENVIRON)
    try:
        lock = "cat /var/cache/tunemq/worker/lock || true"
        eventually(lambda: f"{worker.pid}\n" == view.sh(lock), within=60)
        said = view.sh(separate, 1)
        assert f"process {worker.pid}, a worker of the user tunemq, uses it" in said
        assert f"stop it (kill {worker.pid}) and run this again" in said
        owners = view.sh("stat -c %U /var/cache/tunemq /etc/tunemq/keys.toml").split()
        assert owners == ["tunemq", "tunemq"]
        view.install("worker --wheels wheels")  # the user stays
    finally:
        worker.kill()
        worker.wait()
    assert "--trial-user tunemq-trials" in view.sh(separate)
    foreign = "cd /var/cache/tunemq && find . ! -user {} | sort"
    assert view.sh(foreign.format("root")).split() == ["./worker/cache/link", "./worker/logs/link"]
    view.install("worker --wheels wheels --same-user")
    assert view.sh(foreign.format("tunemq")).split() == ["./worker/logs/hard"]
    assert view.sh("stat -c %U /var/cache /var/cache/precious").split() == ["root", "root"]


def test_existing_users_and_commands_are_left(view: View):
    view.sh("useradd --system tunemq; echo theirs > /usr/local/bin/tunemq")
    before = view.paths()
    assert "left /usr/local/bin/tunemq" in view.install("worker --wheels wheels --config config")
    view.sh("cd /tmp/given && sh install.sh uninstall --purge")
    assert view.paths() == before
    assert view.sh("cat /usr/local/bin/tunemq") == "theirs\n"


def test_files_in_the_parent_folder_are_not_trusted(view: View):
    view.sh("echo tunemq==0.1 > /tmp/constraints.txt; touch /tmp/pyproject.toml; chmod 1777 /tmp")
    view.install("worker --wheels wheels --config config")
    said = view.sh("cd /tmp/given && sh install.sh worker", 1)
    assert "is not in a checkout of TuneMQ" in said


def test_missing_configuration_is_explained(view: View):
    said = view.install("scheduler --wheels wheels")
    assert "fill in /etc/tunemq/environment, then run this again" in said
    text = view.sh("cat /etc/tunemq/environment")
    lines = [line for line in text.splitlines() if "=" in line]
    assert lines[1].startswith("#TUNEMQ_REDIS=rediss://scheduler:PASSWORD@")
    assert all(line.startswith("#") for line in lines)
    said = view.sh("mkdir /tmp/none && cd /tmp/given && sh install.sh worker --wheels /tmp/none", 1)
    assert "contains no tunemq-*.whl" in said
