"""Follows a log on a farm until it is complete, across restarts of the scheduler and Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from tunemq_scheduler.api.farm_answer_types import LogPage
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_shared.base.errors import NoScheduler, RedisUnavailable
from tunemq_shared.protocol.farm_requests import MAX_PAGE_BYTES, ReadLog

#: Pause after a read without new data.
_PAUSE_S: Final = 0.4
_RETRY_S: Final = 1.0


def log_pages(
    client: FarmClient, name: str, trial: str = "", *, offset: int = 0, identity: str = ""
) -> Iterator[LogPage]:
    """Yield the pages of a log as it is now, at least one.

    Raises:
        TuneError: see `FarmClient.ask`.
    """
    while True:
        page = client.ask(
            ReadLog(name=name, id=identity, trial=trial, offset=offset, limit=MAX_PAGE_BYTES),
            LogPage,
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
    identity: str = "",
    show: Callable[[bytes], None],
    tell: Callable[[str], None],
) -> LogPage:
    """Show a log as it grows; return its last page once it is complete.

    Args:
        identity: the experiment's id; a later one of this name is an error. Empty if unknown.
        show: receives the log's bytes.
        tell: receives a message when the farm becomes unreachable, and when it is reachable again.

    Raises:
        ConfigError: the experiment or trial does not exist (any more).
        RequestRejected: the log cannot be read.
        NoScheduler, RedisUnavailable: raised by the first read only; later reads wait.
    """
    is_first, is_away = True, False
    while True:
        try:
            for page in log_pages(client, name, trial, offset=offset, identity=identity):
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
                tell(f"{error} Waiting for the farm; experiments continue meanwhile.")
            time.sleep(_RETRY_S)
            continue
        if page.is_over and page.end >= page.size:
            return page
        time.sleep(_PAUSE_S)
