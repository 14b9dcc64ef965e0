"""What the ``tunemq`` command does, a file for each group of its commands."""
