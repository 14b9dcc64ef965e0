"""A simulated farm, faults and a journal auditor, to test trial schedulers and searchers.

Nodes, trial processes, a store and their faults are simulated in virtual time, at a scale that
exceeds one machine. The core and the loop are the real ones.
"""
