"""The nodes that a scheduler knows: registration, leases, decoded batches of events."""
