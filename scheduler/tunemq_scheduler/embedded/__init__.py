"""The embedded farm: a private Redis and one node, started and ended with the user's script."""
