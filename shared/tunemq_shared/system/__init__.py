"""Processes, files and folders, as Linux has them."""
