"""Trainables: classes and functions, their attachments, and the loop that runs them."""
