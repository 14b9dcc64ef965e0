"""The nodes as an experiment knows them: slots, nodes that fail, nodes that are away."""
