"""Processes and process trees: supervised, watched, limited, and ended whole."""
