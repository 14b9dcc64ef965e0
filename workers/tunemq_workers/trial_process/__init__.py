"""Inside a trial's process: its environment, and its connection to the node."""
