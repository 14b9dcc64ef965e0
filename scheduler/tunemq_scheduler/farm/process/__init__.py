"""The process of one experiment on a farm, and how it is forked."""
