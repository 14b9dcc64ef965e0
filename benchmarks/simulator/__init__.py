"""Comparisons of trial schedulers on the simulator, and the table that they use."""
