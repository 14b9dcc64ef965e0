"""Who may use how much of which node of a farm: decided here, without a clock and without I/O.

`FairShareAllocator` is told what nodes there are, what experiments want and what they hold; it
answers with offers. The parts, from the bottom:

    amounts, loads, parts   what a slot takes, and costs; an experiment's part of a node, by slots
    room, ledger            what fits where; all nodes and parts: what is taken, what is left
    members, accounts       what experiments want; what owners are entitled to, how far behind it
    turns, claims, plans    who is next; whose slots are being cleared for whom, and where best
    granting, clearing      room goes to whom it is due; it is made where there is none
    words                   why something waits
"""
