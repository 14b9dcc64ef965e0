"""How a process shows that it is well: status files, systemd, metrics of a node."""
