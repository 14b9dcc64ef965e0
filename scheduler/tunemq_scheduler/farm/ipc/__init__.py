"""Messages between the supervisor and an experiment's process, over a socket pair."""
