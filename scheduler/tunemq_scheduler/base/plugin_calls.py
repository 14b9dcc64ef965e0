"""Calls user-written plug-ins: what they raise ends the experiment, never the process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tunemq_shared.base.errors import SearchFailed, TuneError

P = ParamSpec("P")
T = TypeVar("T")


def call_plugin(who: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a plug-in and return its result; end a child that it forked and that comes back.

    Such a child would continue the search beside its parent, with the same journal and connections.

    Raises:
        SearchFailed: the plug-in raised; includes its traceback.
        TuneError: the plug-in raised a TuneMQ error, which is passed on.
    """
    process = os.getpid()
    try:
        return call(*args, **kwargs)
    except TuneError:
        raise
    except Exception as error:  # plug-in boundary: recorded as the end of the experiment
        told = traceback.format_exc()
        raise SearchFailed(f"{who} raised {type(error).__name__}: {error}\n{told}") from error
    finally:
        if os.getpid() != process:
            # The standard error may hold text that the parent writes, too.
            os.write(
                2, f"{who} forked a process that left it; TuneMQ ends that process.\n".encode()
            )
            os._exit(os.EX_SOFTWARE)
