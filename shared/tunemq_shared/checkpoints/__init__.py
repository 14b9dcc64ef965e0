"""Checkpoints: folders, manifests, and the stores that keep them."""
