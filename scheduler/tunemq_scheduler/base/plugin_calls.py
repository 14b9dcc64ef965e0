"""Calls of what users may write: what it raises ends its experiment, never the process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tunemq_shared.base.errors import SearchFailed, TuneError

P = ParamSpec("P")
T = TypeVar("T")


def call_plugin(who: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The answer of a plug-in.

    Raises:
        SearchFailed: it raised; with its traceback.
        TuneError: it raised one of ours, which says by itself what is wrong.
    """
    try:
        return call(*args, **kwargs)
    except TuneError:
        raise
    except Exception as error:  # plug-in boundary: recorded as the end of the experiment
        told = traceback.format_exc()
        raise SearchFailed(f"{who} raised {type(error).__name__}: {error}\n{told}") from error
