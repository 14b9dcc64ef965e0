"""What a trial's code finds around it, from its process group to its random numbers."""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType

from tunemq_shared.base import failpoints
from tunemq_shared.checkpoints.checkpoint_folders import remove_leftovers
from tunemq_shared.protocol.messages import TrialSpec
from tunemq_shared.protocol.trial_limits import TrialLimitSpec
from tunemq_shared.system.process_control import (
    become_subreaper,
    die_with_parent,
    keep_memory_private,
    set_name,
)
from tunemq_workers.logs import output_files
from tunemq_workers.processes.forkserver_messages import DUMP_SIGNAL
from tunemq_workers.processes.process_tree import MARK
from tunemq_workers.trial_process import seeding, thread_limits
from tunemq_workers.trial_process.spawned_processes import give_scripts_objects_by_value


def leave_the_forkserver(forkserver: int) -> None:
    """Make a process of its own of a fork of the forkserver, which has this pid."""
    with contextlib.suppress(OSError):  # the parent was faster
        os.setpgid(0, 0)
    keep_memory_private(False)  # its forkserver's may be; it is as the user's other processes are
    become_subreaper()
    die_with_parent(forkserver)
    # A forkserver that is sweeping forks processes of the usual priority, whatever its own was; one
    # that is better than usual only those who have the right to it get back.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, forkserver))
    # Short of memory, the kernel is to take a trial, and neither the forkserver nor the node.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"500")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Ctrl-C is for the script. A handler that does nothing, and not SIG_IGN, because programs
    # that the trial executes would inherit that.
    signal.signal(signal.SIGINT, _ignore)
    # multiprocessing would import the forkserver again as the main module of its children.
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    give_scripts_objects_by_value()


def _ignore(_signal: int, _frame: FrameType | None) -> None:
    pass


@dataclass(frozen=True, slots=True)
class TrialEnvironment:
    """What all hosts of a forkserver share.

    Args:
        sys_path: Where they import from.
        variables: What preloaded modules have set in the environment.
        libraries: What was preloaded and has threads to limit.
    """

    sys_path: list[str]
    variables: dict[str, str]
    libraries: thread_limits.LoadedLibraries

    def prepare(self, start: TrialSpec, *, process: str, gpus: tuple[str, ...]) -> None:
        """Set up everything for the trial ``start``, the first or the next of this process.

        ``process`` marks what the trial executes; ``gpus`` are the devices that it may see.

        Raises:
            OSError: its folder or output files cannot be made.
        """
        try:
            os.chdir(start.folder)
        except FileNotFoundError:
            os.makedirs(start.folder, exist_ok=True)
            os.chdir(start.folder)
        remove_leftovers(start.folder)  # of an attempt that was killed while it saved
        output_files.redirect(start.folder)
        faulthandler.enable(file=2)
        # In C, by whichever thread gets the signal: it needs no GIL. Other handlers of the user's
        # do not matter.
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
        given = start.environment.variables
        limit = thread_limits.for_resources(start.resources)
        _set_variables(
            self._variables(start, process, gpus) | thread_limits.variables(limit, given)
        )
        sys.path[:] = self.sys_path
        sys.argv[:] = [start.trial_name]
        set_name(start.trial_name)
        _set_limits(start.limits)
        self.libraries.limit(limit, given)
        seeding.seed_trial(start.seed, start.trial_number)

    def _variables(self, start: TrialSpec, process: str, gpus: tuple[str, ...]) -> dict[str, str]:
        given = start.environment.variables
        variables = {name: v for name, v in given.items() if not name.startswith("TUNEMQ_")}
        variables |= self.variables
        variables[MARK] = process
        if failpoints.VARIABLE in os.environ:
            variables[failpoints.VARIABLE] = os.environ[failpoints.VARIABLE]
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        elif not start.resources.get("gpu"):
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables


def _set_limits(limits: TrialLimitSpec) -> None:
    """Have the kernel hold what it counts for each process; what is executed inherits it."""
    _limit(resource.RLIMIT_CORE, limits.core_bytes)
    if limits.open_files:
        _limit(resource.RLIMIT_NOFILE, limits.open_files)


def _limit(kind: int, most: int) -> None:
    """Allow so much, as far as this process may allow itself."""
    _, hard = resource.getrlimit(kind)
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed))


def changed_variables(before: Mapping[str, str]) -> dict[str, str]:
    """What was set in this process's environment since; without the limits of threads, our own."""
    return {
        name: value
        for name, value in os.environ.items()
        if before.get(name) != value and name not in thread_limits.VARIABLES
    }


def _set_variables(wanted: dict[str, str]) -> None:
    """Make ``wanted`` the whole environment, by as few calls into C as it takes."""
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
