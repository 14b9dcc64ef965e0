"""Runs: the node process, its ear, its forkservers and the trial hosts."""
