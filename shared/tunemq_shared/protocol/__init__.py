"""Messages between scheduler and nodes, and from users of a farm."""
