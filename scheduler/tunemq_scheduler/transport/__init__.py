"""How an experiment reaches its nodes: the executor, the desired state of each node, its events."""
