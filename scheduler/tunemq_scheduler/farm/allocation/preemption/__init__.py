"""Preemption: takes slots back for waiting experiments, with as little loss as possible."""
