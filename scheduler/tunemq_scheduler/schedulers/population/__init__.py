"""Schedulers of a population of trials that learn from each other."""
