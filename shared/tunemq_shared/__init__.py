"""What the scheduler and the workers must agree on; imports nothing else of ours."""
