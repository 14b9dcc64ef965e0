"""A node's GPUs: discovery, locks, supervision and admission of trials."""
