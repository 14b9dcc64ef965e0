"""Tracks the checkpoints and objects that the journal still refers to."""
