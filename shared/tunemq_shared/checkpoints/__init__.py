"""Checkpoints: folders, manifests, and the stores that hold them."""
