"""Which checkpoints and objects the journal still refers to."""
