"""What the scheduler and the workers share; imports no other TuneMQ package."""
