"""Cleans up an experiment's store after the last turn of its search."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.storage.checkpoint_garbage_collector import CheckpointGarbageCollector
from tunemq_shared.base.errors import RunSuperseded, StoreError
from tunemq_shared.base.retrying import CancelToken, TransferCancelled
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.objects.store_address import without_settings
from tunemq_shared.system.folder_trees import remove_tree

#: Seconds to wait at the end of a search for a store that deletes nothing, and after an interrupt
#: for all deletions. A slow store may take longer, because nothing else would delete the rest.
TIMEOUT_S: Final = 10.0
SHORT_TIMEOUT_S: Final = 1.0
#: Seconds between checks whether the user no longer wants to wait.
_POLL_INTERVAL_S: Final = 0.05
#: The most remaining checkpoints that a notice names.
_NAMED: Final = 5


def settle_store(
    loop: ExperimentLoop,
    store: CheckpointStore,
    collector: CheckpointGarbageCollector,
    tell: Callable[[str], None],
    is_enough: Callable[[], bool],
    check: Callable[[CancelToken], None] = lambda _cancel: None,
    *,
    may_collect: bool = True,
) -> None:
    """Finish all deletions and remove leftovers; show a notice about what could not be deleted.

    No failure here ends a search in error: leftovers only use space.

    Args:
        loop: the experiment's loop, after its last turn.
        store: the search's store, which only the watchdog uses besides this function; closed here.
        collector: the pending deletions.
        tell: shows a line to the user.
        is_enough: whether the user no longer wants to wait; checked now and then.
        check: raises `RunSuperseded` if another run has the store.
        may_collect: whether the journal's copy in the store no longer refers to leftovers.
    """
    runner, plan = loop.runner, loop.plan
    within = (
        min(SHORT_TIMEOUT_S, plan.sync_timeout_s) if runner.interrupted else plan.sync_timeout_s
    )
    left = collector.finish(within, is_enough, without_success=TIMEOUT_S)
    for text in collector.notices():
        tell(text)
    place = without_settings(plan.store_address)
    if left:
        named = ", ".join(left[:_NAMED]) + (", ..." if len(left) > _NAMED else "")
        tell(f"Expired checkpoints that are still in {place}: {named}. They only take up space.")
    uploading = runner.uploading
    if uploading:
        who = "1 checkpoint has" if uploading == 1 else f"{uploading} checkpoints have"
        tell(f"{who} not reached {place}, and can be found in {plan.cache}.")
    elif plan.cache and loop.is_all_journalled:
        remove_tree(plan.cache)
    # During uploads, apparent leftovers may be needed soon. If the journal lacks the last turn, a
    # run that resumes from that journal may need them.
    is_quiet = may_collect and runner.is_finished and not (uploading or left or runner.interrupted)
    if (
        is_quiet
        and loop.is_all_journalled
        and (loop.has_leftovers or runner.stale)
        and not is_enough()
    ):
        try:
            with _called_off_once(is_enough) as cancel:
                check(CancelToken(TIMEOUT_S))
                store.collect(runner.live_checkpoints(), runner.is_busy, cancel)
        except RunSuperseded as error:
            tell(str(error))
        except TransferCancelled:
            tell(
                f"Leftovers of broken uploads in {place} were not removed, because time was short."
            )
        except StoreError as error:
            tell(f"Leftovers of broken uploads in {place} could not be removed: {error}")
    store.close()


@contextmanager
def _called_off_once(is_enough: Callable[[], bool]) -> Iterator[CancelToken]:
    cancel, is_over = CancelToken(), threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_INTERVAL_S):
            if is_enough():
                cancel.cancel()

    watcher = threading.Thread(target=watch, name="patience", daemon=True)
    watcher.start()
    try:
        yield cancel
    finally:
        is_over.set()
        watcher.join()
