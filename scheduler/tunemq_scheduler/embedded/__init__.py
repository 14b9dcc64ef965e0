"""A private Redis and one node, started and ended with the user's script."""
