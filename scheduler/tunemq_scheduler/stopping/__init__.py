"""Stoppers: when a trial, or the whole search, has had enough."""
