"""The trial side: its session, its results, its context."""
