"""Imports installed packages even if the user's folder has a module of the same name."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tunemq_shared.base.errors import ConfigError

#: Several threads may start searches, so a package may be half imported.
_importing = threading.Lock()


@contextmanager
def installed_packages_first(*packages: str) -> Iterator[None]:
    """Make imports prefer installed packages to modules beside the user's script.

    The scheduler shares a process with the script, whose folder may contain a ``celery.py``. Trials
    are unaffected: their processes use the script's own path.

    Raises:
        ConfigError: the script has already imported its own module of such a name.
    """
    with _importing:
        for name in packages:
            _refuse_shadow(name)
        before = sys.path.copy()
        sys.path[:0] = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        try:
            yield
        finally:
            sys.path[:] = before


def _refuse_shadow(name: str) -> None:
    module = sys.modules.get(name)
    # Each of these packages has a version; a script's own module hardly has one.
    if module is not None and not hasattr(module, "__version__"):
        raise ConfigError(
            f"{module.__file__} hides the installed package {name!r}, which the scheduler needs; "
            "rename it, or import it only inside the trainable."
        )
