"""A simulated farm, faults, and the auditor of journals, to test trial schedulers and searches on.

What a laptop cannot hold is simulated here in virtual time: nodes, trials' processes, a store, and
what befalls them. The core and the loop that run on it are the real ones.
"""
