"""One experiment's life: opening or restoring it, the loop, its algorithms, its end."""
