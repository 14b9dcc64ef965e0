"""Trial output: size-limited files, log policies, and the excerpts in failure reports."""
