"""The state of trials: transitions, waiting trials, and retained checkpoints."""
