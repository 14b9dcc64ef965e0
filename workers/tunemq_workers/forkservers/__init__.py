"""Forkservers: processes that import a user's libraries once and fork trial processes."""
