"""What all layers of the scheduler use: the plan of an experiment, signals, installed packages."""
