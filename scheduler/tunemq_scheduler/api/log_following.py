"""Follows a log on a farm until what writes it is over, across restarts of scheduler and Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from tunemq_scheduler.api.farm_answers import LogPage
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_shared.base.errors import NoScheduler, RedisUnavailable
from tunemq_shared.protocol.farm_requests import MAX_PAGE_BYTES, ReadLog

#: Between two looks where nothing new came.
_PAUSE_S: Final = 0.4
_RETRY_S: Final = 1.0


def log_pages(
    client: FarmClient, name: str, trial: str = "", *, offset: int = 0
) -> Iterator[LogPage]:
    """The pages of a log as it is now, at least one.

    Raises:
        TuneError: see `FarmClient.ask`.
    """
    while True:
        page = client.ask(
            ReadLog(name=name, trial=trial, offset=offset, limit=MAX_PAGE_BYTES), LogPage
        )
        yield page
        if page.end >= page.size or not page.data:
            return
        offset = page.end


def follow(
    client: FarmClient,
    name: str,
    trial: str = "",
    *,
    offset: int = 0,
    show: Callable[[bytes], None],
    tell: Callable[[str], None],
) -> LogPage:
    """Show a log as it grows; returns its last page when nothing more will come.

    Args:
        show: gets what was printed.
        tell: gets a line for people when the farm cannot be reached, and when it is back.

    Raises:
        ConfigError: there is no such experiment or trial (any more).
        RequestRefused: it cannot be read.
        NoScheduler, WireUnavailable: from the first look only; later ones wait.
    """
    is_first, is_away = True, False
    while True:
        try:
            for page in log_pages(client, name, trial, offset=offset):
                if is_away:
                    is_away = False
                    tell("The farm answers again.")
                show(page.data)
                offset, is_first = page.end, False
        except (NoScheduler, RedisUnavailable) as error:
            if is_first:
                raise
            if not is_away:
                is_away = True
                tell(f"{error} Waiting for it; what runs goes on meanwhile.")
            time.sleep(_RETRY_S)
            continue
        if page.is_over and page.end >= page.size:
            return page
        time.sleep(_PAUSE_S)
