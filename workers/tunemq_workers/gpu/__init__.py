"""GPUs of a node: found, locked, watched, and given to trials only when free."""
