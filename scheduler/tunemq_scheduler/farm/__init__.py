"""`tunemq scheduler`: the service of a farm."""
