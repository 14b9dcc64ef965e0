"""Runs: the node process, its consumer, its forkservers and the trial hosts."""
