"""Processes, files and folders on Linux."""
