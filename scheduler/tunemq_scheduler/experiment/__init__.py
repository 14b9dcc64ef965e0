"""The life of an experiment: opening or restoring it, the loop, the algorithms, the end."""
