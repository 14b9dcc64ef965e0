"""What the supervisor and an experiment's process both use: the lease, run records, exit codes."""
