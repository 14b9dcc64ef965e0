"""A node's checkpoints: the cache on its disk, and each trial's upload queue."""
