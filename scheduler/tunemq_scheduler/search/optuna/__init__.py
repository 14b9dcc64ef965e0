"""Optuna's samplers as a search algorithm."""
