"""Errors, retries, pickling and text: what everything else uses."""
