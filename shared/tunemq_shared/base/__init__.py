"""Errors, retries, pickling and text: what all other packages use."""
