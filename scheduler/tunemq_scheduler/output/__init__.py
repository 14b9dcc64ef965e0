"""Output of a search: result files, callbacks, terminal, and file repair after a crash."""
