"""Shared by all parts of the scheduler: experiment plans, signals, installed packages."""
