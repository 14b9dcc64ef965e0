"""Between the supervisor and an experiment's process: messages over a socket pair."""
