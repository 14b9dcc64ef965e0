"""Run `tunemq` commands without the third of a second in which Python imports their modules.

A process that has imported the modules forks for each command. From there on the command is like
any other: it has its arguments, environment, folder, standard streams and exit code. Commands that
get signals, or that run beside others, start as normal processes instead.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.support.stores.object_servers import SERVER_PIDS

#: A string, not a file, so that the process imports nothing of `tests`.
_FORKS: Final = """
import faulthandler, gc, json, os, runpy, sys

import tunemq_scheduler.cli.main, tunemq_workers.node.worker_command
import tunemq_scheduler.api.farm_client, tunemq_shared.objects.s3_client  # imported late

gc.freeze()


def command():
    for line in sys.stdin.buffer:
        pid = os.fork()
        if not pid:
            return json.loads(line)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


if (told := command()) is not None:
    for number, path in enumerate(told["streams"]):
        file = os.open(path, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable()  # what crashes the process is said among what the command says
    sys.stdin = open(0, closefd=False)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environ"])
    sys.path[0] = told["folder"]
    sys.argv[1:] = told["arguments"]
    runpy.run_module("tunemq", run_name="__main__", alter_sys=True)
"""


class WarmCommands:
    """Run commands one after another.

    Args:
        before: prefix of the forking process's command line, such as a program that enters another
            network.
        environ: of the forking process; each command has a separate one.
    """

    def __init__(self, environ: Mapping[str, str], before: Sequence[str] = ()) -> None:
        self._one_at_a_time = threading.Lock()
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", _FORKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environ),
        )
        SERVER_PIDS.add(self.process.pid)

    def run(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        *,
        said: str = "",
        timeout: float = 150.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``tunemq`` with these arguments to its end.

        Args:
            said: its standard input.
        """
        with self._one_at_a_time, tempfile.TemporaryDirectory(prefix="tq-") as streams:
            paths = [Path(streams, name) for name in ("in", "out", "err")]
            for path, text in zip(paths, (said, "", ""), strict=True):
                path.write_text(text, encoding="utf-8")
            told: dict[str, Any] = {
                "arguments": list(arguments),
                "environ": dict(environ),
                "folder": str(folder),
                "streams": list(map(str, paths)),
            }
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps(told).encode() + b"\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], timeout)[0]:
                self.process.kill()
                raise subprocess.TimeoutExpired(list(arguments), timeout)
            code = int(self.process.stdout.readline())
            out, err = (path.read_text(encoding="utf-8") for path in paths[1:])
        return subprocess.CompletedProcess(["tunemq", *arguments], code, out, err)

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
        SERVER_PIDS.discard(self.process.pid)
