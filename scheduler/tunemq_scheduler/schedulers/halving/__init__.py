"""Trial schedulers that halve: at each milestone only the best fraction of trials continues."""
