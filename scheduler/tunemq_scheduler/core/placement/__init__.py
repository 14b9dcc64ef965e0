"""Where a trial may run: requests, nodes, devices, and the reasons against."""
