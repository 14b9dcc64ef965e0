"""A node's checkpoints: its cache, and the queue of uploads of each trial."""
