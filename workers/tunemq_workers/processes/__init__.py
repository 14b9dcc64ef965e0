"""Processes and process trees: starting, supervising, limiting and killing them."""
