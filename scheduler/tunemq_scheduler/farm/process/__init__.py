"""The process of one experiment on a farm, and its forkserver."""
