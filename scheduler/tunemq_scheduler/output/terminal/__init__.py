"""Progress on the terminal: a table, or lines where there is none, and the summary at the end."""
