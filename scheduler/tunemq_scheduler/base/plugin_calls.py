"""Calls user-written plug-ins: what they raise ends the experiment, never the process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tunemq_shared.base.errors import SearchFailed, TuneError

P = ParamSpec("P")
T = TypeVar("T")


def call_plugin(who: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a plug-in and return its result.

    Raises:
        SearchFailed: the plug-in raised; includes its traceback.
        TuneError: the plug-in raised a TuneMQ error, which is passed on.
    """
    try:
        return call(*args, **kwargs)
    except TuneError:
        raise
    except Exception as error:  # plug-in boundary: recorded as the end of the experiment
        told = traceback.format_exc()
        raise SearchFailed(f"{who} raised {type(error).__name__}: {error}\n{told}") from error
