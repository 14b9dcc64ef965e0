"""A node's view of its machine: users, control groups, memory, libraries and credentials."""
