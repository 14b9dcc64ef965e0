"""What a node asks of its machine: users, control groups, memory, libraries."""
