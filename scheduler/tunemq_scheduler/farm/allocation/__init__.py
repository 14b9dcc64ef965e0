"""Fair sharing: decides which experiment may use how much of each node, without clock and I/O.

`FairShareAllocator` receives the nodes, and the demands and usage of experiments; it answers with
offers. The parts, from the bottom:

  amounts                  requests, resource amounts, and their cost
  node_parts, ledger       an experiment's part of a node; all nodes, their taken and free parts
  members                  experiments' demands; owners' shares, lag and quotas
  allocation_state         the two together; which slots are being cleared for whom
  granting, idling         gives free slots in turn; takes unused ones back
  preemption               clears slots if none is free; victim_finder chooses them
  suspect_isolation        gives a suspect trial a node for itself
  allocation_reasons       explains why a trial waits
"""
