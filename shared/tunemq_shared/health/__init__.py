"""How a process reports its health: status files, systemd, node metrics."""
