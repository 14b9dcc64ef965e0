"""Trainables: classes and functions, what is attached to them, and the loop that runs them."""
