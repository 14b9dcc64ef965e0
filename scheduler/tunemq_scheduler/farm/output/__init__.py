"""Events and printed output on their way through the supervisor."""
