"""Redis: its address, its keys, its version, and settings that are dangerous."""
