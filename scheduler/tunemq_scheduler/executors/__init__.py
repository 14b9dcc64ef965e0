"""Where trials run: the contract, and ours: nodes behind Redis, this process, a simulation."""
