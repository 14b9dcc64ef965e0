"""The simulator: trial schedulers and search algorithms in virtual time, over learning curves."""
