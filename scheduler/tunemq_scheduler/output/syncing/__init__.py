"""Copies of everything but checkpoints to the storage: `SyncConfig`, syncers, their queue."""
