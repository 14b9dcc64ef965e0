"""The trials of a node: their processes, dependencies, limits, files and printed output."""
