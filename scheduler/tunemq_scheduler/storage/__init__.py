"""The folders of experiments, and access to their stored checkpoints."""
