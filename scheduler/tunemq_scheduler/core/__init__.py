"""The pure state machine: `TrialRunner` and what it knows. No clock, no randomness, no I/O."""
