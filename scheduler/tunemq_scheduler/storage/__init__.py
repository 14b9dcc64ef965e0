"""The folders of experiments, and what becomes of stored checkpoints."""
