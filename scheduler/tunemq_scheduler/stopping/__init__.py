"""Stoppers: they decide when a trial, or the whole search, has run long enough."""
