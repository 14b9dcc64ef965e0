"""The pure state machine `TrialRunner` and its state. No clock, no randomness, no I/O."""
