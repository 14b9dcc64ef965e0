"""The scheduler of a farm: a process of its own, on nodes that it did not start."""
