"""The state of trials: their table of transitions, who waits, which checkpoints each keeps."""
