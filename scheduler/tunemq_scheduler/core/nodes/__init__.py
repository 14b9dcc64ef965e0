"""An experiment's view of nodes: slots, failing nodes, and nodes that are away."""
