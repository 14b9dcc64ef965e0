"""Shows progress on a terminal: a live table, lines elsewhere, and the final summary."""
