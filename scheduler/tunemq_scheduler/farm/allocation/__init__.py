"""Fair sharing: decides which experiment may use how much of each node, without clock and I/O.

`FairShareAllocator` receives the nodes, and the demands and usage of experiments; it answers with
offers. The parts, from the bottom:

  amounts, loads, node_parts   a slot's resources and its cost; an experiment's part of a node
  free_room, ledger            which node a request fits; all nodes, their taken and free parts
  members, accounts, quotas    experiments' demands; owners' shares, lag and limits
  turns, claims, plans         who is next; which slots are being cleared for whom
  granting, preemption         gives free slots; clears slots if none is free
  allocation_reasons           explains why a trial waits
"""
