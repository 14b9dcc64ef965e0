"""Code that runs inside a trial process: its environment, and its connection to the node."""
