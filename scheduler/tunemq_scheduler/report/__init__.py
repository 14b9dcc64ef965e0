"""What people see of a search while it runs, and when it is over."""
