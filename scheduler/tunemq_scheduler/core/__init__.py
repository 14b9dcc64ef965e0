"""The pure core: what happens to trials, with no clock, no randomness and no I/O."""
