"""Importing what is installed although the user's folder holds a module of the same name."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tunemq_shared.base.errors import ConfigError

#: Searches may begin side by side, in threads: then a package may be there and not yet imported.
_importing = threading.Lock()


@contextmanager
def installed_packages_first(*packages: str) -> Iterator[None]:
    """Meanwhile installed packages are found before modules beside the user's script.

    The scheduler shares a process with the script, whose folder may hold a ``celery.py``. Trials
    are not concerned: they have processes of their own, with the script's own path.

    Raises:
        ConfigError: the script has imported its own module of such a name already.
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
    # Each of the packages says its version; a script's own module hardly does.
    if module is not None and not hasattr(module, "__version__"):
        raise ConfigError(
            f"{module.__file__} hides the installed package {name!r}, which the scheduler needs; "
            "rename it, or import it only inside the trainable."
        )
