"""Decides: which configuration is tried, where it runs, how long, and what is remembered of it."""
