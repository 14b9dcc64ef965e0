"""Events and trial output on their way through the supervisor."""
