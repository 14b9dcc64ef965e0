"""`StreamDecoder`: verifies stream entries and passes them to the node registry. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tunemq_scheduler.transport.deregistered_nodes import Deregistrations
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.nodes.node_registry import NOBODYS, NodeRegistry
from tunemq_scheduler.transport.redis.stream_reader import StreamEntry
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.broker import redis_keys


class StreamDecoder:
    """Verifies stream entries; a rejected one does not block those after it.

    Args:
        registry: processes the verified entries.
        signing: verifies them.
    """

    def __init__(self, registry: NodeRegistry, signing: SchedulerSigning) -> None:
        self._registry, self._signing = registry, signing
        self._departures = Deregistrations()

    def registrations(self, entries: Iterable[StreamEntry]) -> None:
        """Process entries of the nodes' stream."""
        for entry_id, fields in entries:
            said = self._signing.registration_entry(fields)
            if said is None:
                self._registry.commands.append(("XDEL", redis_keys.NODES, entry_id))
            elif said.is_deregistration:
                instance_id = self._registry.read_deregistration(entry_id, said.body)
                self._departures.add(instance_id, entry_id, "it took its leave")
            else:
                for instance_id in self._registry.read_registration(entry_id, said.body):
                    self._departures.add(instance_id, entry_id, redis_keys.STARTED_AGAIN)

    def batches(self, channel: ExperimentChannel, entries: Iterable[StreamEntry]) -> None:
        """Process entries of an experiment's stream."""
        for entry_id, fields in entries:
            batch, read = self._signing.batch(channel.events_key, fields), NOBODYS
            if batch is not None:
                read = self._registry.read_batch(channel, entry_id, batch)
            channel.was_read(entry_id, *read)

    def without(
        self, exhausted: Sequence[str], taken: Mapping[bytes, list[StreamEntry]]
    ) -> dict[bytes, list[StreamEntry]]:
        """Return the entries of all other streams; nodes send the events of these again."""
        for key in exhausted:
            text = (
                f"The stream {key} has an entry with a time in the future, so Redis accepts no"
                " others. A client that is no node of this farm may have write access to Redis."
            )
            self._count(key, "early", text)
        return {key: entries for key, entries in taken.items() if key.decode() not in exhausted}

    def removed(self, streams: list[str]) -> None:
        """Count entries that were deleted unread from these streams; empties the list."""
        for key in streams:
            text = (
                f"An entry of the stream {key} was longer than any message of a node: it is"
                " removed. A client that is no node of this farm may have write access to Redis."
            )
            self._count(key, "oversized", text)
        streams.clear()

    def _count(self, key: str, reason: str, text: str) -> None:
        kind = "registration" if key == redis_keys.NODES else "events"
        self._registry.rejections.add(kind, reason, text)

    def departed(self, unfinished: Iterable[bytes]) -> dict[str, str]:
        """Return dead nodes whose events are all read; see `Deregistrations.due`."""
        return self._departures.due(unfinished)
