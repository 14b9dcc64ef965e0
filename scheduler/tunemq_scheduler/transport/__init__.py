"""Connects experiments to nodes: executors, desired state, event channels, and Redis."""
