"""Chooses configurations, places their trials, decides how long each runs, and records results."""
