"""Placement of trials: requests, nodes, devices, and explanations of failed placement."""
