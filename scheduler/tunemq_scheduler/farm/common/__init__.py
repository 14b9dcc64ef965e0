"""Shared by the supervisor and experiment processes: the lease, run records, exit codes."""
