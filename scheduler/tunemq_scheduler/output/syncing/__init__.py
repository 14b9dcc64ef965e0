"""Copies everything but checkpoints to the store: `SyncConfig`, syncers, and their queues."""
